"""The steps of an epoch: how many samples each takes from the order, and the value that asks for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepTask(NamedTuple):
    """One optimizer step to plan and build; pickles, and says all that a `BuildSpec` leaves open.

    Attributes:
        epoch, step: which.
        rows: its samples, int64 (num_samples,), where a torch sampler drew them; None where the order finds them.
    """

    epoch: int
    step: int
    rows: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatches:
    """How an epoch is cut into global batches.

    Attributes:
        size: positions of the order in each, over all ranks.
        drop_last: whether the remainder of an epoch is dropped; else the last global batch is smaller.
    """

    size: int
    drop_last: bool = False

    def count(self, num_positions: int) -> int:
        """Optimizer steps of an epoch."""
        full, rest = divmod(num_positions, self.size)
        return full + (1 if rest and not self.drop_last else 0)

    def bounds(self, step: int, num_positions: int) -> tuple[int, int]:
        """First position of a step, and the one behind its last. Raises IndexError outside the epoch."""
        count = self.count(num_positions)
        if not 0 <= step < count:
            raise IndexError(f"step {step} is outside the epoch of {count} steps")
        return step * self.size, min((step + 1) * self.size, num_positions)
