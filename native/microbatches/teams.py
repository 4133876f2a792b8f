"""Teams in micro-steps: what a member pays at each size, and its tokens -> size, micro-step and first rank.

Micro-steps are filled one after another, each up to a load of its own: what the longest sequence that is left costs
in its cheapest team, or more. As in `native.assign.teams`, sizes are packed from the largest to the smallest, each sequence
into the fullest team in which it ends in time and its slices have room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.teams import cheapest, part_of
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
    """
    num_sequences, num_ranks = table.shape[0], cells.shape[1]
    chosen = np.full(num_sequences, -1)
    for sequence in range(num_sequences):
        if step[sequence] < 0:
            chosen[sequence] = cheapest(table, sizes, sequence, aim)[1]
    width_of = np.zeros(num_ranks, np.int64)
    for at in range(sizes.shape[0] - 1, -1, -1):
        width = sizes[at]
        for sequence in np.flatnonzero(chosen == at):
            cost, tokens, best = table[sequence, at], slices[sequence, at], np.int64(-1)
            for rank in range(0, num_ranks // width * width, width):
                fits = cells[0, rank] + cost <= aim and cells[1, rank] + tokens <= caps[0] and cells[2, rank] < caps[1]
                fits &= mixed or width_of[rank] == 0 or width_of[rank] == width
                if fits and (best < 0 or cells[0, rank] > cells[0, best]):
                    best = np.int64(rank)
            if best >= 0:
                cells[0, best : best + width] += cost
                cells[1, best : best + width] += tokens
                cells[2, best] += 1
                width_of[best : best + width] = width
                size[sequence], first[sequence], step[sequence] = width, best, number


@kernel
def fill_micro_steps(
    table: Ints,
    slices: Ints,
    sizes: Ints,
    num_ranks: int,
    caps: Ints,
    target: int,
    parts: int,
    most: int,
    mixed: bool,
    rest: tuple[int, int],
) -> tuple[int, Ints, Ints, Ints, Ints]:
    """Place sequences in as many micro-steps as they need, at most `most`.

    Args:
        table, slices: int64 (num_sequences, num_sizes), from the most costly sequence; at some size of each a slice is
            within the cap, and at others its cost is NEVER.
        caps: int64 (2,), of a rank in a micro-step: tokens, and counted samples.
        target: a micro-step is filled up to this load, or
        parts: up to so many `PARTS` of the cost of the longest sequence that is left, if that is more.
        rest: cost and tokens of the sequences that are not placed: whole ones, which fill the gaps.

    Returns:
        (about what ranks wait for, or -1 if sequences are left; size, first rank and micro-step of each sequence; the
        load that each micro-step is filled up to).
    """
    num_sequences = table.shape[0]
    size, first, step = np.ones(num_sequences, np.int64), np.zeros(num_sequences, np.int64), np.full(num_sequences, -1)
    aims, number, price = np.zeros(min(most, num_sequences), np.int64), np.int64(0), np.float64(0)
    work, per_token, ranks = np.float64(rest[0]), rest[0] / max(1, rest[1]), np.int64(0)
    while number < aims.shape[0] and step.min() < 0:
        aim = np.int64(target)
        for sequence in range(num_sequences):
            if step[sequence] < 0:
                aim = max(aim, part_of(table[sequence].min(), parts))
        cells = np.zeros((3, num_ranks), np.int64)
        fill_micro_step(table, slices, sizes, cells, caps, aim, mixed, number, size, first, step)
        room = np.float64(0)
        for rank in range(num_ranks):
            if mixed or cells[0, rank] == 0:
                room += min(np.float64(aim - cells[0, rank]), (caps[0] - cells[1, rank]) * per_token)
                ranks += 1
        taken = min(room, work)
        work -= taken
        price += max(np.float64(cells[0].max()), (cells[0].sum() + taken) / num_ranks)
        aims[number] = aim
        number += 1
    # What is left of the rest comes in further micro-steps, or on top of all that whole sequences can share.
    most_ranks = np.float64(num_ranks) if number < most else ranks / number
    is_held = most_ranks > 0 and (num_sequences == 0 or step.min() >= 0)
    estimate = np.int64(price + work / most_ranks) if is_held else np.int64(-1)
    return estimate, size, first, step, aims[:number]
