"""Micro-steps: items of several sizes and costs -> micro-step of each, within capacities.

A micro-step is what several ranks do together: it takes, in each phase, an even share of its costs, or its largest item
where that is more. So large items of a phase belong into the same one, small ones into the
gaps beside them: first fit in several orders, after first-fit decreasing (Johnson 1973), and the best of these.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_caps, checked_count, checked_phases, checked_sizes
from orchdata.native.microbatches.micro_steps import deal_cells, pack_in_orders, packing_orders

FILLS = (4, 2, 0)  # Quarters of the room above an even share that are filled.


def pack_micro_steps(
    sizes: ArrayLike, capacities: int | ArrayLike, num_micro_steps: int, costs: ArrayLike, *, num_ranks: int = 1
) -> NDArray[np.int32]:
    """Deal items into micro-steps so that ranks which meet after each phase of each wait little.

    Args:
        sizes: integers (num_items,) or (num_items, num_caps), what the capacities count.
        capacities: of each micro-step, on the sum of its sizes; one for each column of sizes.
        num_micro_steps: at least 1.
        costs: integers (num_items,) or (num_items, num_phases); the last phase is the one all items have.
        num_ranks: ranks that share out the items of a micro-step.

    Returns:
        int32 (num_items,): the micro-step of each.

    Raises:
        ValueError: mismatched lengths, or capacities within which no packing was found.
    """
    phases = checked_phases(costs)
    columns = checked_sizes(sizes, len(phases))
    limits = checked_caps(capacities, columns.shape[1], "capacities")
    num_micro_steps = checked_count(num_micro_steps, "num_micro_steps")
    num_ranks = checked_count(num_ranks, "num_ranks")
    orders = packing_orders(phases, columns, phases.shape[1] - 1)
    total = columns.sum(axis=0)
    even, room = -(-total // num_micro_steps), np.minimum(limits, total)
    for fill in FILLS:
        most = np.maximum(1, room - (room - even) // 4 * (4 - fill))
        packed, taken = pack_in_orders(orders, phases, columns, most, num_micro_steps, num_ranks)
        for number in np.argsort(taken, kind="stable"):
            loads = np.zeros((num_micro_steps, len(limits)), np.int64)
            np.add.at(loads, packed[number], columns)
            if (loads <= limits).all():
                found: NDArray[np.int32] = packed[number].copy()
                return found
    raise ValueError(
        f"no packing into num_micro_steps={num_micro_steps} of capacities={limits.tolist()} was found for sizes that "
        f"sum to {total.tolist()}, of which the largest are {columns.max(axis=0, initial=0).tolist()}: raise "
        "num_micro_steps or the capacities"
    )


def dealings(
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_bins: int,
    costs: NDArray[np.int64],
    num_ranks: int,
    attempts: int,
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Packings into bins of `num_ranks` ranks each, within the caps of each rank, the cheapest first.

    Args:
        sizes: int64 (num_items, num_caps), num_caps at least 1.
        caps: int64 (num_caps,), of a rank in a bin.
        costs: int64 (num_items, num_phases), C-contiguous; the last phase is the one all items have.
        attempts: orders and fills that are tried, of all at most.

    Yields:
        (bin, rank), int32 (num_items,) each.
    """
    orders = packing_orders(costs, sizes, costs.shape[1] - 1)
    even = -(-sizes.sum(axis=0) // (num_bins * num_ranks)) + 1
    most = np.maximum(even, caps - caps // 32)
    _, taken = pack_in_orders(orders, costs, sizes, most * num_ranks, num_bins, num_ranks)
    bins, rank = np.empty((2, len(costs)), np.int32)
    ways = [(fill, number) for fill in FILLS for number in np.argsort(taken, kind="stable")]
    for fill, number in ways[:attempts]:
        room = (even + (most - even) * fill // 4) * num_ranks
        if deal_cells(orders[number], sizes, caps, room, num_bins, num_ranks, bins, rank) == 0:
            yield bins.copy(), rank.copy()
