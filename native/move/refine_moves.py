"""Refinement kernels that move little: an assignment and where its samples came from -> balanced, moving little more.

Like `orchdata.native.assign.refine`, but of the exchanges that bring both ranks to the target it takes the one that
moves the least in addition: samples that have left their rank anyway change places for free, and some come home.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import SLACK, list_members, ranks_by_load
from orchdata.native.assign.refine import exchange
from orchdata.native.jit import kernel

WINDOW = 64  # How many of the lightest ranks each heavy one is tried against,
SPREAD = 64  # and how many of all others, evenly: twice as many in each round.
MAX_ROUNDS = 4
NOTHING = (1 << 63) - 1


@kernel
def extra_move(size: int, home: int, here: int, there: int) -> int:
    """What moving a sample adds to what is moved: negative where it comes home."""
    if home == here:
        return size
    if home == there:
        return -size
    return np.int64(0)


@kernel
def cheapest_exchange(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    heavy: int,
    held: NDArray[np.int32],
    light: int,
    offered: NDArray[np.int32],
    least: int,
    most: int,
    may_move: bool,
) -> tuple[int, int, int]:
    """The exchange that takes from `least` to `most` off the heavy rank and moves the least in addition.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), what moving each takes.
        home: int32 (num_samples,), the rank that held each sample at first.
        heavy, light: the two ranks.
        held, offered: int32, the places each holds, ascending.
        least, most: bounds of what the heavy rank loses, above 0.
        may_move: whether a sample may move without another coming back.

    Returns:
        (what is moved in addition, index in held, index in offered or -1 for a move); NOTHING where no exchange fits.
    """
    best = np.int64(NOTHING)
    best_index = -1
    best_other = -1
    first = 0
    for index in range(held.shape[0]):
        cost = descending[held[index]]
        leaves = extra_move(sizes[held[index]], home[held[index]], heavy, light)
        if may_move and least <= cost <= most and leaves < best:
            best, best_index, best_other = leaves, index, -1
        # Both lists descend in cost: partners too large for this sample are too large for the next.
        while first < offered.shape[0] and descending[offered[first]] > cost - least:
            first += 1
        for other in range(first, offered.shape[0]):
            partner = descending[offered[other]]
            if partner < cost - most:
                break
            extra = leaves + extra_move(sizes[offered[other]], home[offered[other]], light, heavy)
            if extra < best:
                best, best_index, best_other = extra, index, other
    return best, best_index, best_other


@kernel
def cheapest_partner(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    places: NDArray[np.int32],
    heavy: int,
    partners: NDArray[np.int64],
    target: int,
) -> tuple[int, int, int, int]:
    """The cheapest exchange after which a heavy rank and one of `partners` are both at the target.

    Returns:
        (partner or -1, index into what heavy holds, index into what the partner holds or -1, samples looked at).
    """
    best = np.int64(NOTHING)
    chosen = np.int64(-1)
    index = -1
    other = -1
    work = 0
    held = places[offsets[heavy] : offsets[heavy] + counts[heavy]]
    least = loads[heavy] - target
    for light in partners:
        most = target - loads[light]
        if most < least or light == heavy:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1]
        work += counts[heavy] + counts[light]
        extra, index_found, other_found = cheapest_exchange(
            descending, sizes, home, heavy, held, light, places[start : start + counts[light]], least, most, may_move
        )
        if extra < best:
            best, chosen, index, other = extra, light, index_found, other_found
            if best <= 0:
                break
    return chosen, index, other, work


@kernel
def refine_thriftily(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    counts: NDArray[np.int32],
    target: int,
    budget: int,
) -> int:
    """Bring ranks above the target to it, each by one exchange at a time, in place; some may stay above.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), what moving each takes.
        home: int32 (num_samples,), the rank that held each sample at first.
        owner: int32 (num_samples,), rank of each, changed in place.
        loads: int64 (num_ranks,), changed in place.
        counts: int32 (num_ranks,), changed in place.
        target: load at which a rank needs no more help.
        budget: samples to look at, about.

    Returns:
        What is left of the budget.
    """
    for turn in range(MAX_ROUNDS):
        offsets, places = list_members(owner, counts, SLACK)
        heavy_ranks = ranks_by_load(loads, target, True)
        if heavy_ranks.shape[0] == 0:
            break
        light_ranks = ranks_by_load(loads, target, False)
        stride = 1 + light_ranks.shape[0] // (SPREAD << turn)
        partners = np.concatenate((light_ranks[:WINDOW], light_ranks[WINDOW::stride]))
        for heavy in heavy_ranks:
            if budget <= 0:
                return budget
            light, index, other, work = cheapest_partner(
                descending, sizes, home, loads, counts, offsets, places, heavy, partners, target
            )
            budget -= work
            if light >= 0:
                exchange(descending, owner, loads, counts, offsets, places, heavy, index, light, other)
    return budget
