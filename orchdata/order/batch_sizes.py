"""How many samples a step has: of the two sizes that a DataLoader takes, the one that was given."""

from __future__ import annotations

from typing import Final

from orchdata.balancers.checks import checked_count


class _NotGiven(int):
    """An integer that was not passed: reads like any other, in `help()` too, and is told from it by identity."""


DEFAULT_BATCH_SIZE: Final = _NotGiven(1)


def batch_sizes(
    batch_size: int | None, global_batch_size: int | None, has_batch_sampler: bool, num_ranks: int
) -> tuple[int | None, int]:
    """Samples per rank and step, None where that is not what was given, and samples per step over all ranks (with a
    batch sampler: batches of it).

    Raises ValueError for both sizes, or one outside its range.
    """
    if has_batch_sampler:
        # batch_size=1 is what a caller passes who copies torch's default.
        if batch_size != DEFAULT_BATCH_SIZE or global_batch_size is not None:
            raise ValueError("batch_sampler sets the batch sizes: leave batch_size and global_batch_size out")
        return None, 1
    if global_batch_size is not None:
        if batch_size is not None and batch_size is not DEFAULT_BATCH_SIZE:
            raise ValueError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size} both given: pass exactly one"
            )
        return None, checked_count(global_batch_size, "global_batch_size")
    if batch_size is None:
        return None, num_ranks
    batch_size = checked_count(batch_size, "batch_size")
    return batch_size, batch_size * num_ranks
