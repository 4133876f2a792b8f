"""Sorting: int64 costs (num_samples,) -> positions from the largest cost to the smallest, ties by position.

Checks in one pass: costs (num_samples,) -> the first entry that breaks the rules.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.jit import Ints, Ints32, kernel


@kernel
def descending_order(costs: Ints) -> Ints32:
    """Return positions sorted by (cost descending, position ascending), by a least-significant-digit radix sort: it is
    stable, so no unique key is needed, and the cost has all 63 bits.
    """
    num_samples = costs.shape[0]
    largest = np.int64(0)
    for sample in range(num_samples):
        largest = max(largest, costs[sample])
    # Wide digits need fewer passes, but each pass walks all buckets: narrow ones suit small batches.
    bits = 11 if num_samples >= 4096 else 8
    mask = np.int64((1 << bits) - 1)
    source = np.empty(num_samples, np.int32)
    target = np.empty(num_samples, np.int32)
    for sample in range(num_samples):
        source[sample] = sample
    starts = np.empty((1 << bits) + 1, np.int64)
    shift = 0
    while shift < 63 and (largest >> shift) > 0:
        starts[:] = 0
        for sample in range(num_samples):
            starts[mask - ((costs[sample] >> shift) & mask) + 1] += 1
        for digit in range(mask):
            starts[digit + 1] += starts[digit]
        for index in range(num_samples):
            sample = source[index]
            digit = mask - ((costs[sample] >> shift) & mask)
            target[starts[digit]] = sample
            starts[digit] += 1
        source, target = target, source
        shift += bits
    return source


@kernel
def present_descending(costs: Ints) -> tuple[Ints32, Ints]:
    """Return samples with a cost, from the largest: positions int32 (num_present,), costs int64 (num_present,)."""
    order = descending_order(costs)
    num_present = order.shape[0]
    while num_present > 0 and costs[order[num_present - 1]] == 0:
        num_present -= 1
    descending = np.empty(num_present, np.int64)
    for position in range(num_present):
        descending[position] = costs[order[position]]
    return order[:num_present], descending


@kernel
def first_invalid(costs: Ints, max_total: int) -> tuple[int, bool]:
    """Return (the first sample with a negative cost, or at which the running sum exceeds `max_total`, else -1; whether
    it does).
    """
    room = np.int64(max_total)
    for sample in range(costs.shape[0]):
        if costs[sample] < 0:
            return sample, False
        if costs[sample] > room:
            return sample, True
        room -= costs[sample]
    return -1, False
