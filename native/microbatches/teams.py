"""Teams in micro-steps: what a member pays at each size, and its tokens -> size, micro-step and first rank.

Micro-steps are filled one after another, each up to a load of its own: what the longest sequence left costs in its
cheapest team, or more. As in `native.assign.teams`, sizes are packed from the largest to the smallest, each sequence
into the fullest team in which it ends in time and its slices have room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.teams import NEVER, cheapest, part_of
from orchdata.native.jit import kernel
from orchdata.native.microbatches.binpack import fits

Ints = NDArray[np.int64]


@kernel
def fill_micro_step(
    table: Ints,
    slices: Ints,
    sizes: Ints,
    cells: Ints,
    caps: Ints,
    aim: int,
    raised: int,
    mixed: bool,
    number: int,
    size: Ints,
    first: Ints,
    step: Ints,
) -> None:
    """Place sequences in micro-step `number` up to the load `aim`: write `cells`, `size`, `first` and `step`.

    Args:
        cells: int64 (3, num_ranks), the load, tokens and counted samples of each rank; of zeros.
        caps: int64 (2,), of tokens and of counted samples.
        raised: by so many sizes teams are larger than the cheapest, so that there is room for longer sequences.
    """
    num_ranks, left = cells.shape[1], np.flatnonzero(step < 0)
    chosen = np.empty(left.shape[0], np.int64)
    for index, sequence in enumerate(left):
        chosen[index] = cheapest(table, sizes, sequence, aim)[1]
        for _ in range(raised if chosen[index] > 0 else 0):
            above = chosen[index] + 1
            if above < sizes.shape[0] and table[sequence, above] <= aim:
                chosen[index] = above
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
            size[sequence], first[sequence], step[sequence] = width, team, number
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
) -> tuple[int, Ints, Ints, Ints, Ints]:
    """Place sequences in as many micro-steps as they need, at most `most`, each filled so that ranks wait least.

    Args:
        table, slices: int64 (num_sequences, num_sizes), from the most costly sequence; at some size of each a slice is
            within the cap, and at others its cost is NEVER.
        caps: int64 (2,), of a rank in a micro-step: tokens, and counted samples.
        targets: int64 (num_targets,), loads that a micro-step may be filled up to, if the longest sequence left costs
            no more; or else
        parts: int64 (num_parts,), up to so many `PARTS` of what that costs.
        rest: cost and tokens of the sequences that are not placed: whole ones, which fill the gaps.

    Returns:
        (about what ranks wait for, or -1 if sequences are left; size, first rank and micro-step of each sequence; the
        load that each micro-step is filled up to).
    """
    num_sequences = table.shape[0]
    size, first, step = np.ones(num_sequences, np.int64), np.zeros(num_sequences, np.int64), np.full(num_sequences, -1)
    aims, number, price = np.zeros(min(most, num_sequences), np.int64), np.int64(0), np.float64(0)
    work, per_token, ranks = np.float64(rest[0]), rest[0] / max(1, rest[1]), np.int64(0)
    works, least = np.empty(num_sequences, np.int64), np.empty(num_sequences, np.int64)
    for sequence in range(num_sequences):
        works[sequence], least[sequence] = cheapest(table, sizes, sequence, NEVER - 1)[2], table[sequence].min()
    while number < aims.shape[0] and step.min() < 0:
        longest = least[step < 0].max()
        was, lost = (size, first, step), np.float64(np.inf)
        for option in range(2 * (targets.shape[0] + parts.shape[0])):
            which, raised = option // 2 - targets.shape[0], option % 2
            aim = targets[option // 2] if which < 0 else part_of(longest, parts[which])
            if aim < longest:
                continue
            trial, cells = (was[0].copy(), was[1].copy(), was[2].copy()), np.zeros((3, num_ranks), np.int64)
            fill_micro_step(table, slices, sizes, cells, caps, aim, raised, mixed, number, trial[0], trial[1], trial[2])
            room, usable = np.float64(0), np.int64(0)
            for rank in range(num_ranks):
                if mixed or cells[0, rank] == 0:
                    room += min(np.float64(aim - cells[0, rank]), (caps[0] - cells[1, rank]) * per_token)
                    usable += 1
            taken = min(room, work)
            peak = max(np.float64(cells[0].max()), (cells[0].sum() + taken) / num_ranks)
            loss = peak - (works[trial[2] == number].sum() + taken) / num_ranks
            if loss < lost:
                lost = loss
                size, first, step = trial
                aims[number], paid, fluid, free = aim, peak, taken, usable
        price += paid
        work -= fluid
        ranks += free
        number += 1
    # What is left of the rest comes in further micro-steps, or on top of all that whole sequences can share.
    most_ranks = np.float64(num_ranks) if number < most else ranks / max(1, number)
    is_held = most_ranks > 0 and (num_sequences == 0 or step.min() >= 0)
    estimate = np.int64(price + work / most_ranks) if is_held else np.int64(-1)
    return estimate, size, first, step, aims[:number]


@kernel
def deal_late(
    order: NDArray[np.int32],
    sizes: Ints,
    limits: Ints,
    held: Ints,
    bins: NDArray[np.int32],
    rank: NDArray[np.int32],
) -> int:
    """Put each item, in `order`, into the cell with the least load of those that keep the caps.

    Args:
        sizes: int64 (num_items, num_caps + 1), the last is the load, which has no cap.
        limits: int64 (num_caps + 1,).
        held: int64 (num_micro_steps, num_ranks, num_caps + 1), changed.
        bins, rank: int32 (num_items,), written; -1 for an item that does not fit anywhere.

    Returns:
        The number of items that do not fit anywhere.
    """
    left = 0
    for item in order:
        bins[item] = rank[item] = -1
        for b in range(held.shape[0]):
            for r in range(held.shape[1]):
                if bins[item] >= 0 and held[b, r, -1] >= held[bins[item], rank[item], -1]:
                    continue
                if fits(held[b, r, :-1], sizes[item, :-1], limits[:-1], False):
                    bins[item], rank[item] = b, r
        left += bins[item] < 0
        if bins[item] >= 0:
            held[bins[item], rank[item]] += sizes[item]
    return left
