"""Dealing filled bins: costs (num_bins, num_phases) -> an order; `num_ranks` consecutive bins are a micro-step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

MOST_SWAPS = 64
PAIRS = 1 << 22  # The most pairs to look at.


@kernel
def waits(costs: NDArray[np.int64], bins: NDArray[np.int64], num_ranks: int) -> int:
    """Return the sum over micro-steps and phases of the largest cost, with bins in this order."""
    total = np.int64(0)
    for first in range(0, bins.shape[0], num_ranks):
        for p in range(costs.shape[1]):
            largest = np.int64(0)
            for position in range(first, min(first + num_ranks, bins.shape[0])):
                largest = max(largest, costs[bins[position], p])
            total += largest
    return total


@kernel
def peaks_without(
    costs: NDArray[np.int64], bins: NDArray[np.int64], first: int, stop: int, position: int, added: int
) -> int:
    """Return the sum over phases of the largest cost in a micro-step with one bin replaced by `added`."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        largest = costs[added, p]
        for each in range(first, stop):
            if each != position:
                largest = max(largest, costs[bins[each], p])
        total += largest
    return total


@kernel
def deal(costs: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return bins in an order in which those of a micro-step are alike: int64 (num_bins,).

    Bins are sorted by descending cost. With several phases they are sorted by the sum of phases or by one phase: the
    order in which ranks wait least is taken. Then the bin with the largest cost of a micro-step is exchanged with
    another bin while ranks wait less after it. With one phase, ranks wait least in the sorted order.

    Args:
        costs: int64 (num_bins, num_phases), at least 0, with a sum of at most 2**62.
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
        waiting = waits(costs, order, num_ranks)
        if waiting < least:
            best, least = order, waiting
    return swapped(costs, best, num_ranks)


@kernel
def swapped(costs: NDArray[np.int64], bins: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Swap bins between micro-steps to lower what ranks wait for: the best swap of each peak, a few at most."""
    num_bins, num_phases = costs.shape
    room = np.int64(PAIRS)
    for _ in range(MOST_SWAPS):
        gain, one, two = np.int64(0), np.int64(-1), np.int64(-1)
        for first in range(0, num_bins, num_ranks):
            stop = min(first + num_ranks, num_bins)
            here = waits(costs, bins[first:stop], num_ranks)
            for p in range(num_phases):
                peak = first
                for position in range(first, stop):
                    if costs[bins[position], p] > costs[bins[peak], p]:
                        peak = position
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
