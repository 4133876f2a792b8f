"""Micro-steps: items of several sizes and costs -> micro-step of each, within capacities.

A micro-step is the work of several ranks together: it takes, in each phase, an even share of its costs, or its largest
item if that is more. So large items of a phase belong into the same micro-step, and small items into its gaps: first
fit in several orders, like first-fit decreasing (Johnson 1973), and the best of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.native.microbatches.micro_steps import deal_cells, pack_in_orders, packing_orders
from orchdata.native.microbatches.rough_peaks import rough_peaks
from orchdata.native.microbatches.within_caps import looked_peaks

FILLS = (4, 2, 0)  # Quarters of the room above an even share that are filled.
TIGHTER = 1
ESTIMATED = (4, 0)  # The fills with an estimated price.
ENOUGH_RANKS = 128  # This number of ranks is enough to estimate longest first, and a search, on all.
MANY_ITEMS = 16_384  # Above this number of items, the ways with the best estimates are balanced on ENOUGH_RANKS ranks:
LOOKS, LOOK_PAIRS = 4, 12.0  # this number of ways, and of pairs of items for each two that share a rank.
CLOSES = 4  # A search leaves about 1/4 of the difference between longest first and the bounds.


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Items dealt into bins of several ranks each.

    Attributes:
        bins, rank: int32 (num_items,) each; a rank of a bin keeps the caps.
        estimate: about what ranks wait for, once the bins are balanced.
    """

    bins: NDArray[np.int32]
    rank: NDArray[np.int32]
    estimate: int


def candidate_packings(
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_bins: int,
    costs: NDArray[np.int64],
    groups: Sequence[tuple[Any, int]],
    attempts: int,
    counted: NDArray[np.int64] | None = None,
    below: int | None = None,
) -> Iterator[Packing]:
    """Yield packings into bins of several ranks each, within the caps of each rank, from the lowest estimate.

    Each order fills one bin after another, or gives all an even share of the sizes: items sorted by a phase, and cut.
    The estimate of a packing is between the bounds of its bins and the result of longest first in them.

    Args:
        sizes: int64 (num_items, num_caps), num_caps at least 1.
        caps: int64 (num_caps,), of a rank in a bin.
        costs: int64 (num_items, num_phases), C-contiguous; the last phase is the one that all items have.
        groups: (indices of its items, its number of ranks) of each group of ranks. Groups share out their own items,
            all in the same order, so that bins with the same number are alike in all groups.
        attempts: the most orders and fills to try.
        counted: int64 (num_items, num_phases), the costs of estimates, where these are not `costs`.
        below: only what may take less than this is of use.
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
                left += deal_cells(order[number], columns, caps, room, num_bins, ranks, chosen, within)
                bins[mine], rank[mine], first = chosen, first + within, first + ranks
            if left == 0:
                yield Packing(bins.copy(), rank.copy(), estimate)
                break


def _room(
    sizes: NDArray[np.int64], caps: NDArray[np.int64], num_bins: int, num_ranks: int, quarters: int
) -> NDArray[np.int64]:
    """Return the size to fill in a bin, int64 (num_caps,): an even share, plus `quarters` / 4 of the room above it."""
    even = -(-sizes.sum(axis=0) // (num_bins * num_ranks)) + 1
    most = np.maximum(even, caps - caps // 32)
    room: NDArray[np.int64] = (even + (most - even) * quarters // 4) * num_ranks
    return room


def some_ranks(num_ranks: int) -> tuple[int, int]:
    """Return (stride, ranks): every stride-th item, on this number of ranks, is enough to estimate all."""
    stride = max(1, num_ranks // ENOUGH_RANKS)
    return stride, num_ranks // stride


def _estimated_ways(
    orders: NDArray[np.int32],
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_bins: int,
    num_ranks: int,
    counted: NDArray[np.int64] | None,
    below: int | None,
) -> list[tuple[int, int, int]]:
    """Return ways to pack from the lowest estimate: (estimate, fill, number of the order); half filled ones last.

    For many ranks, every k-th item on the k-th part of the ranks is enough. A way with bounds above another's estimate
    is not estimated further.
    """
    costs = costs if counted is None else counted
    stride, few = some_ranks(num_ranks)
    looked = [(costs[order[::stride]], sizes[order[::stride]]) for order in orders]
    ways: list[tuple[int, int, int, NDArray[np.int32]]] = []
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
    orders: NDArray[np.int32],
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    num_bins: int,
    num_ranks: int,
    counted: NDArray[np.int64] | None,
) -> list[tuple[int, int, int]]:
    """Balance the first of `ways` with little effort on some of the ranks, and put the cheapest first.

    Estimates ignore caps: where caps bind, ways with about the same estimate are far apart once they are balanced.
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
        left = deal_cells(np.arange(len(some), dtype=np.int32), columns, caps, room, num_bins, few, bins, rank)
        if left == 0:
            price = int(looked_peaks(mine, own, columns, caps, bins, rank, num_bins, few, LOOK_PAIRS))
            balanced.append((price, turn, (estimate, fill, number)))
    first = [way for _, _, way in sorted(balanced)]
    return first + [way for way in ways if way not in first]
