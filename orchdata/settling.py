"""Settling: a part that failed on one rank -> its sample's labels masked on another, before the batch is handed out.

Only where phases are assigned apart, and only under on_error="skip": one number a step tells whether any part failed,
and where one did, `Batch.mask_failed` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from orchdata.batch import Batch
from orchdata.lost import name_lost


class Settling:
    """The data-parallel ranks that exchange features, among themselves: a gloo group of their own, whatever the trainer
    uses. All of them make theirs together, and settle the same steps in the same sequence.

    Args:
        ranks: their global ranks; a single one settles alone.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._group = None
        if len(ranks) > 1:
            self._group = dist.new_group(
                list(ranks),
                backend="gloo",
                use_local_synchronization=len(ranks) < dist.get_world_size(),  # Others need not take part.
            )

    def settle(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """A step's microbatches, without loss for samples that have failed parts. Raises RuntimeError where a rank is
        lost.
        """
        failed = torch.tensor([sum(_num_failed(batch) for batch in batches)])
        try:
            if self._group is not None:
                dist.all_reduce(failed, group=self._group)
            return [batch.mask_failed(self._group) for batch in batches] if failed.item() else list(batches)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank()} lost others at step {step}, when ranks tell which parts failed: {error}"
                f"{name_lost(self._group)}"
            ) from error


def _num_failed(batch: Batch) -> int:
    encoded = [part.valid for part in (batch.image, batch.audio) if part is not None and part.valid is not None]
    return sum(int((~valid).sum()) for valid in encoded)
