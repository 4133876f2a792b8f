"""Ranking kernels: ranks ordered by load, and the samples of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

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
def list_members(
    owner: NDArray[np.int32], counts: NDArray[np.int32], slack: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return lists of the positions of each rank's samples, ascending, with `slack` free entries after each.

    Samples with owner -1 are left out.

    Returns:
        offsets int64 (num_ranks + 1,) into members int32; the first counts[rank] entries from offsets[rank] are used.
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
def ranks_by_load(loads: NDArray[np.int64], threshold: int, above: bool) -> NDArray[np.int64]:
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
