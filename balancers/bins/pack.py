"""Bins: items of several sizes and costs -> bin of each, for all bins of a step; full, and alike in a micro-step.

A step of `num_ranks` ranks in M micro-steps is M * num_ranks bins. `bin_bound` returns a lower bound of their number.
`pack_bins` fills a given number, or the fewest that it finds: it keeps the capacities, levels costs, and numbers bins
so that those of a micro-step, which wait for each other, cost about the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_caps, checked_costs, checked_count, checked_phases, checked_sizes
from orchdata.native.bins.bounds import bins_bound
from orchdata.native.bins.deal import deal
from orchdata.native.bins.fill import Items
from orchdata.native.bins.pack import first_fit_bins, pack
from orchdata.native.sorting import descending_order

Ints = NDArray[np.int64]

_BISECTIONS = 4


def pack_bins(
    sizes: ArrayLike,
    capacities: int | ArrayLike,
    num_bins: int | None,
    costs: ArrayLike,
    *,
    num_ranks: int | None = None,
) -> NDArray[np.int32]:
    """Pack items into bins within the capacities, so that bins which run at the same time cost about the same.

    Args:
        sizes: integers (num_items,) or (num_items, num_caps), what the capacities count.
        capacities: of each bin, on the sum of its sizes; one for each column of sizes.
        num_bins: at least 1; all may be used, although fewer would do. None for the fewest that are found, in multiples
            of `num_ranks` if that is given.
        costs: integers (num_items,) or (num_items, num_phases), without the part of a bin's cost that does not depend
            on how full it is, such as the weights' part of a microbatch of fixed length.
        num_ranks: bins that run at the same time, and wait for each other after each phase: bins 0 to num_ranks - 1,
            then num_ranks to 2 * num_ranks - 1, and so on. By default all.

    Returns:
        int32 (num_items,): the bin of each; bin // num_ranks is its micro-step, bin % num_ranks its rank.

    Raises:
        ValueError: mismatched lengths, an item above a capacity, or no packing was found.
    """
    table = checked_phases(costs)
    items = _items(sizes, capacities, table)
    together = None if num_ranks is None else checked_count(num_ranks, "num_ranks")
    if num_bins is None:
        num_bins, bins = _fewest(items, together)
    else:
        num_bins = checked_count(num_bins, "num_bins")
        bins, packed = pack(items, num_bins, together or num_bins)
        if not packed:
            raise ValueError(
                f"no packing of {len(table)} items into num_bins={num_bins} of capacities={items.caps.tolist()} was "
                f"found (none needs fewer than {_bound(items)}): raise num_bins or the capacities"
            )
    loads = np.zeros((num_bins, table.shape[1]), np.int64)
    np.add.at(loads, bins, table)
    number = np.empty(num_bins, np.int32)
    number[deal(loads, together or num_bins)] = np.arange(num_bins, dtype=np.int32)
    return number[bins]


def deal_bins(costs: ArrayLike, num_ranks: int) -> NDArray[np.int32]:
    """Number filled bins so that those of a micro-step are alike, as `pack_bins` does.

    Args:
        costs: integers (num_bins,) or (num_bins, num_phases), of all items of a bin.
        num_ranks: bins that run at the same time.

    Returns:
        int32 (num_bins,): the number of each; number // num_ranks is its micro-step, number % num_ranks its rank.
    """
    loads = checked_phases(costs)
    number = np.empty(len(loads), np.int32)
    number[deal(loads, checked_count(num_ranks, "num_ranks"))] = np.arange(len(loads), dtype=np.int32)
    return number


def bin_bound(sizes: ArrayLike, capacities: int | ArrayLike) -> int:
    """Return a lower bound of the bins of any packing: the largest of all columns' bounds, at least 1.

    The bound of a column is the larger of L2 (Martello and Toth 1990) and the dual feasible functions u(1) to u(16) of
    Fekete and Schepers (2001).

    Raises:
        ValueError: mismatched lengths, or an item above a capacity.
    """
    return _bound(_items(sizes, capacities, None))


def _fewest(items: Items, num_ranks: int | None) -> tuple[int, NDArray[np.int32]]:
    """Return the fewest bins that a search finds, in multiples of `num_ranks`, and the bin of each item."""
    unit = num_ranks or 1
    low = middle = -(-_bound(items) // unit)  # mostly enough
    high, bins = None, None
    for _ in range(_BISECTIONS):
        trial, packed = pack(items, middle * unit, num_ranks or middle)
        if packed:
            high, bins = middle, trial
        else:
            low = middle + 1
        if high is None:
            high = -(-int(first_fit_bins(items)) // unit)
        if low >= high:
            break
        middle = (low + high) // 2
    assert high is not None
    if bins is None:
        bins, packed = pack(items, high * unit, num_ranks or high)
        assert packed  # Filling one bin at a time is among its starts.
    return high * unit, bins


def _bound(items: Items) -> int:
    bound = 1
    for k in range(len(items.caps)):
        column = np.ascontiguousarray(items.sizes[:, k])
        if len(column):
            bound = max(bound, int(bins_bound(column[descending_order(column)], items.caps[k])))
    return bound


def _items(sizes: ArrayLike, capacities: int | ArrayLike, costs: Ints | None) -> Items:
    """Return checked items, with the column that needs most bins first; without costs, the sizes of that column."""
    columns = checked_sizes(sizes, len(np.asarray(sizes)) if costs is None else len(costs))
    caps = checked_caps(capacities, columns.shape[1], "capacities")
    above = columns > caps
    if above.any():
        item, column = (int(index) for index in np.argwhere(above)[0])
        where = f" (column {column} of sizes)" if len(caps) > 1 else ""
        raise ValueError(
            f"item {item} has size {columns[item, column]}, above the capacity of {caps[column]}{where}: raise the "
            "capacity, or leave the item out"
        )
    # A cap above the sum of all items does not bind.
    caps = np.minimum(caps, np.maximum(1, columns.sum(axis=0)))
    first = np.argsort(-(columns.sum(axis=0) / caps), kind="stable")
    columns, caps = np.ascontiguousarray(columns[:, first]), caps[first]
    scalar = columns[:, 0].copy() if costs is None else costs.sum(axis=1)
    return Items(columns, caps, checked_costs(scalar))
