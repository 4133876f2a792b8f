"""Bins and micro-steps: items of several sizes and costs -> bin or micro-step of each, within capacities.

A micro-step is the work of several ranks together: it takes, in each phase, an even share of its costs, or its largest
item if that is more. So large items of a phase belong into the same micro-step, and small items into its gaps: first
fit in several orders, like first-fit decreasing (Johnson 1973), and the best of these.

A step of `num_ranks` ranks in M micro-steps is M * num_ranks bins. `bin_bound` returns a lower bound of their number.
`pack_bins` fills a given number, or the fewest that it finds: it keeps the capacities, levels costs, and numbers bins
so that those of a micro-step, which wait for each other, cost about the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import checked_caps, checked_costs, checked_count, checked_phases, checked_sizes
from orchdata.native.fill_bins import Items, bins_bound, deal
from orchdata.native.jit import Ints, Ints32
from orchdata.native.microbatches.micro_steps import NOTHING_HELD, deal_cells, pack_in_orders, packing_orders
from orchdata.native.microbatches.within_caps import looked_peaks, rough_peaks
from orchdata.native.pack_bins import first_fit_bins, pack
from orchdata.native.sorting import descending_order

FILLS = (4, 2, 0)  # Quarters of the room above an even share that are filled.
TIGHTER = 1
ESTIMATED = (4, 0)  # The fills with an estimated price.
ENOUGH_RANKS = 128  # This number of ranks is enough to estimate longest first, and a search, on all.
MANY_ITEMS = 16_384  # Above this number of items, the ways with the best estimates are balanced on ENOUGH_RANKS ranks:
LOOKS, LOOK_PAIRS = 4, 12.0  # this number of ways, and of pairs of items for each two that share a rank.
CLOSES = 4  # A search leaves about 1/4 of the difference between longest first and the bounds.


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Items dealt into bins of several ranks each, int32 (num_items,); a rank of a bin keeps the caps. `estimate` is
    about what ranks wait for, once the bins are balanced.
    """

    bins: Ints32
    rank: Ints32
    estimate: int


def candidate_packings(
    sizes: Ints,
    caps: Ints,
    num_bins: int,
    costs: Ints,
    groups: Sequence[tuple[Any, int]],
    attempts: int,
    counted: Ints | None = None,
    below: int | None = None,
) -> Iterator[Packing]:
    """Yield packings into bins of several ranks each, within the caps of each rank, from the lowest estimate: between
    the bounds of its bins and the result of longest first in them. Each order fills one bin after another, or gives all
    an even share of the sizes. `groups`, (its items, its number of ranks), share out their own items in the same order,
    so that bins with the same number are alike. `counted` are the costs of estimates, if not `costs`; only what may
    take less than `below` is of use.
    """
    num_ranks = sum(ranks for _, ranks in groups)
    rows = [(costs[mine], sizes[mine], ranks) for mine, ranks in groups]
    orders = [packing_orders(own, columns, costs.shape[1] - 1) for own, columns, _ in rows]
    together = orders[0] if len(groups) == 1 else packing_orders(costs, sizes, costs.shape[1] - 1)
    ways = _estimated_ways(together, costs, sizes, caps, num_bins, num_ranks, counted, below)
    if len(costs) > MANY_ITEMS:
        ways = _balanced_on_some(ways, together, costs, sizes, caps, num_bins, num_ranks, counted)
    bins, rank = np.empty((2, len(costs)), np.int32)
    for estimate, fill, number in ways[:attempts]:
        # An exactly even share may not be possible: then fill a little more.
        for quarters in (fill, TIGHTER) if fill == 0 else (fill,):
            left, first = 0, 0
            for (mine, ranks), order, (_, columns, _) in zip(groups, orders, rows, strict=True):
                chosen, within = np.empty((2, len(columns)), np.int32)
                room = _room(columns, caps, num_bins, ranks, quarters)
                left += deal_cells(order[number], columns, caps, room, num_bins, ranks, chosen, within, NOTHING_HELD)
                bins[mine], rank[mine], first = chosen, first + within, first + ranks
            if left == 0:
                yield Packing(bins.copy(), rank.copy(), estimate)
                break


def _room(sizes: Ints, caps: Ints, num_bins: int, num_ranks: int, quarters: int) -> Ints:
    """Return the size to fill in a bin, int64 (num_caps,): an even share, plus `quarters` / 4 of the room above it."""
    even = -(-sizes.sum(axis=0) // (num_bins * num_ranks)) + 1
    most = np.maximum(even, caps - caps // 32)
    room: Ints = (even + (most - even) * quarters // 4) * num_ranks
    return room


def some_ranks(num_ranks: int) -> tuple[int, int]:
    """Return (stride, ranks): every stride-th item, on this number of ranks, is enough to estimate all."""
    stride = max(1, num_ranks // ENOUGH_RANKS)
    return stride, num_ranks // stride


def _estimated_ways(
    orders: Ints32,
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    num_bins: int,
    num_ranks: int,
    counted: Ints | None,
    below: int | None,
) -> list[tuple[int, int, int]]:
    """Return ways to pack from the lowest estimate: (estimate, fill, number of the order); half filled ones last. Of
    many ranks every k-th item on the k-th part is enough. A way with bounds above another's estimate is not estimated
    further.
    """
    costs = costs if counted is None else counted
    stride, few = some_ranks(num_ranks)
    looked = [(costs[order[::stride]], sizes[order[::stride]]) for order in orders]
    ways: list[tuple[int, int, int, Ints32]] = []
    for number, (mine, columns) in enumerate(looked):
        in_turn = np.arange(len(mine), dtype=np.int32)[None]
        for fill in ESTIMATED:
            room = _room(columns, caps, num_bins, few, fill)
            packed, taken = pack_in_orders(in_turn, mine, columns, room, num_bins, few)
            ways.append((int(taken[0]), -fill, number, packed[0]))
    ways = [way for way in ways if below is None or way[0] < below]
    estimated: list[tuple[int, int, int]] = []
    for takes, negated, number, bins in sorted(ways, key=lambda way: way[:3]):
        estimate = takes
        if not estimated or takes < min(estimated)[0]:
            low, high = map(int, rough_peaks(*looked[number], caps, bins, num_bins, few, costs.shape[1] - 1))
            estimate = max(takes, low) + (high - low) // CLOSES
        estimated.append((estimate, negated, number))
    if counted is not None and below is not None:  # Phases that are not balanced take more than the estimate.
        estimated = [way for way in estimated if way[0] < below]
    first = [(estimate, -negated, number) for estimate, negated, number in sorted(estimated)]
    rest = [fill for fill in FILLS if fill not in ESTIMATED]
    return first + [(estimate, fill, number) for fill in rest for estimate, own, number in first if own == ESTIMATED[0]]


def _balanced_on_some(
    ways: list[tuple[int, int, int]],
    orders: Ints32,
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    num_bins: int,
    num_ranks: int,
    counted: Ints | None,
) -> list[tuple[int, int, int]]:
    """Balance the first of `ways` with little effort on some of the ranks, and put the cheapest first: where caps bind,
    ways with about the same estimate, which ignores them, are far apart.
    """
    stride, few = some_ranks(num_ranks)
    balanced: list[tuple[int, int, tuple[int, int, int]]] = []
    for turn, (estimate, fill, number) in enumerate(ways[:LOOKS]):
        if balanced and estimate >= min(balanced)[0]:
            break
        some = orders[number][::stride]
        mine, columns = costs[some], sizes[some]
        own = mine if counted is None else counted[some]
        bins, rank = np.empty((2, len(some)), np.int32)
        room = _room(columns, caps, num_bins, few, fill or TIGHTER)
        left = deal_cells(
            np.arange(len(some), dtype=np.int32), columns, caps, room, num_bins, few, bins, rank, NOTHING_HELD
        )
        if left == 0:
            price = int(looked_peaks(mine, own, columns, caps, bins, rank, num_bins, few, LOOK_PAIRS))
            balanced.append((price, turn, (estimate, fill, number)))
    first = [way for _, _, way in sorted(balanced)]
    return first + [way for way in ways if way not in first]


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


def _fewest(items: Items, num_ranks: int | None) -> tuple[int, Ints32]:
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
