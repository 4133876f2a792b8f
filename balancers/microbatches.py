"""Microbatches: rank of each sample -> microbatch of each, the same number on all ranks, within caps on their size.

1F1B order: times (num_stages, num_microbatches) -> the order of microbatches that fills a pipeline best.

If microbatches differ, above all if stages differ in what is costly for them (the first has the image encoder), stages
wait for each other, and the order decides how long. Inside one optimizer step the order changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import (
    checked_caps,
    checked_costs,
    checked_count,
    checked_flag,
    checked_ranks,
    checked_ranks_count,
    checked_sizes,
)
from orchdata.native.jit import Ints, Ints32
from orchdata.native.microbatches import pipeline
from orchdata.native.microbatches.micro_steps import NOTHING_HELD
from orchdata.native.microbatches.microbatch import split
from orchdata.native.microbatches.pipeline import search


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
        microbatch, count = split(work, owner, num_ranks, columns, caps, wanted, in_step, NOTHING_HELD)
    else:
        pins = checked_ranks(pinned, wanted or max(1, len(work)), len(work), "pinned", least=-1)
        stay = (pins >= 0) & (owner >= 0)
        held = np.zeros((num_ranks, int(pins.max(initial=0)) + 1, 2 + len(caps)), np.int64)
        np.add.at(held, (owner[stay], pins[stay]), np.column_stack([work, np.ones_like(work), columns])[stay])
        _refuse_full(held[:, :, 2:], held[:, :, 1], caps, oversize == "own")
        movable = np.where(stay, np.int32(-1), owner)
        microbatch, count = split(
            work, movable, num_ranks, columns, caps, wanted, in_step, held if stay.any() else NOTHING_HELD
        )
        if len(microbatch):
            microbatch[stay] = pins[stay]
    if wanted and count > wanted:
        raise ValueError(
            f"num_microbatches={wanted} are too few for the samples within max_size={caps.tolist()}: {count} are"
            " enough; raise it, or raise max_size"
        )
    return microbatch, int(count)


def _refuse_oversize(sizes: Ints, caps: Ints, owner: Ints32) -> None:
    above = (sizes > caps) & (owner >= 0)[:, None]
    if above.any():
        sample, column = (int(index) for index in np.argwhere(above)[0])
        where = f" (column {column} of sizes)" if len(caps) > 1 else ""
        raise ValueError(
            f"sample {sample} has size {sizes[sample, column]}, above the cap of {caps[column]} of a microbatch{where}:"
            " raise the cap, give it a microbatch of its own (oversize='own'), or leave it out"
        )


def _refuse_full(sums: Ints, counts: Ints, caps: Ints, alone: bool) -> None:
    """Raise ValueError if pinned samples are above a cap in a microbatch that they share, or also if `alone` there."""
    above = np.argwhere((sums > caps).any(axis=2) & ((counts > 1) | (not alone)))
    if len(above):
        rank, microbatch = above[0].tolist()
        raise ValueError(
            f"pinned samples have sizes {sums[rank, microbatch].tolist()} in microbatch {microbatch} of rank {rank}, "
            f"above max_size={caps.tolist()}: raise it, or pin them to more microbatches"
        )


NUM_STARTS = 32
NUM_STEPS = 4_000
HEAT = 2.5  # Divided by the squared number of microbatches: few have deep valleys (measured at 8 to 32).


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchOrder:
    """An order of microbatches for a 1F1B pipeline.

    Attributes:
        order: int32 (num_microbatches,), the microbatch that runs at each position.
        makespan: time from the first forward to the last backward, in the unit of the given times.
        lower_bound: no order has a smaller makespan.
    """

    order: NDArray[np.int32]
    makespan: float
    lower_bound: float


def simulate_1f1b(forward_times: ArrayLike, backward_times: ArrayLike, order: ArrayLike | None = None) -> float:
    """Return the makespan of non-interleaved 1F1B (PipeDream-Flush, Narayanan et al. 2021; as in Megatron-LM).

    Stage s runs min(num_stages - s - 1, num_microbatches) forwards to warm up, then one forward and one backward in
    turn, then the remaining backwards. A forward waits for the forward of the same microbatch on the stage before; a
    backward for the backward on the stage after, or on the last stage for its own forward. Sending takes no time.

    Whole numbers are exact while the makespan is at most 2**53.

    Args:
        forward_times: numbers (num_stages, num_microbatches), finite, at least 0, in any unit.
        backward_times: the same.
        order: permutation of the microbatches, the one that runs at each position; by default 0, 1, 2, ...

    Raises:
        ValueError: times of other shapes or values, or an order that is no permutation.
    """
    forward, backward, num_stages = _checked_times(forward_times, backward_times)
    checked = _checked_order(order, len(forward) // num_stages)
    return float(pipeline.run_all(forward, backward, checked, np.empty(num_stages)))


def order_microbatches(forward_times: ArrayLike, backward_times: ArrayLike, *, seed: int = 0) -> MicrobatchOrder:
    """Return an order of microbatches with a small makespan under 1F1B, never worse than the given one.

    It is the best of the given order, the one after DistTrain, and 32 starts (by total time ascending, descending, as a
    pyramid and a valley, smallest first with a reserved tail, random), then 4,000 swaps and insertions under a falling
    threshold, fewer if the lower bound is reached. The same times and seed give the same order on every machine.

    The lower bound holds for whole numbers exactly; it is the largest, over stages, of the stage's work and the least
    that it waits before, between and after, and of the longest single microbatch. The true optimum may be far above it.

    Args:
        forward_times: numbers (num_stages, num_microbatches), finite, at least 0, in any unit.
        backward_times: the same.
        seed: at least 0, of the random starts and steps.

    Raises:
        ValueError: times of other shapes or values, or a negative seed.
    """
    forward, backward, num_stages = _checked_times(forward_times, backward_times)
    # Any seed becomes a state in [1, 2**32), neighbours far apart (Knuth's multiplicative hash).
    state = np.array([(checked_count(seed, "seed", 0) + 1) * 2_654_435_761 % (2**32 - 1) + 1], np.int64)
    heat = HEAT / (len(forward) // num_stages) ** 2
    order, makespan, bound = search(forward, backward, num_stages, NUM_STARTS, NUM_STEPS, heat, state)
    # The bound adds the same floats in another order, so rounding may put it above.
    return MicrobatchOrder(order.astype(np.int32), float(makespan), min(float(bound), float(makespan)))


def _checked_times(
    forward_times: ArrayLike, backward_times: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Return both as the kernels take them, flat with the stages of a microbatch adjacent, and the number of stages."""
    forward, backward = _checked(forward_times, "forward_times"), _checked(backward_times, "backward_times")
    if forward.shape != backward.shape:
        raise ValueError(
            f"forward_times and backward_times must have one shape (num_stages, num_microbatches), got {forward.shape}"
            f" and {backward.shape}"
        )
    with np.errstate(over="ignore"):
        total = float(forward.sum() + backward.sum())
    if total == np.inf:
        raise ValueError("forward_times and backward_times sum to more than float64 can represent: use a larger unit")
    return forward.T.ravel(), backward.T.ravel(), len(forward)


def _checked(times: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(times)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{name} must have shape (num_stages, num_microbatches) with at least one of each, got {array.shape}"
        )
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be numbers, got dtype {array.dtype}")
    checked = array.astype(np.float64)
    bad = ~(np.isfinite(checked) & (checked >= 0))
    if bad.any():
        stage, microbatch = np.unravel_index(int(bad.argmax()), bad.shape)
        raise ValueError(
            f"{name}[{stage}, {microbatch}] is {array[stage, microbatch]}; it must be a finite number of at least 0"
        )
    return checked


def _checked_order(order: ArrayLike | None, num_microbatches: int) -> Ints:
    if order is None:
        return np.arange(num_microbatches)
    array = np.asarray(order)
    if array.shape != (num_microbatches,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"order must have {num_microbatches} integers, one a microbatch, got shape {array.shape} of {array.dtype}"
        )
    counts = np.bincount(array[(array >= 0) & (array < num_microbatches)].astype(np.int64), minlength=num_microbatches)
    if (counts != 1).any():
        microbatch = int((counts != 1).argmax())
        raise ValueError(
            f"order must be a permutation of 0..{num_microbatches - 1}, but has {microbatch} {counts[microbatch]} times"
        )
    return array.astype(np.int64)
