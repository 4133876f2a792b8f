"""Refinement kernels: an assignment -> a better one, by moves and swaps between heavy and light ranks.

Samples are numbered by their position in descending order of cost: comparing two positions compares their costs, and a
rank's list with ascending positions has descending costs.

Ranking kernels: ranks ordered by load, and the samples of each.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.jit import Ints, Ints32, kernel

WINDOWS = (16, 64)  # Numbers of lightest ranks that each heavy rank tries, in turn.
MAX_ROUNDS = 24
MAX_ATTEMPTS = 8


@kernel
def best_exchange(descending: Ints, heavy: Ints32, light: Ints32, gap: int, may_move: bool) -> tuple[int, int, int]:
    """Return the move or swap between two ranks that lowers the larger of their loads most: (gain, index in heavy,
    index in light or -1 for a move); gain 0 if nothing helps. `heavy` and `light` are positions, `gap` the difference
    of loads.
    """
    gain = np.int64(0)
    best_heavy = -1
    best_light = -1
    half = gap // 2
    partner = 0
    for index in range(heavy.shape[0]):
        cost = descending[heavy[index]]
        if may_move and min(cost, gap - cost) > gain:
            gain = min(cost, gap - cost)
            best_heavy = index
            best_light = -1
        # The ideal partner costs `half` less; both lists descend in cost, so one pass over both finds it.
        while partner < light.shape[0] and descending[light[partner]] > cost - half:
            partner += 1
        for other in range(max(0, partner - 1), min(light.shape[0], partner + 1)):
            difference = cost - descending[light[other]]
            if min(difference, gap - difference) > gain:
                gain = min(difference, gap - difference)
                best_heavy = index
                best_light = other
    return gain, best_heavy, best_light


@kernel
def replace_sorted(members: Ints32, size: int, index: int, position: int) -> None:
    """Replace members[index] by `position` in an ascending list of `size` entries."""
    while index > 0 and members[index - 1] > position:
        members[index] = members[index - 1]
        index -= 1
    while index + 1 < size and members[index + 1] < position:
        members[index] = members[index + 1]
        index += 1
    members[index] = position


@kernel
def best_partner(
    descending: Ints,
    loads: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    partners: Ints,
    target: int,
    limits: Ints,
) -> tuple[int, int, int, int]:
    """Return the best exchange of a heavy rank with any of `partners`, or the first that brings it to the target:
    (index in partners or -1, index in the samples of heavy, index in those of the partner or -1 for a move, samples
    looked at).
    """
    gain = np.int64(0)
    slot = -1
    index = -1
    other = -1
    work = 0
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    for candidate in range(partners.shape[0]):
        light = partners[candidate]
        gap = loads[heavy] - loads[light]
        if gap // 2 <= gain:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1] and counts[light] < limits[light]
        work += counts[heavy] + counts[light]
        lowered, index_found, other_found = best_exchange(
            descending, samples, members[start : start + counts[light]], gap, may_move
        )
        if lowered > gain:
            gain, slot, index, other = lowered, candidate, index_found, other_found
            if loads[heavy] - gain <= target:
                break
    return slot, index, other, work


@kernel
def exchange(
    descending: Ints,
    owner: Ints32,
    loads: Ints,
    counts: Ints32,
    offsets: Ints,
    members: Ints32,
    heavy: int,
    index: int,
    light: int,
    other: int,
) -> None:
    """Carry out a swap, or a move where `other` is -1, and update all arrays."""
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    start = offsets[light]
    given = samples[index]
    difference = descending[given]
    if other >= 0:
        taken = members[start + other]
        replace_sorted(members[start:], counts[light], other, given)
        replace_sorted(samples, counts[heavy], index, taken)
        owner[taken] = heavy
        difference -= descending[taken]
    else:
        members[start + counts[light]] = given
        counts[light] += 1
        replace_sorted(members[start:], counts[light], counts[light] - 1, given)
        samples[index:-1] = samples[index + 1 :]
        counts[heavy] -= 1
    owner[given] = light
    loads[heavy] -= difference
    loads[light] += difference


@kernel
def refine(
    descending: Ints, owner: Ints32, loads: Ints, counts: Ints32, target: int, limits: Ints, window: int, budget: int
) -> int:
    """Lower the loads above `target` by moves and swaps with the `window` lightest ranks, in place; the makespan never
    rises. Loads include what does not move, counts are of the samples given. Return the rest of the budget.
    """
    offsets, members = list_members(owner, counts, SLACK)
    for _round in range(MAX_ROUNDS):
        heavy_ranks = ranks_by_load(loads, target, True)
        if heavy_ranks.shape[0] == 0:
            return budget
        light_ranks = ranks_by_load(loads, target, False)
        partners = light_ranks[:window].copy()
        upcoming = partners.shape[0]
        progress = False
        for heavy in heavy_ranks:
            for _attempt in range(MAX_ATTEMPTS):
                if loads[heavy] <= target or budget <= 0:
                    break
                slot, index, other, work = best_partner(
                    descending, loads, counts, offsets, members, heavy, partners, target, limits
                )
                budget -= work
                if slot < 0:
                    # The makespan stays at least at this rank's load: the others may use the room up to it.
                    target = max(target, loads[heavy])
                    break
                progress = True
                light = partners[slot]
                exchange(descending, owner, loads, counts, offsets, members, heavy, index, light, other)
                # A full rank leaves its slot in the window to the next lightest.
                if upcoming < light_ranks.shape[0] and loads[light] >= loads[light_ranks[upcoming]]:
                    partners[slot] = light_ranks[upcoming]
                    upcoming += 1
        if not progress or budget <= 0:
            return budget
        if limits.max() >= 0:
            offsets, members = list_members(owner, counts, SLACK)
    return budget


@kernel
def search_budget(num_samples: int, num_ranks: int) -> int:
    """Return the number of samples to look at in refining: a few times as long as longest-first, on any machine."""
    return np.int64(100 * num_samples + 1000 * num_ranks)


@kernel
def lower_makespan(
    descending: Ints, owner: Ints32, loads: Ints, counts: Ints32, target: int, limits: Ints, budget: int
) -> int:
    """Refine an assignment in place until its makespan is at the target, or as close as the budget allows. Return its
    rest.
    """
    share = budget // 4
    for window in WINDOWS:
        if loads.max() > target and share > 0:
            budget -= share
            share = refine(descending, owner, loads, counts, target, limits, window, share)
            budget += share
    # If the target is out of reach, the first ranks that are helped use up the room. Bisecting for a target that can be
    # reached helps all of the heaviest ranks equally.
    low = np.int64(target)
    while budget > 0 and loads.max() - low > 1 + (low >> 11):
        middle = low + (loads.max() - low) // 2
        budget = refine(descending, owner, loads, counts, middle, limits, WINDOWS[-1], budget)
        if loads.max() > middle:
            low = middle
    # A giant may need samples that only a few ranks have, and these ranks need not be light.
    if loads.max() > target and budget > 0:
        budget = refine(descending, owner, loads, counts, target, limits, loads.shape[0], budget)
    return budget


SLACK = 4  # Free entries in each rank's list, so that a move does not rebuild all lists.


@kernel
def bit_length(value: int) -> int:
    """Return the number of bits of a non-negative integer."""
    bits = 0
    while value > 0:
        bits += 1
        value >>= 1
    return bits


@kernel
def list_members(owner: Ints32, counts: Ints32, slack: int) -> tuple[Ints, Ints32]:
    """Return lists of the positions of each rank's samples, ascending, with `slack` free entries after each: offsets
    (num_ranks + 1,) into members, of which the first counts[rank] from offsets[rank] are used.
    """
    num_ranks = counts.shape[0]
    offsets = np.empty(num_ranks + 1, np.int64)
    offsets[0] = 0
    for rank in range(num_ranks):
        offsets[rank + 1] = offsets[rank] + counts[rank] + slack
    cursor = offsets[:num_ranks].copy()
    members = np.empty(offsets[num_ranks], np.int32)
    for position in range(owner.shape[0]):
        rank = owner[position]
        if rank >= 0:
            members[cursor[rank]] = position
            cursor[rank] += 1
    return offsets, members


@kernel
def ranks_by_load(loads: Ints, threshold: int, above: bool) -> Ints:
    """Return ranks with a load above the threshold from the heaviest, or those not above it from the lightest."""
    num_ranks = loads.shape[0]
    rank_bits = bit_length(num_ranks - 1)
    mask = np.int64((1 << rank_bits) - 1)
    widest = np.int64(0)
    for rank in range(num_ranks):
        widest = max(widest, abs(loads[rank] - threshold))
    shift = max(0, bit_length(widest) + rank_bits - 63)
    keys = np.empty(num_ranks, np.int64)
    size = 0
    for rank in range(num_ranks):
        distance = loads[rank] - threshold
        if (distance > 0) == above:
            keys[size] = ((abs(distance) >> shift) << rank_bits) | (mask - rank)
            size += 1
    chosen = np.sort(keys[:size])[::-1]
    for index in range(size):
        chosen[index] = mask - (chosen[index] & mask)
    return chosen
