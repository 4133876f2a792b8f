"""Dealing filled bins: costs (num_bins, num_phases) -> places, of which each `num_ranks` in a row are a micro-step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

MOST_SWAPS = 64
PAIRS = 1 << 22  # Looked at in all.


@kernel
def waits(costs: NDArray[np.int64], bins: NDArray[np.int64], num_ranks: int) -> int:
    """The sum over micro-steps and phases of the largest cost, with bins in this order."""
    total = np.int64(0)
    for first in range(0, bins.shape[0], num_ranks):
        for p in range(costs.shape[1]):
            largest = np.int64(0)
            for place in range(first, min(first + num_ranks, bins.shape[0])):
                largest = max(largest, costs[bins[place], p])
            total += largest
    return total


@kernel
def peaks_without(
    costs: NDArray[np.int64], bins: NDArray[np.int64], first: int, stop: int, place: int, added: int
) -> int:
    """The sum over phases of the largest cost in a micro-step with the bin `added` in the place of one."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        largest = costs[added, p]
        for each in range(first, stop):
            if each != place:
                largest = max(largest, costs[bins[each], p])
        total += largest
    return total


@kernel
def deal(costs: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Bins in the order of their places, so that those of a micro-step are alike: int64 (num_bins,).

    From the most costly; of several phases, sorted by their sum or by one of them, whichever waits least, and then bins
    that set a micro-step's pace change places with others while that helps. With one phase no order waits less.

    Args:
        costs: int64 (num_bins, num_phases), at least 0, whose sum is at most 2**62.
    """
    num_bins, num_phases = costs.shape
    together = np.zeros(num_bins, np.int64)
    for p in range(num_phases):
        together += costs[:, p]
    by_sum = np.argsort(-together, kind="mergesort")
    best, least = by_sum, waits(costs, by_sum, num_ranks)
    if num_phases == 1 or num_bins <= num_ranks:
        return best
    for p in range(num_phases):
        order = by_sum[np.argsort(-costs[by_sum, p], kind="mergesort")]
        found = waits(costs, order, num_ranks)
        if found < least:
            best, least = order, found
    return swapped(costs, best, num_ranks)


@kernel
def swapped(costs: NDArray[np.int64], bins: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """The same with swaps between micro-steps that lower what is waited for, of each peak the best, a few at most."""
    num_bins, num_phases = costs.shape
    room = np.int64(PAIRS)
    for _ in range(MOST_SWAPS):
        gain, one, two = np.int64(0), np.int64(-1), np.int64(-1)
        for first in range(0, num_bins, num_ranks):
            stop = min(first + num_ranks, num_bins)
            here = waits(costs, bins[first:stop], num_ranks)
            for p in range(num_phases):
                peak = first
                for place in range(first, stop):
                    if costs[bins[place], p] > costs[bins[peak], p]:
                        peak = place
                for start in range(0, num_bins, num_ranks):
                    if start == first:
                        continue
                    end = min(start + num_ranks, num_bins)
                    there = waits(costs, bins[start:end], num_ranks)
                    room -= (end - start) * (stop - first + end - start)
                    if room < 0:
                        return bins
                    for other in range(start, end):
                        less = here + there
                        less -= peaks_without(costs, bins, first, stop, peak, bins[other])
                        less -= peaks_without(costs, bins, start, end, other, bins[peak])
                        if less > gain:
                            gain, one, two = less, peak, other
        if gain == 0:
            break
        bins[one], bins[two] = bins[two], bins[one]
    return bins
