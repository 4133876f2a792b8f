"""1F1B order: times (num_stages, num_microbatches) -> the order of microbatches that fills a pipeline best.

If microbatches differ, above all if stages differ in what is costly for them (the first has the image encoder), stages
wait for each other, and the order decides how long. Inside one optimizer step the order changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_count
from orchdata.native.microbatches import pipeline
from orchdata.native.microbatches.pipeline_search import search

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


def _checked_order(order: ArrayLike | None, num_microbatches: int) -> NDArray[np.int64]:
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
