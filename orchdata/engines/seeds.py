"""Seeds of worker processes, drawn and set as torch does: worker k of an iteration has its base seed plus k."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker


class WorkerSeeds:
    """The base seeds of a loader's iterations.

    torch's loader draws one at each `iter()`, but for persistent workers only at the first: workers that are started
    later, after an error or for a state, have seeds derived from it.

    Args:
        generator: seeds are drawn from it; None for torch's default generator.
        persistent: whether workers are kept from one iteration to the next.

    Attributes:
        later: the generator of the seeds of persistent workers that are started later.
    """

    def __init__(self, generator: torch.Generator | None, *, persistent: bool) -> None:
        self._generator = generator
        self._persistent = persistent
        self.later: torch.Generator | None = None

    def draw(self) -> int:
        """Draw the base seed of one more iteration."""
        if self.later is not None:
            return _draw(self.later)
        return self.follow(_draw(self._generator))

    def follow(self, base_seed: int) -> int:
        """Use this base seed for the next iteration: it is new, or a state has stored it."""
        if self.later is None and self._persistent:
            self.later = torch.Generator().manual_seed(base_seed)
        return base_seed


def seed_process(base_seed: int, number: int) -> int:
    """Set the random states of this process, worker `number`, as torch's workers have them. Returns its seed."""
    seed = base_seed + number
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, number))  # noqa: NPY002
    return seed


def _draw(generator: torch.Generator | None) -> int:
    """Draw a seed as torch's loader does at each `iter()`, with or without workers."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
