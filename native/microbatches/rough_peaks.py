"""Rough prices of micro-steps: costs (num_items, num_phases) and bin of each item -> about what ranks wait for.

The price of a packing into micro-steps is known only after each is balanced, which takes long. Two numbers estimate it
quickly: the bounds of the phases are below any assignment, and longest first is above the result of a search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phase_refine import phase_peaks
from orchdata.native.assign.phases import dominant_phases, longest_first_by_phase, order_by_phase
from orchdata.native.jit import kernel


@kernel
def fits_alone(sizes: NDArray[np.int64], caps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the items next to which no other fits: bool (num_items,); sizes int64 (num_items, num_caps)."""
    alone = np.zeros(sizes.shape[0], np.bool_)
    for k in range(caps.shape[0] if sizes.shape[0] > 1 else 0):
        first = np.argmin(sizes[:, k])
        smallest, second = sizes[first, k], np.int64((1 << 63) - 1)
        for item in range(sizes.shape[0]):
            if item != first:
                second = min(second, sizes[item, k])
        for item in range(sizes.shape[0]):
            alone[item] |= sizes[item, k] > caps[k] - (second if item == first else smallest)
    return alone


@kernel
def sum_with_alone(peaks: NDArray[np.int64], costs: NDArray[np.int64], alone: NDArray[np.bool_]) -> int:
    """Return the sum over phases of the largest of `peaks`, int64 (num_phases,), and of the costs of items `alone`."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        peak = peaks[p]
        for item in range(costs.shape[0]):
            if alone[item]:
                peak = max(peak, costs[item, p])
        total += peak
    return total


@kernel
def bin_bound(costs: NDArray[np.int64], alone: NDArray[np.bool_], num_ranks: int) -> int:
    """Return a lower bound of what ranks wait for, over all phases, if some items fill a rank alone."""
    others = costs[~alone]
    free = num_ranks - (costs.shape[0] - others.shape[0])
    return np.int64(sum_with_alone(phase_bounds(others, max(np.int64(1), free), None), costs, alone))


@kernel
def items_of_bins(bins: NDArray[np.int32], num_bins: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Group items by bin, in their order: (offsets int64 (num_bins + 1,), items int32 (num_items,))."""
    offsets = np.zeros(num_bins + 1, np.int64)
    for chosen in bins:
        offsets[chosen + 1] += 1
    for b in range(num_bins):
        offsets[b + 1] += offsets[b]
    cursor = offsets[:num_bins].copy()
    items = np.empty(bins.shape[0], np.int32)
    for item in range(bins.shape[0]):
        items[cursor[bins[item]]] = item
        cursor[bins[item]] += 1
    return offsets, items


@kernel
def rough_peaks(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    bins: NDArray[np.int32],
    num_bins: int,
    num_ranks: int,
    primary: int,
) -> tuple[int, int]:
    """Return what ranks wait for in all bins: a lower bound, and the result of longest first by phase.

    Args:
        costs: int64 (num_items, num_phases).
        sizes: int64 (num_items, num_caps).
        caps: int64 (num_caps,), of a rank; they count only for items that fill one.
        bins: int32 (num_items,), from 0 to num_bins - 1.
        num_ranks: that share the items of a bin.
        primary: index of the phase that all items take part in.
    """
    low, high = np.int64(0), np.int64(0)
    offsets, items = items_of_bins(bins, num_bins)
    for b in range(num_bins):
        members = items[offsets[b] : offsets[b + 1]]
        mine, alone = costs[members], np.zeros(members.shape[0], np.bool_)
        for index in range(members.shape[0]):
            for k in range(caps.shape[0]):
                alone[index] |= sizes[members[index], k] >= caps[k]
        low += bin_bound(mine, alone, num_ranks)
        others = mine[~alone]
        free = max(np.int64(1), num_ranks - (mine.shape[0] - others.shape[0]))
        phase = dominant_phases(others, primary)
        order = order_by_phase(others, phase, primary)
        owner = longest_first_by_phase(others, order, phase, free, max(1, others.shape[0]), 0, None)
        high += sum_with_alone(phase_peaks(others, owner, free), mine, alone)
    return low, high
