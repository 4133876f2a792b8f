"""Release kernels: the rank of each sample -> ranks above a load give up the excess, which goes to ranks below.

Samples are numbered by their position in descending order of cost; a released one has owner -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.assign.ranking import bit_length, list_members
from orchdata.native.assign.tournament import replay, tournament, winner
from orchdata.native.jit import kernel

FAR_ABOVE = 9  # Binary digits: a load is far above the target from 1/512 of it.
MAX_SEARCHES = 128  # Searches for a rank that can make room, in one pass.


@kernel
def release(descending: NDArray[np.int64], owner: NDArray[np.int32], loads: NDArray[np.int64], keep: int) -> None:
    """Take from each rank above `keep` the samples that bring it there: owner -1 for those. In place.

    First the largest that fit into the rank's excess and into the mean room of the ranks below: larger ones would bring
    those above the target. Then the smallest, until the excess is gone.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        owner: int32 (num_samples,), rank of each.
        loads: int64 (num_ranks,).
        keep: load that a rank may keep.
    """
    room = np.int64(0)
    lighter = 0
    for load in loads:
        if load < keep:
            room += keep - load
            lighter += 1
    largest = room // max(1, lighter)
    for position in range(descending.shape[0]):
        rank = owner[position]
        if loads[rank] > keep and descending[position] <= min(largest, loads[rank] - keep):
            owner[position] = -1
            loads[rank] -= descending[position]
    for position in range(descending.shape[0] - 1, -1, -1):
        rank = owner[position]
        if rank >= 0 and loads[rank] > keep:
            owner[position] = -1
            loads[rank] -= descending[position]


@kernel
def can_make_room(
    descending: NDArray[np.int64],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    offsets: NDArray[np.int64],
    members: NDArray[np.int32],
    position: int,
    target: int,
    otherwise: int,
) -> int:
    """Return the least loaded rank that is within the target with this sample after releasing all smaller ones."""
    best = np.int64(-1)
    for rank in range(loads.shape[0]):
        if best >= 0 and loads[rank] >= loads[best]:
            continue
        stays = loads[rank] + descending[position]
        for other in members[offsets[rank] : offsets[rank + 1]][::-1]:
            if other < position or stays <= target:
                break
            if owner[other] == rank:
                stays -= descending[other]
        if stays <= target:
            best = np.int64(rank)
    return best if best >= 0 else otherwise


@kernel
def make_room(
    descending: NDArray[np.int64],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    samples: NDArray[np.int32],
    position: int,
    target: int,
) -> None:
    """Release the smallest samples of the new rank of `position`, down to the target; none larger than that sample.

    Args:
        samples: int32, positions of the samples that the rank had at first, ascending.
    """
    rank = owner[position]
    for other in samples[::-1]:
        if loads[rank] > target and other > position and owner[other] == rank:
            owner[other] = -1
            loads[rank] -= descending[other]


@kernel
def place_released(
    descending: NDArray[np.int64],
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    ranks_per_node: int,
    target: int,
) -> None:
    """Give each released sample, from the largest, to the least loaded rank of its node if it fits there, else of all.

    If a sample brings even that rank far above the target, the rank releases its smallest ones in return, early enough
    to assign them later in the same pass.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        home: int32 (num_samples,), the rank that has each.
        owner: int32 (num_samples,), -1 for a released sample; changed in place.
        loads: int64 (num_ranks,), without the released samples; changed in place.
        ranks_per_node: consecutive ranks of a node; 1 if nodes do not matter.
        target: load up to which a sample fits.
    """
    num_ranks = loads.shape[0]
    rank_bits = bit_length(num_ranks - 1)
    rank_mask = np.int64((1 << rank_bits) - 1)
    leaves = 1 << rank_bits
    shift = max(0, bit_length(descending.sum()) + rank_bits - 62)
    offsets, members = list_members(home, np.bincount(home, minlength=num_ranks).astype(np.int32), 0)
    tree = np.empty(2 * leaves, np.int64)
    tournament(((loads >> shift) << rank_bits) | np.arange(num_ranks), tree)
    searches = MAX_SEARCHES
    for position in range(descending.shape[0]):
        if owner[position] >= 0:
            continue
        first = home[position] // ranks_per_node * ranks_per_node
        rank = winner(tree, first, min(first + ranks_per_node, num_ranks)) & rank_mask
        if loads[rank] + descending[position] > target:
            rank = tree[1] & rank_mask
        makes_room = loads[rank] + descending[position] - target > target >> FAR_ABOVE and searches > 0
        if makes_room:
            searches -= 1
            rank = can_make_room(descending, owner, loads, offsets, members, position, target, rank)
        owner[position] = rank
        loads[rank] += descending[position]
        if makes_room:
            make_room(descending, owner, loads, members[offsets[rank] : offsets[rank + 1]], position, target)
        replay(tree, leaves + rank, ((loads[rank] >> shift) << rank_bits) | rank)
