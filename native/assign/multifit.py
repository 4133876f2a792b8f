"""MULTIFIT kernel: descending costs and a range of capacities -> an assignment that fits the smallest one found.

Bisects the capacity and packs first-fit decreasing (Coffman, Garey and Johnson 1978). Good where ranks have two to four
large samples each, the worst case of longest-first greedy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def first_fit(
    descending: NDArray[np.int64],
    num_ranks: int,
    capacity: int,
    limit: int,
    owner: NDArray[np.int32],
    held: NDArray[np.int64],
    held_counts: NDArray[np.int32],
) -> bool:
    """Pack each sample into the first rank with room for it. Return False if one does not fit.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        num_ranks: bins.
        capacity: largest load of a rank.
        limit: most samples of a rank.
        owner: int32 (num_samples,), written.
        held, held_counts: int64 and int32 (num_ranks,), load and samples that each rank has already.
    """
    leaves = 1
    while leaves < num_ranks:
        leaves *= 2
    # tree[i] is the largest room below node i: the first rank with room is found in log2(num_ranks) steps.
    tree = np.full(2 * leaves, np.int64(-1))
    counts = held_counts.copy()
    for rank in range(num_ranks):
        tree[leaves + rank] = capacity - held[rank] if counts[rank] < limit else -1
    for node in range(leaves - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    for position in range(descending.shape[0]):
        cost = descending[position]
        if tree[1] < cost:
            return False
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < cost:
                node += 1
        rank = node - leaves
        owner[position] = rank
        counts[rank] += 1
        tree[node] = tree[node] - cost if counts[rank] < limit else -1
        node //= 2
        while node > 0:
            room = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == room:
                break
            tree[node] = room
            node //= 2
    return True


@kernel
def multifit(
    descending: NDArray[np.int64],
    num_ranks: int,
    lower: int,
    upper: int,
    limit: int,
    num_trials: int,
    held: NDArray[np.int64],
    held_counts: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Bisect the capacity between `lower` (may fit) and `upper` (need not be beaten).

    Other arguments as in `first_fit`.

    Returns:
        int32 (num_samples,): an assignment with a makespan below `upper`; empty if there is none.
    """
    num_samples = descending.shape[0]
    best = np.empty(0, np.int32)
    trial = np.empty(num_samples, np.int32)
    for _trial in range(num_trials):
        if lower >= upper:
            break
        capacity = lower + (upper - lower) // 2
        if first_fit(descending, num_ranks, capacity, limit, trial, held, held_counts):
            best = trial.copy()
            upper = capacity
        else:
            lower = capacity + 1
    return best
