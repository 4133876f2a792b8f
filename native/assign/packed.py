"""Packed balancing kernels: costs -> rank of each sample, by longest-first greedy, refined if that is not enough.

A tournament tree of keys (num_ranks,) keeps the smallest as keys change. A key has its rank in its lowest bits, so the
root shows the winner; unlike a heap it has no branch to mispredict. MULTIFIT bisects a capacity and packs first-fit
decreasing (Coffman, Garey and Johnson 1978): good where ranks have two to four large samples each, the worst case of
longest-first greedy.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.assign.bounds import common_divisor, equal_count_bound, pinned_bound, strong_lower_bound
from orchdata.native.assign.refine import bit_length, lower_makespan, search_budget
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import present_descending


@kernel
def longest_first(descending: Ints, limit: int, extras: int, loads: Ints, counts: Ints32) -> Ints32:
    """Give each sample, from the largest, to the least loaded rank with room (LPT; Graham 1969). Ties go to the lower
    count, then rank. If load, count and rank do not fit into 63 bits together, loads are compared without their lowest
    bits.
    """
    num_samples = descending.shape[0]
    num_ranks = loads.shape[0]
    owner = np.empty(num_samples, np.int32)
    total = loads.sum()
    for position in range(num_samples):
        total += descending[position]
    rank_bits = bit_length(num_ranks - 1)
    low_bits = rank_bits + bit_length(min(limit + 1, num_samples + counts.sum()))
    largest = descending[0] if num_samples > 0 else np.int64(0)
    # Without limits the least loaded rank is never above the mean; with them it may reach the total.
    peak = total if limit < num_samples else max(loads.max(), total // num_ranks + largest)
    shift = max(0, bit_length(peak) + low_bits - 63)
    rank_mask = np.int64((1 << rank_bits) - 1)
    leaves = 1 << rank_bits
    tree = np.empty(2 * leaves, np.int64)
    keys = np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        keys[rank] = ((loads[rank] >> shift) << low_bits) | (np.int64(counts[rank]) << rank_bits) | rank
        if counts[rank] > limit:
            keys[rank] = NEVER
            extras -= 1
    tournament(keys, tree)
    for position in range(num_samples):
        rank = tree[1] & rank_mask
        # Ranks at the limit may take one more only while there are extras left.
        while counts[rank] == limit and extras == 0:
            replay(tree, leaves + rank, NEVER)
            rank = tree[1] & rank_mask
        if counts[rank] == limit:
            extras -= 1
        owner[position] = rank
        loads[rank] += descending[position]
        counts[rank] += 1
        key = ((loads[rank] >> shift) << low_bits) | (np.int64(counts[rank]) << rank_bits) | rank
        replay(tree, leaves + rank, key if counts[rank] <= limit else NEVER)
    return owner


@kernel
def longest_first_in_groups(descending: Ints, group: Ints, num_groups: int, num_members: int) -> Ints32:
    """Give each sample, from the largest, to the least loaded member of its `group`, int64 (num_samples,); ties to the
    lower count, then number. Return the member, int32 (num_samples,).
    """
    member = np.empty(descending.shape[0], np.int32)
    loads, counts = np.zeros((num_groups, num_members), np.int64), np.zeros((num_groups, num_members), np.int32)
    for position in range(descending.shape[0]):
        of, has = loads[group[position]], counts[group[position]]
        least = 0
        for other in range(1, num_members):
            if of[other] < of[least] or (of[other] == of[least] and has[other] < has[least]):
                least = other
        of[least] += descending[position]
        has[least] += 1
        member[position] = least
    return member


@kernel
def recount(descending: Ints, owner: Ints32, loads: Ints, counts: Ints32) -> None:
    """Write the loads and counts of an assignment into `loads` and `counts`."""
    loads[:] = 0
    counts[:] = 0
    for position in range(owner.shape[0]):
        loads[owner[position]] += descending[position]
        counts[owner[position]] += 1


@kernel
def solve(
    costs: Ints,
    num_ranks: int,
    max_samples: int,
    max_cost: int,
    equal_count: bool,
    tolerance: float,
    pinned: Ints32,
) -> tuple[Ints32, Ints, int]:
    """Balance samples over ranks: longest first; refined, then refitted, only while above the tolerance. `max_cost`:
    load to stay below if possible; 0 for none. Return (rank, -1 for a cost of 0 that is not pinned; loads; lower
    bound).
    """
    order, descending = present_descending(costs)
    num_present, all_costs = order.shape[0], descending
    bound = np.int64(strong_lower_bound(descending, num_ranks))
    held, held_counts = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int32)
    if len(pinned) > 0:
        bound = max(bound, np.int64(pinned_bound(costs, pinned, num_ranks)))
        others = costs.copy()
        for sample in range(costs.shape[0]):
            if pinned[sample] >= 0 and costs[sample] > 0:
                held[pinned[sample]] += costs[sample]
                held_counts[pinned[sample]] += 1
                others[sample] = 0
        order, descending = present_descending(others)
    num_samples = order.shape[0]
    limit = np.int64(min(max_samples, num_present))
    extras = np.int64(0)
    moves_limit = limit
    if equal_count:
        bound = max(bound, equal_count_bound(all_costs, num_ranks))
        limit = np.int64(num_present // num_ranks)
        extras = np.int64(num_present % num_ranks)
        moves_limit = np.int64(-1)
    target = bound + np.int64(bound * tolerance)
    if max_cost > 0:
        target = min(target, max_cost)
    loads, counts = held.copy(), held_counts.copy()
    owner = longest_first(descending, limit, extras, loads, counts)
    counts -= held_counts
    limits = moves_limit - held_counts.astype(np.int64)
    budget = search_budget(num_samples, num_ranks)
    if loads.max() > target:
        divisor = common_divisor(all_costs)
        target = max(target, (bound + divisor - 1) // divisor * divisor)
        budget = lower_makespan(descending, owner, loads, counts, target, limits, budget)
    if loads.max() > target and not equal_count:
        fitted = multifit(descending, num_ranks, bound, loads.max(), limit, 8, held, held_counts)
        if fitted.shape[0] > 0:
            owner = fitted
            recount(descending, owner, loads, counts)
            loads += held
            if loads.max() > target:
                lower_makespan(descending, owner, loads, counts, target, limits, budget)
    rank = np.full(costs.shape[0], np.int32(-1))
    if len(pinned) > 0:
        rank[:] = pinned
    for position in range(num_samples):
        rank[order[position]] = owner[position]
    return rank, loads, bound


NEVER = (1 << 63) - 1  # Key of a rank that may not win.


@kernel
def tournament(keys: Ints, tree: Ints) -> None:
    """Play all matches: the leaf of rank r is tree[len(tree) // 2 + r], each node has the smaller key of its children.
    `tree` is int64 (2 * leaves,), leaves a power of two and at least num_ranks.
    """
    leaves = tree.shape[0] // 2
    tree[:] = NEVER
    tree[leaves : leaves + keys.shape[0]] = keys
    for node in range(leaves - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@kernel
def replay(tree: Ints, node: int, key: int) -> None:
    """Write a leaf and replay its matches."""
    tree[node] = key
    while node > 1:
        key = min(key, tree[node ^ 1])
        node >>= 1
        tree[node] = key


@kernel
def winner(tree: Ints, first: int, stop: int) -> int:
    """Return the smallest key of the ranks from `first` to `stop` - 1, at least one."""
    left = first + tree.shape[0] // 2
    right = stop + tree.shape[0] // 2
    best = np.int64(NEVER)
    while left < right:
        if left & 1:
            best = min(best, tree[left])
            left += 1
        if right & 1:
            right -= 1
            best = min(best, tree[right])
        left >>= 1
        right >>= 1
    return best


@kernel
def first_fit(
    descending: Ints, num_ranks: int, capacity: int, limit: int, owner: Ints32, held: Ints, held_counts: Ints32
) -> bool:
    """Pack each sample into the first rank with room, next to what is `held`. Return False if one does not fit."""
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
    descending: Ints,
    num_ranks: int,
    lower: int,
    upper: int,
    limit: int,
    num_trials: int,
    held: Ints,
    held_counts: Ints32,
) -> Ints32:
    """Bisect the capacity between `lower` (may fit) and `upper` (need not be beaten). Return an assignment with a
    makespan below `upper`; empty if there is none.
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
