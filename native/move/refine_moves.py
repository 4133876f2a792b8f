"""Refinement kernels that move little: an assignment and the home ranks of samples -> balanced with few more moves.

Like `orchdata.native.assign.refine`, but among the exchanges that bring both ranks to the target it takes the one that
moves the least in addition: exchanging samples that have left home already is free, and some return home.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import SLACK, list_members, ranks_by_load
from orchdata.native.assign.refine import exchange
from orchdata.native.jit import kernel

WINDOW = 64  # Number of lightest ranks that each heavy rank tries,
SPREAD = 64  # and of all others, evenly spaced: twice as many in each round.
MAX_ROUNDS = 4
NOTHING = (1 << 63) - 1


@kernel
def extra_move(size: int, home: int, here: int, there: int) -> int:
    """Return what a move adds to the moved size: negative if the sample returns home."""
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
    samples: NDArray[np.int32],
    light: int,
    offered: NDArray[np.int32],
    least: int,
    most: int,
    may_move: bool,
) -> tuple[int, int, int]:
    """Return the exchange that takes from `least` to `most` off the heavy rank and moves the least in addition.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), price of moving each.
        home: int32 (num_samples,), the rank that had each sample at first.
        heavy, light: the two ranks.
        samples, offered: int32, positions of the samples of each, ascending.
        least, most: bounds of what the heavy rank loses, above 0.
        may_move: whether a sample may move without another in return.

    Returns:
        (size moved in addition, index in samples, index in offered or -1 for a move); NOTHING if no exchange fits.
    """
    best = np.int64(NOTHING)
    best_index = -1
    best_other = -1
    first = 0
    for index in range(samples.shape[0]):
        cost = descending[samples[index]]
        leaves = extra_move(sizes[samples[index]], home[samples[index]], heavy, light)
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
    members: NDArray[np.int32],
    heavy: int,
    partners: NDArray[np.int64],
    target: int,
) -> tuple[int, int, int, int]:
    """Return the cheapest exchange after which a heavy rank and one of `partners` are both at the target.

    Returns:
        (partner or -1, index in the samples of heavy, index in those of the partner or -1, samples looked at).
    """
    best = np.int64(NOTHING)
    chosen = np.int64(-1)
    index = -1
    other = -1
    work = 0
    samples = members[offsets[heavy] : offsets[heavy] + counts[heavy]]
    least = loads[heavy] - target
    for light in partners:
        most = target - loads[light]
        if most < least or light == heavy:
            continue
        start = offsets[light]
        may_move = start + counts[light] < offsets[light + 1]
        work += counts[heavy] + counts[light]
        offered = members[start : start + counts[light]]
        extra, index_found, other_found = cheapest_exchange(
            descending, sizes, home, heavy, samples, light, offered, least, most, may_move
        )
        if extra < best:
            best, chosen, index, other = extra, light, index_found, other_found
            if best <= 0:
                break
    return chosen, index, other, work


@kernel
def refine_with_few_moves(
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
        sizes: int64 (num_samples,), price of moving each.
        home: int32 (num_samples,), the rank that had each sample at first.
        owner: int32 (num_samples,), rank of each, changed in place.
        loads: int64 (num_ranks,), changed in place.
        counts: int32 (num_ranks,), changed in place.
        target: load at which a rank needs no more help.
        budget: samples to look at, about.

    Returns:
        The rest of the budget.
    """
    for turn in range(MAX_ROUNDS):
        offsets, members = list_members(owner, counts, SLACK)
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
                descending, sizes, home, loads, counts, offsets, members, heavy, partners, target
            )
            budget -= work
            if light >= 0:
                exchange(descending, owner, loads, counts, offsets, members, heavy, index, light, other)
    return budget
