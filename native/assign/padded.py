"""Padded balancing kernels: lengths -> rank of each sample, where a rank costs its count times its longest sample.

Samples are named by their place in descending order of length; each rank holds consecutive places.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.costs import Coefficients, sequence_cost
from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order


@kernel
def aligned_costs(
    lengths: NDArray[np.int64],
    order: NDArray[np.int32],
    multiple_of: int,
    coefficients: Coefficients,
) -> NDArray[np.int64]:
    """Cost of one row as long as each sample, aligned up to `multiple_of`.

    Args:
        lengths: int64 (num_samples,), not too long for int64 once aligned.
        order: int32 (num_present,), samples by descending length; those of length 0 left out.
        multiple_of: at least 1.
        coefficients: quantised (linear, quadratic, constant, windows), from `CostModel.coefficients`.

    Returns:
        int64 (num_present,), from the largest.
    """
    linear, quadratic, constant, windows = coefficients
    costs = np.empty(order.shape[0], np.int64)
    previous = np.int64(-1)
    cost = np.int64(0)
    for place in range(order.shape[0]):
        length = lengths[order[place]]
        if length != previous:
            aligned = (length + multiple_of - 1) // multiple_of * multiple_of
            cost = np.int64(sequence_cost(aligned, linear, quadratic, constant, windows))
            previous = length
        costs[place] = cost
    return costs


@kernel
def fill(costs: NDArray[np.int64], num_ranks: int, capacity: int, limit: int) -> tuple[int, int, int]:
    """Let each rank in turn take as many of the longest samples left as its capacity allows.

    Args:
        costs: int64 (num_samples,), from the largest, at least 1.
        num_ranks: at least 1.
        capacity: largest load, at least the largest cost.
        limit: samples a rank may hold.

    Returns:
        (samples taken, largest load, smallest capacity above at which a rank would take more: all below fail alike).
    """
    num_samples = costs.shape[0]
    taken = np.int64(0)
    peak = np.int64(0)
    following = np.int64((1 << 63) - 1)
    for _rank in range(num_ranks):
        if taken == num_samples:
            break
        cost = costs[taken]
        count = min(np.int64(limit), capacity // cost, num_samples - taken)
        peak = max(peak, count * cost)
        if count < limit:
            following = min(following, (count + 1) * cost)
        taken += count
    return taken, peak, following


@kernel
def smallest_capacity(costs: NDArray[np.int64], num_ranks: int, limit: int) -> int:
    """Smallest load within which the ranks take all samples, by bisection over the loads that occur.

    Args:
        costs: int64 (num_samples,), from the largest, at least 1; num_samples * costs[0] within 2**62.
        num_ranks: at least 1.
        limit: samples a rank may hold; num_ranks * limit is at least num_samples.

    Returns:
        The largest load of the best assignment; 0 without samples.
    """
    num_samples = costs.shape[0]
    if num_samples == 0:
        return np.int64(0)
    # Without any padding the ranks would share this.
    low = max(costs[0], (costs.sum() + num_ranks - 1) // num_ranks)
    enough = num_samples * costs[0]
    width = 1 + (low >> 6)
    high = np.int64(0)
    while high == 0:
        taken, peak, following = fill(costs, num_ranks, min(low + width, enough), limit)
        if taken == num_samples:
            high = peak
        else:
            low = following
            width *= 2
    while low < high:
        taken, peak, following = fill(costs, num_ranks, low + (high - low) // 2, limit)
        if taken == num_samples:
            high = peak
        else:
            low = following
    return high


@kernel
def smallest_limit(costs: NDArray[np.int64], num_ranks: int, capacity: int, limit: int) -> int:
    """Smallest number of samples a rank may hold such that the ranks still take all within the capacity.

    Returns:
        From ceil(num_samples / num_ranks), but at least 1, to `limit`, at which they do.
    """
    num_samples = costs.shape[0]
    low = max(np.int64(1), np.int64((num_samples + num_ranks - 1) // num_ranks))
    high = max(low, np.int64(limit))
    # The smallest is often near the mean: double the distance before bisecting.
    width = np.int64(1)
    middle = low
    while low < high:
        taken, _peak, _following = fill(costs, num_ranks, capacity, middle)
        if taken == num_samples:
            high = middle
            width = np.int64(0)
        else:
            low = middle + 1
            width *= 2
        middle = min(low + width, high - 1) if width > 0 else low + (high - low) // 2
    return high


@kernel
def earliest_ends(costs: NDArray[np.int64], num_ranks: int, capacity: int, limit: int) -> NDArray[np.int64]:
    """Fewest places that the ranks before each rank must take for the others to take the rest.

    Returns:
        int64 (num_ranks + 1,); the first is 0 where the capacity and the limit can hold.
    """
    ends = np.empty(num_ranks + 1, np.int64)
    place = np.int64(costs.shape[0])
    ends[num_ranks] = place
    for rank in range(num_ranks - 1, -1, -1):
        end = place
        while place > 0 and end - place < limit and (end - place + 1) * costs[place - 1] <= capacity:
            place -= 1
        ends[rank] = place
    return ends


@kernel
def level(costs: NDArray[np.int64], num_ranks: int, capacity: int, limit: int) -> NDArray[np.int64]:
    """Share the places out so that loads are about the mean of what is left, and no rank is empty without need.

    Args:
        costs: int64 (num_samples,), from the largest.
        num_ranks: at least 1.
        capacity: largest load, and
        limit: largest number of samples; together they can hold.

    Returns:
        int64 (num_ranks + 1,): rank r holds the places from entry r to entry r + 1.
    """
    num_samples = costs.shape[0]
    ends = earliest_ends(costs, num_ranks, capacity, limit)
    rest = costs.sum()
    place = np.int64(0)
    ends[0] = 0
    for rank in range(num_ranks):
        others = num_ranks - rank - 1
        start = place
        if start < num_samples:
            cost = costs[start]
            most = min(np.int64(limit), capacity // cost, max(np.int64(1), num_samples - start - others))
            nearest = (rest // (others + 1) + cost // 2) // cost
            place = start + min(most, max(nearest, ends[rank + 1] - start, np.int64(1)))
        for taken in range(start, place):
            rest -= costs[taken]
        ends[rank + 1] = place
    return ends


@kernel
def solve_padded(
    lengths: NDArray[np.int64],
    num_ranks: int,
    max_samples: int,
    multiple_of: int,
    coefficients: Coefficients,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Assign samples to ranks so that the largest count times cost of the longest is the smallest there is.

    Args:
        lengths: int64 (num_samples,), at least 0 and, aligned, not too long for int64; the number of those above 0
            times the cost of the longest is within 2**62.
        num_ranks: at least 1.
        max_samples: samples a rank may hold; num_ranks * max_samples is at least the number of lengths above 0.
        multiple_of: lengths are aligned up to it; at least 1.
        coefficients: quantised (linear, quadratic, constant, windows), from `CostModel.coefficients`.

    Returns:
        (rank int32 (num_samples,), -1 for a length of 0; loads int64 (num_ranks,)).
    """
    order = descending_order(lengths)
    num_present = order.shape[0]
    while num_present > 0 and lengths[order[num_present - 1]] == 0:
        num_present -= 1
    order = order[:num_present]
    costs = aligned_costs(lengths, order, multiple_of, coefficients)
    limit = max(1, min(max_samples, num_present))
    capacity = smallest_capacity(costs, num_ranks, limit)
    limit = smallest_limit(costs, num_ranks, capacity, limit)
    ends = level(costs, num_ranks, capacity, limit)
    rank = np.full(lengths.shape[0], np.int32(-1))
    loads = np.zeros(num_ranks, np.int64)
    for holder in range(num_ranks):
        start, end = ends[holder], ends[holder + 1]
        if start < end:
            loads[holder] = (end - start) * costs[start]
        for place in range(start, end):
            rank[order[place]] = holder
    return rank, loads
