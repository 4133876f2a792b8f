"""Microbatches: rank of each sample -> microbatch of each, the same number on all ranks, within caps on their size."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import (
    checked_caps,
    checked_costs,
    checked_count,
    checked_flag,
    checked_ranks,
    checked_ranks_count,
    checked_sizes,
)
from orchdata.native.microbatches.microbatch import split


def split_microbatches(
    costs: ArrayLike,
    rank: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None = None,
    max_size: int | ArrayLike,
    num_microbatches: int | None = None,
    oversize: Literal["error", "own"] = "error",
    in_step: bool = False,
    pinned: ArrayLike | None = None,
) -> tuple[NDArray[np.int32], int]:
    """Split each rank's samples into microbatches that keep the caps and cost about the same.

    The count is the same on all ranks, and the smallest at which every rank can pack: longest first, best-fit
    decreasing, then a bounded search. A rank with few samples gets empty microbatches at the end.

    Args:
        costs: integers (num_samples,), levelled over the microbatches of a rank.
        rank: integers (num_samples,), from an assignment; a sample with -1 is left out.
        num_ranks: at least 1.
        sizes: integers (num_samples,) or (num_samples, num_caps), what the caps count; by default the costs.
        max_size: cap on the sum of sizes in a microbatch; one for each column of sizes.
        num_microbatches: their number; by default the fewest that fit.
        oversize: a sample above a cap is an error, or gets a microbatch of its own.
        in_step: ranks wait for each other after each microbatch, so the sum over microbatches of the largest cost of a
            rank counts. A quick search lowers it, never above that of False: where large samples force one microbatch
            to cost much, other ranks also do more of their work in it. Each rank's
            microbatches are numbered by descending cost. Otherwise those of a rank cost about the same, and are
            numbered by their first sample. A given `num_microbatches` is kept, although fewer might be better.
        pinned: integers (num_samples,), the microbatch of a sample that may not move, or -1; below `num_microbatches`,
            or below the number of samples. The other microbatches of a rank have the free numbers, from the first; with
            `in_step` in the order of what pinned samples cost in them.

    Returns:
        (microbatch int32 (num_samples,), -1 for samples left out; the number of microbatches, at least 1).

    Raises:
        ValueError: mismatched lengths, ranks out of range, a sample above the cap, pinned samples that do not fit into
            a microbatch together, or too few microbatches.
    """
    if oversize not in ("error", "own"):
        raise ValueError(f"oversize must be 'error' or 'own', got {oversize!r}")
    num_ranks = checked_ranks_count(num_ranks)
    work = checked_costs(costs)
    owner = checked_ranks(rank, num_ranks, len(work), "rank", least=-1)
    columns = checked_sizes(work if sizes is None else sizes, len(work))
    caps = checked_caps(max_size, columns.shape[1])
    if oversize == "error":
        _refuse_oversize(columns, caps, owner)
    in_step = checked_flag(in_step, "in_step")
    wanted = 0 if num_microbatches is None else checked_count(num_microbatches, "num_microbatches")
    if pinned is None:
        microbatch, count = split(work, owner, num_ranks, columns, caps, wanted, in_step, None)
    else:
        pins = checked_ranks(pinned, wanted or max(1, len(work)), len(work), "pinned", least=-1)
        stay = (pins >= 0) & (owner >= 0)
        held = np.zeros((num_ranks, int(pins.max(initial=0)) + 1, 2 + len(caps)), np.int64)
        np.add.at(held, (owner[stay], pins[stay]), np.column_stack([work, np.ones_like(work), columns])[stay])
        _refuse_full(held[:, :, 2:], held[:, :, 1], caps, oversize == "own")
        movable = np.where(stay, np.int32(-1), owner)
        microbatch, count = split(
            work, movable, num_ranks, columns, caps, wanted, in_step, held if stay.any() else None
        )
        if len(microbatch):
            microbatch[stay] = pins[stay]
    if wanted and count > wanted:
        raise ValueError(
            f"num_microbatches={wanted} are too few for the samples within max_size={caps.tolist()}: {count} are"
            " enough; raise it, or raise max_size"
        )
    return microbatch, int(count)


def _refuse_oversize(sizes: NDArray[np.int64], caps: NDArray[np.int64], owner: NDArray[np.int32]) -> None:
    above = (sizes > caps) & (owner >= 0)[:, None]
    if above.any():
        sample, column = (int(index) for index in np.argwhere(above)[0])
        where = f" (column {column} of sizes)" if len(caps) > 1 else ""
        raise ValueError(
            f"sample {sample} has size {sizes[sample, column]}, above the cap of {caps[column]} of a microbatch{where}:"
            " raise the cap, give it a microbatch of its own (oversize='own'), or leave it out"
        )


def _refuse_full(sums: NDArray[np.int64], counts: NDArray[np.int64], caps: NDArray[np.int64], alone: bool) -> None:
    """Raise ValueError if pinned samples are above a cap in a microbatch that they share, or also if `alone` there."""
    above = np.argwhere((sums > caps).any(axis=2) & ((counts > 1) | (not alone)))
    if len(above):
        rank, microbatch = above[0].tolist()
        raise ValueError(
            f"pinned samples have sizes {sums[rank, microbatch].tolist()} in microbatch {microbatch} of rank {rank}, "
            f"above max_size={caps.tolist()}: raise it, or pin them to more microbatches"
        )
