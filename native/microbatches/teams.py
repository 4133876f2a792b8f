"""Teams in micro-steps: what a member pays at each size, and its tokens -> size, micro-step and first rank.

Micro-steps are filled one after another, each up to a load of its own: what the longest sequence left costs in its
cheapest team, or more. As in `native.assign.teams`, sizes are packed from the largest to the smallest, each sequence
into the fullest team in which it ends in time and its slices have room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.teams import NEVER, cheapest, least_works, part_of
from orchdata.native.jit import kernel

Ints = NDArray[np.int64]


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
    """Place sequences in micro-step `number` up to the load `aim`: write `cells` and `placed`.

    Args:
        cells: int64 (3, num_ranks), the load, tokens and counted samples of each rank; of zeros.
        caps: int64 (2,), of tokens and of counted samples.
        raised: teams are by one size larger than the cheapest, so that there is room for longer sequences.
        placed: int64 (3, num_sequences), the size, first rank and micro-step of each; -1 for one that has none.
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
        (about what ranks wait for, or -1 if sequences are left; `placed`; the load that each micro-step is filled up
        to).
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
