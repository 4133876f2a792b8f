"""Teams: what a member pays at each size, (num_sequences, num_sizes) -> size, first rank, maybe micro-step of each.

Sizes are packed from the largest to the smallest, so the ranks of a team have equal loads when it comes: a team is one
block of an array. Its blocks are then halved for the next size, until they are ranks (nested, as buddies in memory).
Micro-steps are filled one after another, each up to a load of its own: what the longest sequence left costs in its
cheapest team, or more; each sequence goes into the fullest team in which it ends in time and its slices have room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.packed import longest_first
from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.sorting import descending_order

NEVER = 1 << 62  # Cost of a size that a sequence does not take.
FEW_SEQUENCES = 1024  # Up to this number all are packed in each trial; else those of a 16th of the bound or more.
PARTS = 10_000
# Parts above the bound of each trial's target, and of that target that a member may pay for one sequence.
TARGETS = (1, 3, 10, 20, 30, 40, 60, 80, 100, 120, 150, 180, 210, 250, 300, 350, 400, 600, 800, 1200, 2000, 4000)
SHARES = (10_000, 7_000)
RAISES = 6


@kernel
def part_of(value: int, parts: int) -> int:
    """Return so many of the `PARTS` of a value of at most 2**62, rounded down."""
    return value // PARTS * parts + value % PARTS * parts // PARTS


@kernel
def cheapest(table: Ints, sizes: Ints, sequence: int, most: int) -> tuple[int, int, int]:
    """Return (smallest size at which a member pays at most `most`, that of the least work, this work), -1 for none."""
    smallest, best, work = -1, -1, np.int64(NEVER)
    for size in range(sizes.shape[0]):
        if table[sequence, size] <= most:
            if smallest < 0:
                smallest = size
            if table[sequence, size] * sizes[size] < work:
                best, work = size, table[sequence, size] * sizes[size]
    return smallest, best, work


@kernel
def least_works(table: Ints, sizes: Ints) -> Ints:
    """Return the work of each sequence in its cheapest team, int64 (num_sequences,)."""
    works = np.empty(table.shape[0], np.int64)
    for sequence in range(table.shape[0]):
        works[sequence] = cheapest(table, sizes, sequence, NEVER - 1)[2]
    return works


@kernel
def teams_bound(table: Ints, sizes: Ints, num_ranks: int, least_works: Ints) -> int:
    """Return the smallest T at which, for every size s, the sequences that keep T only at s or more fit, each at its
    cheapest size within T, into floor(num_ranks / s) teams of s ranks; `least_works` are those at any T.
    """
    num_sequences, num_sizes = table.shape
    least = np.int64(0)
    for sequence in range(num_sequences):
        least = max(least, table[sequence].min())
    low = max(least, -(-least_works.sum() // num_ranks)) - 1
    # Sequences that are cheapest whole, and fit so at any T above: the others are looked at again for each T.
    is_whole = (table[:, 0] == least_works) & (table[:, 0] <= low)
    whole, others = least_works[is_whole].sum(), np.flatnonzero(~is_whole)
    works = np.empty(num_sizes, np.int64)
    step, high = np.int64(1), np.int64(-1)
    while high < 0 or high - low > 1:
        middle = low + step if high < 0 else low + (high - low) // 2
        works[:] = 0
        works[0] = whole
        for sequence in others:
            smallest, _, work = cheapest(table, sizes, sequence, middle)
            works[smallest] += work
        fits, work = True, np.int64(0)
        for size in range(num_sizes - 1, -1, -1):
            work += works[size]
            fits &= -(-work // (num_ranks // sizes[size] * sizes[size])) <= middle
        if fits:
            high = middle
        else:
            low = middle
            step = max(1, low >> 6) if step == 1 else 2 * step
    return high


@kernel
def pack_teams(
    table: Ints, sizes: Ints, num_ranks: int, orders: Ints32, level: Ints, target: int
) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Pack the first sequences of `orders`, with size indices `level`, each into the fullest team in which it ends by
    `target`, else the emptiest. Return (loads from the least; their ranks; first rank of each sequence; whether it ends
    late).
    """
    num_sizes, num_packed = orders.shape
    first, late = np.empty(num_packed, np.int64), np.zeros(num_packed, np.bool_)
    loads, blocks = np.empty(0, np.int64), np.empty(0, np.int64)
    for size in range(num_sizes - 1, -1, -1):
        # Each block becomes `parts` smaller ones. Ranks that no team of the size above has come first: they are idle.
        num_blocks = num_ranks // sizes[size]
        parts = sizes[size + 1] // sizes[size] if size + 1 < num_sizes else 1
        cut = parts * blocks.shape[0]
        smaller, names = np.zeros(num_blocks, np.int64), np.arange(cut, num_blocks + cut)
        for at in range(cut):
            smaller[num_blocks - cut + at] = loads[at // parts]
            names[num_blocks - cut + at] = blocks[at // parts] * parts + at % parts
        loads, blocks = smaller, names
        for sequence in orders[size]:
            if level[sequence] != size:
                continue
            cost = table[sequence, size]
            at = max(0, np.searchsorted(loads, target - cost, side="right") - 1)
            at = np.searchsorted(loads, loads[at])  # The first of equal ones.
            load, block = loads[at] + cost, blocks[at]
            while at + 1 < num_blocks and loads[at + 1] < load:
                loads[at], blocks[at] = loads[at + 1], blocks[at + 1]
                at += 1
            loads[at], blocks[at] = load, block
            first[sequence], late[sequence] = block * sizes[size], load > target
    return loads, blocks, first, late


@kernel
def choose_sizes(table: Ints, sizes: Ints, num_ranks: int, orders: Ints32, bound: int, rest: int) -> tuple[Ints, int]:
    """Return (index of the size of each packed sequence, the load that packing aims at). Towards each target, and for
    each part of it that a member may pay for one sequence, sequences have their cheapest size, and those that end late
    the next one, some times. The work `rest` of others is spread evenly.
    """
    num_packed, num_sizes = orders.shape[1], sizes.shape[0]
    level = np.zeros(num_packed, np.int64)
    peak, best, aim = np.int64(NEVER), level.copy(), np.int64(0)
    for trial in range(len(TARGETS) * len(SHARES)):
        target = bound + part_of(bound, TARGETS[trial // len(SHARES)])
        if peak <= target:
            break
        for sequence in range(num_packed):
            level[sequence] = cheapest(table, sizes, sequence, part_of(target, SHARES[trial % len(SHARES)]))[1]
            if level[sequence] < 0:
                level[sequence] = np.argmin(table[sequence])
        for _ in range(RAISES):
            loads, _, _, late = pack_teams(table, sizes, num_ranks, orders, level, target)
            found = max(loads[-1], -(-(loads.sum() + rest) // num_ranks))
            if found < peak:
                peak, best, aim = found, level.copy(), target
            raised = False
            for sequence in np.flatnonzero(late):
                larger = level[sequence] + 1
                while larger < num_sizes and table[sequence, larger] == NEVER:
                    larger += 1
                if larger < num_sizes:
                    level[sequence], raised = larger, True
            if peak <= target or not raised:
                break
    return best, aim


@kernel
def solve_teams(table: Ints, sizes: Ints, num_ranks: int) -> tuple[Ints32, Ints32, Ints, int]:
    """Return size and first rank of each sequence, loads and a lower bound. A size that is no cheaper than a smaller
    one is not taken. Some size of each sequence is not NEVER; the sum of the work is at most 2**62. `sizes` are int64
    (num_sizes,), powers of two from 1, ascending, at most `num_ranks`.
    """
    num_sequences, table = table.shape[0], table.copy()
    for sequence in range(num_sequences):
        for size in range(sizes.shape[0] - 1, 0, -1):
            if table[sequence, size] >= table[sequence, :size].min():
                table[sequence, size] = NEVER
    works = least_works(table, sizes)
    bound = np.int64(teams_bound(table, sizes, num_ranks, works))
    num_packed = num_sequences if num_sequences <= FEW_SEQUENCES else 0
    order = descending_order(works)
    table = table[order]
    for position in range(num_packed, num_sequences):
        if table[position, 0] > bound >> 4 or table[position, 0] > works[order[position]]:
            num_packed = position + 1
    rest = works[order[num_packed:]].sum()
    level = np.zeros(num_sequences, np.int64)
    orders = np.empty((sizes.shape[0], num_packed), np.int32)
    for size in range(sizes.shape[0]):
        orders[size] = descending_order(table[:num_packed, size].copy())
    level[:num_packed], aim = choose_sizes(table, sizes, num_ranks, orders, bound, rest)
    ordered, ranks, first, _ = pack_teams(table, sizes, num_ranks, orders, level[:num_packed], aim)
    loads = np.empty(num_ranks, np.int64)
    loads[ranks] = ordered
    # The small ones go to the least loaded rank, longest first.
    owner = np.empty(num_sequences, np.int32)
    owner[:num_packed] = first
    small = table[num_packed:, 0].copy()
    owner[num_packed:] = longest_first(small, small.shape[0], 0, loads, np.zeros(num_ranks, np.int32))
    team_size, first_rank = np.empty(num_sequences, np.int32), np.empty(num_sequences, np.int32)
    team_size[order] = sizes[level]
    first_rank[order] = owner
    return team_size, first_rank, loads, bound


@kernel
def fill_micro_step(
    table: Ints,
    slices: Ints,
    sizes: Ints,
    cells: Ints,
    caps: Ints,
    aim: int,
    raised: bool,
    mixed: bool,
    number: int,
    placed: Ints,
) -> None:
    """Place sequences in micro-step `number` up to the load `aim`: write `cells`, (3, num_ranks), load, tokens and
    counted samples, and `placed`, (3, num_sequences), size, first rank and micro-step or -1. `raised`: teams are one
    size larger than the cheapest, so that longer sequences have room.
    """
    num_ranks, left = cells.shape[1], np.flatnonzero(placed[2] < 0)
    chosen = np.empty(left.shape[0], np.int64)
    for index, sequence in enumerate(left):
        chosen[index] = cheapest(table, sizes, sequence, aim)[1]
        larger = chosen[index] + 1
        if raised and 0 < larger - 1 < sizes.shape[0] - 1 and table[sequence, larger] <= aim:
            chosen[index] = larger
    width_of = np.zeros(num_ranks, np.int64)
    for at in range(sizes.shape[0] - 1, -1, -1):
        width, mine = sizes[at], left[chosen == at]
        if mine.shape[0] == 0:
            continue
        # Teams by their load, from the least.
        teams = np.argsort(cells[0, : num_ranks // width * width : width], kind="mergesort") * width
        loads = cells[0][teams]
        for sequence in mine:
            cost, tokens = table[sequence, at], slices[sequence, at]
            place = np.searchsorted(loads, aim - cost, side="right") - 1
            while place >= 0:
                team = teams[place]
                fits = cells[1, team] + tokens <= caps[0] and cells[2, team] < caps[1]
                if fits and (mixed or width_of[team] == 0 or width_of[team] == width):
                    break
                place -= 1
            if place < 0:
                continue
            cells[0, team : team + width] += cost
            cells[1, team : team + width] += tokens
            cells[2, team] += 1
            width_of[team : team + width] = width
            placed[0, sequence], placed[1, sequence], placed[2, sequence] = width, team, number
            while place + 1 < loads.shape[0] and loads[place + 1] < cells[0, team]:
                loads[place], teams[place] = loads[place + 1], teams[place + 1]
                place += 1
            loads[place], teams[place] = cells[0, team], team


@kernel
def fill_micro_steps(
    table: Ints,
    slices: Ints,
    sizes: Ints,
    num_ranks: int,
    caps: Ints,
    targets: Ints,
    parts: Ints,
    most: int,
    mixed: bool,
    rest: tuple[int, int],
) -> tuple[int, Ints, Ints]:
    """Place sequences, from the most costly, in at most `most` micro-steps, each filled so that ranks wait least: up to
    one of `targets` if the longest sequence left costs no more, or to `parts` (of `PARTS`) of what that costs. `caps`:
    of tokens and counted samples; `rest`: cost and tokens of whole sequences, which fill the gaps. Return (about what
    ranks wait for, or -1 if sequences are left; `placed`; the load that each micro-step is filled up to).
    """
    num_sequences = table.shape[0]
    placed = np.full((3, num_sequences), -1)
    aims, number, price = np.zeros(min(most, num_sequences), np.int64), np.int64(0), np.float64(0)
    work, per_token = np.float64(rest[0]), rest[0] / max(1, rest[1])
    works, least = least_works(table, sizes), np.empty(num_sequences, np.int64)
    for sequence in range(num_sequences):
        least[sequence] = table[sequence].min()
    while number < aims.shape[0] and placed[2].min() < 0:
        longest = least[placed[2] < 0].max()
        was, lost = placed, np.float64(np.inf)
        for option in range(2 * (targets.shape[0] + parts.shape[0])):
            which, raised = option // 2 - targets.shape[0], option % 2 == 1
            aim = targets[option // 2] if which < 0 else part_of(longest, parts[which])
            if most < NEVER:  # Micro-steps are few: lower loads would leave sequences over.
                aim = max(aim, targets.min())
            if aim < longest:
                continue
            trial, cells = was.copy(), np.zeros((3, num_ranks), np.int64)
            fill_micro_step(table, slices, sizes, cells, caps, aim, raised, mixed, number, trial)
            room = np.float64(0)
            for rank in range(num_ranks):
                if mixed or cells[0, rank] == 0:
                    room += min(np.float64(aim - cells[0, rank]), (caps[0] - cells[1, rank]) * per_token)
            taken = min(room, work)
            peak = max(np.float64(cells[0].max()), (cells[0].sum() + taken) / num_ranks)
            loss = peak - (works[trial[2] == number].sum() + taken) / num_ranks
            if loss < lost:
                lost, placed = loss, trial
                aims[number], paid, fluid = aim, peak, taken
        price += paid
        work -= fluid
        number += 1
    # What is left of the rest comes on top, or in further micro-steps.
    is_placed = num_sequences == 0 or placed[2].min() >= 0
    estimate = np.int64(price + work / num_ranks) if is_placed else np.int64(-1)
    return estimate, placed, aims[:number]
