"""Padded balancing kernels: lengths -> rank of each sample, where a rank costs its count times its longest sample.

Samples are numbered by their position in descending order of length; each rank has consecutive positions.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.costs import Coefficients, sequence_cost
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order


@kernel
def aligned_costs(lengths: Ints, order: Ints32, multiple_of: int, coefficients: Coefficients) -> Ints:
    """Return the cost of one row as long as each sample of `order`, aligned up, from the largest, int64
    (num_present,).
    """
    linear, quadratic, constant, windows = coefficients
    costs = np.empty(order.shape[0], np.int64)
    previous = np.int64(-1)
    cost = np.int64(0)
    for position in range(order.shape[0]):
        length = lengths[order[position]]
        if length != previous:
            aligned = (length + multiple_of - 1) // multiple_of * multiple_of
            cost = np.int64(sequence_cost(aligned, linear, quadratic, constant, windows))
            previous = length
        costs[position] = cost
    return costs


@kernel
def fill(costs: Ints, num_ranks: int, capacity: int, limit: int) -> tuple[int, int, int]:
    """Let each rank in turn take as many of the longest samples left as its capacity allows. Return (samples taken,
    largest load, smallest larger capacity at which a rank would take more: all below fail too).
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
def smallest_capacity(costs: Ints, num_ranks: int, limit: int) -> int:
    """Return the smallest capacity at which the ranks take all samples, by bisection over the loads that occur: the
    largest load of the best assignment; 0 without samples. num_samples * costs[0] is within 2**62.
    """
    num_samples = costs.shape[0]
    if num_samples == 0:
        return np.int64(0)
    # The even share without any padding.
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
def smallest_limit(costs: Ints, num_ranks: int, capacity: int, limit: int) -> int:
    """Return the smallest limit at which the ranks still take all within the capacity; `limit` is enough."""
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
def earliest_ends(costs: Ints, num_ranks: int, capacity: int, limit: int) -> Ints:
    """Return the fewest samples that the ranks before each rank must take for the others to take the rest, int64
    (num_ranks + 1,); the first is 0 if the capacity and the limit are possible.
    """
    ends = np.empty(num_ranks + 1, np.int64)
    position = np.int64(costs.shape[0])
    ends[num_ranks] = position
    for rank in range(num_ranks - 1, -1, -1):
        end = position
        while position > 0 and end - position < limit and (end - position + 1) * costs[position - 1] <= capacity:
            position -= 1
        ends[rank] = position
    return ends


@kernel
def level(costs: Ints, num_ranks: int, capacity: int, limit: int) -> Ints:
    """Share the samples out so that loads are about the mean of the rest, and no rank is empty without need: rank r has
    the positions from entry r to entry r + 1 of the result, int64 (num_ranks + 1,).
    """
    num_samples = costs.shape[0]
    ends = earliest_ends(costs, num_ranks, capacity, limit)
    rest = costs.sum()
    position = np.int64(0)
    ends[0] = 0
    for rank in range(num_ranks):
        others = num_ranks - rank - 1
        start = position
        if start < num_samples:
            cost = costs[start]
            most = min(np.int64(limit), capacity // cost, max(np.int64(1), num_samples - start - others))
            nearest = (rest // (others + 1) + cost // 2) // cost
            position = start + min(most, max(nearest, ends[rank + 1] - start, np.int64(1)))
        for taken in range(start, position):
            rest -= costs[taken]
        ends[rank + 1] = position
    return ends


@kernel
def solve_padded(
    lengths: Ints, num_ranks: int, max_samples: int, multiple_of: int, coefficients: Coefficients
) -> tuple[Ints32, Ints]:
    """Assign samples so that the largest count times cost of the longest is the smallest possible; the number of
    lengths above 0 times the cost of the longest is within 2**62. Return (rank, -1 for a length of 0; loads).
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
        for position in range(start, end):
            rank[order[position]] = holder
    return rank, loads
