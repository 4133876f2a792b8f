"""Failed parts: one that failed on a rank -> its sample's labels masked on another, before the batch is handed out.

    every step:            how many parts failed, and whether a rank gave up --all_reduce--> nothing, as a rule
    where one did:         flags of all parts --gather--> those that arrive here --> labels masked

Only where phases are assigned apart, and only under on_error="skip".
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from orchdata.batch.batch import Batch
from orchdata.ranks.gathering import gather, small_device
from orchdata.ranks.notes import name_call, name_missing


class FailedParts:
    """The data-parallel ranks that exchange features, among themselves. All of them mask the same steps in the same
    sequence, from the thread that iterates.

    Args:
        groups: process groups, one after another, that together reach these ranks and no others; none for one rank.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def mask_labels(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """A step's microbatches, without loss for samples that have failed parts.

        Raises RuntimeError where a rank gave up, with its error, or is lost.
        """
        failed, given_up = self._sum(step, sum(_num_failed(batch) for batch in batches), 0)
        if given_up:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in gather("", self._groups).items() if text)
            raise RuntimeError(f"other ranks gave up at step {step}: {said}")
        if not failed:
            return list(batches)
        told = list(gather([_flags(batch) for batch in batches], self._groups).values())
        return [
            batch.masked(
                {name: _arriving(name, route.rank, [of[place] for of in told]) for name, route in batch.routes.items()}
            )
            for place, batch in enumerate(batches)
        ]

    def give_up(self, step: int, error: Exception) -> None:
        """Let the others raise too, in place of waiting for this rank."""
        with contextlib.suppress(RuntimeError):  # of ranks that are lost: `error` is what this rank raises
            self._sum(step, 0, 1)
            gather(f"{type(error).__name__}: {error}", self._groups)

    def _sum(self, step: int, *values: int) -> list[int]:
        try:
            for group in self._groups:
                call = name_call("failed parts", group)
                total = torch.tensor(values, device=small_device(group))
                dist.all_reduce(total, group=group)
                values = tuple(total.tolist())
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} lost others at step {step}, when ranks tell which parts failed: {error}"
                f"{name_missing(group, call)}"
            ) from error
        return list(values)


Flags = dict[str, list[list[Any]]]


def _flags(batch: Batch) -> Flags:
    """Modality -> which parts are valid, as they are encoded, and how many go to each rank."""
    return {
        name: [_valid(batch, name).tolist(), route.parts.send_rows.tolist()] for name, route in batch.routes.items()
    }


def _arriving(name: str, rank: int, by_rank: Sequence[Flags]) -> torch.Tensor:
    """Which parts of `rank`'s samples are valid, as they arrive: bool (num_parts,)."""
    flags: list[bool] = []
    for told in by_rank:
        valid, counts = told[name]
        start = sum(counts[:rank])
        flags += valid[start : start + counts[rank]]
    return torch.tensor(flags, dtype=torch.bool)


def _num_failed(batch: Batch) -> int:
    return sum(int((~_valid(batch, name)).sum()) for name in batch.routes)


def _valid(batch: Batch, name: str) -> torch.Tensor:
    valid = batch.media[name].valid
    assert valid is not None  # there are routes
    return valid
