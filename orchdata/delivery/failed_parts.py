"""Failed parts: a part failed on one rank -> its sample's labels are masked on another, before the batch is delivered.

    every step:            the number of failed parts, and whether a rank gave up --all_reduce--> usually none
    if a part failed:      flags of all parts --gather--> those that arrive here --> labels masked

Only with assignment="per_phase", and only with on_error="skip".
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from orchdata.batch.batch import Batch
from orchdata.ranks.gathering import gather, small_device


class FailedParts:
    """Masks labels for failed parts, among the data-parallel ranks that exchange features. All of them mask the same
    steps in the same sequence, from the thread that iterates.

    Args:
        groups: process groups, one after another, that together reach these ranks and no others; none for one rank.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def mask_labels(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Return a step's microbatches, without loss for samples that have failed parts.

        Raises RuntimeError if a rank gave up, with its error, or is lost.
        """
        failed, given_up = self._sum(
            step, sum(int((~_valid(batch, name)).sum()) for batch in batches for name in batch.routes), 0
        )
        if given_up:
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in gather("", self._groups).items() if text)
            raise RuntimeError(f"other ranks gave up at step {step}: {errors}")
        if not failed:
            return list(batches)
        by_rank = list(gather([_flags(batch) for batch in batches], self._groups).values())
        return [
            batch.masked({name: _arriving(name, number, route.rank, by_rank) for name, route in batch.routes.items()})
            for number, batch in enumerate(batches)
        ]

    def give_up(self, step: int, error: Exception) -> None:
        """Let the other ranks raise too, so that they do not wait for this one."""
        with contextlib.suppress(RuntimeError):  # of lost ranks: this rank raises `error`
            self._sum(step, 0, 1)
            gather(f"{type(error).__name__}: {error}", self._groups)

    def _sum(self, step: int, *values: int) -> list[int]:
        try:
            for group in self._groups:
                total = torch.tensor(values, device=small_device(group))
                dist.all_reduce(total, group=group)
                values = tuple(total.tolist())
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} lost others at step {step}, when ranks report which parts failed: {error}"
            ) from error
        return list(values)


Flags = dict[str, list[list[Any]]]


def _flags(batch: Batch) -> Flags:
    """Return modality -> which parts are valid, in the encoder's order, and how many go to each rank."""
    return {
        name: [_valid(batch, name).tolist(), route.parts.send_rows.tolist()] for name, route in batch.routes.items()
    }


def _arriving(name: str, number: int, rank: int, by_rank: Sequence[Sequence[Flags]]) -> torch.Tensor:
    """Return which parts of `rank`'s samples are valid, in the order in which they arrive: bool (num_parts,).

    Args:
        number: of the microbatch.
        by_rank: for each rank, the flags of its microbatches.
    """
    flags: list[bool] = []
    for sent in by_rank:
        valid, counts = sent[number][name]
        start = sum(counts[:rank])
        flags += valid[start : start + counts[rank]]
    return torch.tensor(flags, dtype=torch.bool)


def _valid(batch: Batch, name: str) -> torch.Tensor:
    valid = batch.media[name].valid
    assert valid is not None  # a batch with routes has flags
    return valid
