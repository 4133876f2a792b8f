"""Node kernels: an assignment and the home rank of each sample -> one as balanced in which fewer leave their node.

Samples that move anyway are exchanged; samples that stay do not change.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

PASSES = 2


@kernel
def roomiest(loads: NDArray[np.int64], cost: int, ceiling: int, holder: int, first: int, stop: int) -> int:
    """Return a rank with room for a sample: its holder, else the least loaded from `first` to `stop` - 1, else -1."""
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
    home: NDArray[np.int32],
    owner: NDArray[np.int32],
    loads: NDArray[np.int64],
    ranks_per_node: int,
    ceiling: int,
) -> None:
    """Bring samples that left their node back to it, if there is room or in exchange for another moved one. In place.

    The total size that moves never grows.

    Args:
        descending: int64 (num_samples,), costs from the largest.
        sizes: int64 (num_samples,), price of moving each.
        home_node: int32 (num_samples,), the rank that has each.
        owner: int32 (num_samples,), rank of each.
        loads: int64 (num_ranks,).
        ranks_per_node: consecutive ranks of a node.
        ceiling: load that no rank may exceed.
    """
    num_ranks = loads.shape[0]
    moved = np.flatnonzero(owner != home)
    node = owner[moved] // ranks_per_node
    # Moved samples by their current node; one that is brought back leaves a stale entry.
    slots = moved[np.argsort(node, kind="mergesort")]
    offsets = np.zeros((num_ranks - 1) // ranks_per_node + 2, np.int64)
    offsets[1:] = np.cumsum(np.bincount(node, minlength=offsets.shape[0] - 1))
    for _turn in range(PASSES):
        for here in range(slots.shape[0]):
            sample = slots[here]
            rank, cost, home_node = owner[sample], descending[sample], home[sample] // ranks_per_node
            if rank // ranks_per_node == home_node:
                continue
            first = home_node * ranks_per_node
            to = roomiest(loads, cost, ceiling, home[sample], first, min(first + ranks_per_node, num_ranks))
            if to >= 0:
                owner[sample] = to
                loads[rank] -= cost
                loads[to] += cost
                continue
            most = np.int64(0)
            there = -1
            for slot in range(offsets[home_node], offsets[home_node + 1]):
                other = slots[slot]
                to, change = owner[other], cost - descending[other]
                if to // ranks_per_node != home_node or to == home[other]:
                    continue
                if loads[to] + change > ceiling or loads[rank] - change > ceiling:
                    continue
                gain = sizes[sample]
                if home[other] // ranks_per_node != home_node:
                    gain += sizes[other]
                if home[other] // ranks_per_node != rank // ranks_per_node:
                    gain -= sizes[other]
                if gain > most:
                    most, there = gain, slot
            if there >= 0:
                other = slots[there]
                to, change = owner[other], cost - descending[other]
                owner[sample], owner[other] = to, rank
                loads[to] += change
                loads[rank] -= change
                slots[here], slots[there] = other, sample
