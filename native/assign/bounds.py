"""Bounds: costs -> the smallest makespan that any assignment could have."""

from __future__ import annotations

import numpy as np

from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

NO_PINS = np.empty(0, np.int32)  # Not None, which would compile every kernel twice.


@kernel
def strong_lower_bound(descending: Ints, num_ranks: int) -> int:
    """Return a lower bound of the makespan of any assignment: the mean, rounded up; and, as some rank has k+1 of the
    k*m+1 largest, m ranks, the sum of the k+1 smallest of those.
    """
    num_samples = descending.shape[0]
    sums = np.zeros(num_samples + 1, np.int64)
    for position in range(num_samples):
        sums[position + 1] = sums[position] + descending[position]
    bound = (sums[num_samples] + num_ranks - 1) // num_ranks
    extra = 0
    while extra * num_ranks < num_samples:
        last = extra * num_ranks
        bound = max(bound, sums[last + 1] - sums[last - extra])
        extra += 1
    return bound


@kernel
def equal_count_bound(descending: Ints, num_ranks: int) -> int:
    """Return a lower bound of the makespan with equal counts, at least k each. If the g largest are on different ranks,
    each of those has k-1 more, at best the g*(k-1) smallest of all: the mean over the g is a bound. Otherwise a rank
    has two of the g, and k-2 more.
    """
    num_samples = descending.shape[0]
    count = num_samples // num_ranks
    if count == 0:
        return descending[0] if num_samples > 0 else np.int64(0)
    bound = np.int64(0)
    together = np.int64(0)
    smallest = num_samples
    companions = np.int64(0)  # The cheapest k-2 samples.
    for position in range(num_samples - max(count - 2, 0), num_samples):
        companions += descending[position]
    for group in range(1, num_ranks + 1):
        together += descending[group - 1]
        for _companion in range(count - 1):
            smallest -= 1
            together += descending[smallest]
        spread = (together + group - 1) // group
        if group > 1 and count > 1:
            spread = min(spread, descending[group - 2] + descending[group - 1] + companions)
        bound = max(bound, spread)
    return bound


@kernel
def common_divisor(descending: Ints) -> int:
    """Return the greatest common divisor of all costs: loads are multiples of it."""
    divisor = np.int64(0)
    for position in range(descending.shape[0] - 1, -1, -1):
        other = descending[position]
        while other > 0:
            divisor, other = other, divisor % other
        if divisor == 1:
            break
    return divisor


@kernel
def pinned_bound(costs: Ints, pinned: Ints32, num_ranks: int) -> int:
    """Return a lower bound of the makespan with pinned samples. Their largest load; the level to which others fill all
    ranks above it, as water does; and, for the q ranks that hold least: some of the k*q+1 largest others is on another
    rank, or one of the q has k+1 of them.
    """
    held, others = np.zeros(num_ranks, np.int64), costs.copy()
    for sample in range(costs.shape[0]):
        if pinned[sample] >= 0:
            held[pinned[sample]] += costs[sample]
            others[sample] = 0
    descending = others[descending_order(others)]
    held.sort()
    sums = np.zeros(descending.shape[0] + 1, np.int64)
    sums[1:] = np.cumsum(descending)
    bound, filled = held[-1], sums[-1]
    for ranks in range(1, num_ranks + 1):
        filled += held[ranks - 1]
        level = (filled + ranks - 1) // ranks
        if ranks == num_ranks or level <= held[ranks]:
            bound = max(bound, level)
            break
    for ranks in range(1, num_ranks + 1):
        extra = 0
        while extra * ranks < descending.shape[0]:
            last = extra * ranks
            together = held[0] + sums[last + 1] - sums[last - extra]
            elsewhere = held[ranks] + descending[last] if ranks < num_ranks else together
            bound = max(bound, min(together, elsewhere))
            extra += 1
    return bound


@kernel
def phase_bounds(costs: Ints, num_ranks: int, pinned: Ints32) -> Ints:
    """Return a lower bound of the largest load of each phase, int64 (num_phases,); `pinned` is empty without pins."""
    bounds = np.empty(costs.shape[1], np.int64)
    for p in range(costs.shape[1]):
        column = costs[:, p].copy()
        bounds[p] = strong_lower_bound(column[descending_order(column)], num_ranks)
        if len(pinned) > 0:
            bounds[p] = max(bounds[p], pinned_bound(column, pinned, num_ranks))
    return bounds
