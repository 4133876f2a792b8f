"""Bounds: costs -> the smallest makespan that any assignment could have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel
from orchdata.native.sorting import descending_order


@kernel
def strong_lower_bound(descending: NDArray[np.int64], num_ranks: int) -> int:
    """Return a lower bound of the makespan of any assignment.

    The mean, rounded up; and, as some rank has k+1 of the k*m+1 largest, the sum of the k+1 smallest of those.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        num_ranks: m.

    Returns:
        The bound; 0 without samples.
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
def equal_count_bound(descending: NDArray[np.int64], num_ranks: int) -> int:
    """Return a lower bound of the makespan of any assignment with equal counts.

    If the g largest samples are on different ranks, each of those ranks has k-1 more, at best the g*(k-1) smallest of
    all: the mean over the g ranks is a bound. Otherwise a rank has two of the g largest, and k-2 more.

    Args:
        descending: int64 (num_samples,), costs from the largest; each rank has at least k = num_samples // num_ranks.
        num_ranks: at least 1.
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
def common_divisor(descending: NDArray[np.int64]) -> int:
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
def phase_bounds(costs: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return a lower bound of the largest load of each phase, int64 (num_phases,), of costs (num_items, num_phases)."""
    bounds = np.empty(costs.shape[1], np.int64)
    for p in range(costs.shape[1]):
        column = costs[:, p].copy()
        bounds[p] = strong_lower_bound(column[descending_order(column)], num_ranks)
    return bounds
