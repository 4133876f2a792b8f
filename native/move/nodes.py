"""Node kernels: an assignment and who holds each sample -> one as balanced in which fewer leave their node.

Samples that move anyway change places with each other; none that stays is touched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

PASSES = 2


@kernel
def roomiest(loads: NDArray[np.int64], cost: int, ceiling: int, holder: int, first: int, stop: int) -> int:
    """Where a sample fits: its holder, else the least loaded rank from `first` to `stop` - 1; -1 for nowhere."""
    if loads[holder] + cost <= ceiling:
        return holder
    best = -1
    for rank in range(first, stop):
        if loads[rank] + cost <= ceiling and (best < 0 or loads[rank] < loads[best]):
            best = rank
    return best


@kernel
def stay_on_nodes(
    descending: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    ranks_per_node: int,
    ceiling: int,
) -> None:
    """Bring samples that have left their node back to it: where there is room, or for another moved one. In place.

    What moves altogether never grows.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), what moving each takes.
        held: int32 (num_samples,), the rank that holds each.
        owner: int32 (num_samples,), rank of each.
        loads: int64 (num_ranks,).
        ranks_per_node: consecutive ranks of a node.
        ceiling: load that no rank may exceed.
    """
    num_ranks = loads.shape[0]
    moved = np.flatnonzero(owner != held)
    node = owner[moved] // ranks_per_node
    # Moved samples by the node they are on; one that is brought back to room leaves a stale entry.
    slots = moved[np.argsort(node, kind="mergesort")]
    offsets = np.zeros((num_ranks - 1) // ranks_per_node + 2, np.int64)
    offsets[1:] = np.cumsum(np.bincount(node, minlength=offsets.shape[0] - 1))
    for _turn in range(PASSES):
        for here in range(slots.shape[0]):
            place = slots[here]
            rank, cost, home = owner[place], descending[place], held[place] // ranks_per_node
            if rank // ranks_per_node == home:
                continue
            first = home * ranks_per_node
            to = roomiest(loads, cost, ceiling, held[place], first, min(first + ranks_per_node, num_ranks))
            if to >= 0:
                owner[place] = to
                loads[rank] -= cost
                loads[to] += cost
                continue
            most = np.int64(0)
            there = -1
            for slot in range(offsets[home], offsets[home + 1]):
                other = slots[slot]
                to, change = owner[other], cost - descending[other]
                if to // ranks_per_node != home or to == held[other]:
                    continue
                if loads[to] + change > ceiling or loads[rank] - change > ceiling:
                    continue
                gain = sizes[place]
                if held[other] // ranks_per_node != home:
                    gain += sizes[other]
                if held[other] // ranks_per_node != rank // ranks_per_node:
                    gain -= sizes[other]
                if gain > most:
                    most, there = gain, slot
            if there >= 0:
                other = slots[there]
                to, change = owner[other], cost - descending[other]
                owner[place], owner[other] = to, rank
                loads[to] += change
                loads[rank] -= change
                slots[here], slots[there] = other, place
