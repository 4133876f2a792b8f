"""Kernel of a peer that balancing is measured against: largest differencing.

Samples are named by their place in descending order of cost, as in `orchdata.native`. A state of largest differencing
divides some samples into `num_ranks` subsets; its row holds those that are not empty, by falling sum, as int64
(num_subsets, 3): sum, and the first and last place of the subset's list of samples.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def merge_states(
    first: NDArray[np.int64], second: NDArray[np.int64], num_ranks: int, following: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Two states as one: the largest subset of the first with the smallest of the second, and so on.

    Args:
        first, second: int64 (num_subsets, 3), two states.
        num_ranks: subsets of a state, empty ones included.
        following: int32 (num_samples,), the next place in a subset's list; written.

    Returns:
        The merged state; equal sums stay in the order of the first state's subsets.
    """
    num_first = first.shape[0]
    num_second = second.shape[0]
    merged = np.empty((min(num_ranks, num_first + num_second), 3), np.int64)
    for index in range(num_first):
        merged[index] = first[index]
        partner = num_ranks - 1 - index
        if partner < num_second:
            merged[index, 0] += second[partner, 0]
            merged[index, 2] = second[partner, 2]
            following[first[index, 2]] = second[partner, 1]
    slot = num_first
    for index in range(max(num_first, num_ranks - num_second), num_ranks):
        merged[slot] = second[num_ranks - 1 - index]
        slot += 1
    return merged[np.argsort(-merged[:, 0], kind="mergesort")]


@kernel
def largest_differencing(descending: NDArray[np.int64], num_ranks: int, group: int) -> NDArray[np.int32]:
    """Merge the two states of largest spread until one is left (Karmarkar and Karp 1982, for many subsets).

    Args:
        descending: int64 (num_samples,), costs from the largest, each at least 1.
        num_ranks: subsets to divide the samples into.
        group: samples of a first state, one in each of its subsets: 1, or num_ranks for equal counts.

    Returns:
        int32 (num_samples,): the rank of each sample.
    """
    num_samples = descending.shape[0]
    num_states = num_samples // group
    following = np.full(num_samples, np.int32(-1))
    owner = np.empty(num_samples, np.int32)
    states = []
    heap = []
    for state in range(num_states):
        row = np.empty((group, 3), np.int64)
        for index in range(group):
            place = state * group + index
            row[index, 0] = descending[place]
            row[index, 1] = place
            row[index, 2] = place
        states.append(row)
        smallest = row[-1, 0] if group == num_ranks else np.int64(0)
        heap.append((smallest - row[0, 0], np.int64(state)))
    heapify(heap)
    nothing = np.empty((0, 3), np.int64)
    while len(heap) > 1:
        first = heappop(heap)[1]
        second = heappop(heap)[1]
        merged = merge_states(states[first], states[second], num_ranks, following)
        states[first] = nothing
        states[second] = nothing
        states.append(merged)
        smallest = merged[-1, 0] if merged.shape[0] == num_ranks else np.int64(0)
        heappush(heap, (smallest - merged[0, 0], np.int64(len(states) - 1)))
    last = states[heap[0][1]]
    for rank in range(last.shape[0]):
        place = last[rank, 1]
        while place >= 0:
            owner[place] = rank
            place = following[place]
    return owner
