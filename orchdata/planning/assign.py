"""Scopes of balancing: costs and current ranks of samples or parts -> the new rank of each.

         nothing is loaded yet                  ranks have the items already: little moves
none     dealt out in turn                      nothing moves
grouped  from scratch in each group of ranks    in each group
grid     in each group, then among the ranks with the same number in all groups
global   from scratch over all ranks            over all ranks

Every scope lowers `Balance.price`: the sum over phases of the largest load, or the largest sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.grid import balance_grid, balance_grouped
from orchdata.balancers.moves import balance_from
from orchdata.balancers.phases import assign_jointly, search_pairs
from orchdata.native.assign.phase_refine import phase_peaks
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.microbatches.within_caps import fits_alone
from orchdata.native.move.minimal_move import relabel
from orchdata.native.move.phases import move_in_grid
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_NEAR = 100  # A grid keeps samples near home while peaks are at most 1/100 above those of balancing over all ranks.
_GAIN = 50  # Where the sum of peaks would be more than 1/50 above theirs, it takes the assignment over all ranks.


class Limits(NamedTuple):
    """Caps of a rank: its `sizes`, int64 (num_items, num_caps), sum to at most `caps`, int64 (num_caps,). `within`,
    int32 (num_items,), keeps the caps and the scope; `pinned` has the rank in it of an item that may not move, or -1.
    """

    sizes: Ints
    caps: Ints
    within: Ranks
    pinned: Ranks | None = None


def stream_ranks(stream: Ints, num_ranks: int) -> NDArray[np.int32]:
    """Return the rank that owns the stream of each sample, int32 (num_samples,): ranks share the streams evenly, in
    order.
    """
    num_samples = len(stream)
    if num_ranks == 1:
        return np.zeros(num_samples, np.int32)
    stream_rank = np.empty(num_samples, np.int32)
    stream_rank[np.argsort(stream, kind="stable")] = np.arange(num_samples) * num_ranks // max(1, num_samples)
    return stream_rank


def dealt(num_samples: int, num_ranks: int) -> NDArray[np.int32]:
    """Return ranks dealt out in turn, int32 (num_samples,)."""
    return (np.arange(num_samples) % num_ranks).astype(np.int32)


def assign(
    costs: Mapping[str, Ints],
    balance: Balance,
    num_ranks: int,
    owner: Ranks,
    *,
    sizes: Ints | None = None,
    ranks_per_node: int | None = None,
    limits: Limits | None = None,
) -> Ranks:
    """Return the rank of each sample or part, int32 (num_items,); `owner` itself where loaded items stay. `costs` are
    of the phases to balance, `llm` last; `owner` is the rank that has each item, or that of its stream where nothing is
    loaded yet. `sizes` are what it takes to move each loaded item; then counts have no limit, and moves stay inside of
    nodes if possible. `limits`, for items that are not loaded, under scope "grouped" or "global", are kept, and each
    phase is levelled. Raises ValueError for more items than the limits on counts allow.
    """
    loaded, group_size = sizes is not None, balance.group_size or num_ranks
    if balance.scope == "none" or num_ranks == 1:
        return owner if loaded else dealt(len(owner), num_ranks)
    if limits is None and not balance.price.levels_each_phase:
        costs = {"llm": np.sum(list(costs.values()), axis=0)}
    if limits is not None and balance.scope == "global":
        return _within(costs, balance, num_ranks, owner, limits)
    if balance.scope != "grid" and not loaded:
        return _from_scratch(costs, balance, num_ranks, owner, limits)
    shared = costs if len(costs) > 1 else next(iter(costs.values()))
    if balance.scope == "grid":
        return balance_grid(shared, owner, num_ranks, group_size).rank
    if balance.scope == "grouped":
        return balance_grouped(shared, owner, num_ranks, group_size, sizes=sizes).rank
    return balance_from(shared, owner, num_ranks, sizes=sizes, ranks_per_node=ranks_per_node).rank


def counted_groups(balance: Balance, num_ranks: int) -> list[range]:
    """Return the groups of ranks in which `balance` limits counts."""
    size = balance.group_size or num_ranks
    return [range(first, min(first + size, num_ranks)) for first in range(0, num_ranks, size)]


def _from_scratch(
    costs: Mapping[str, Ints], balance: Balance, num_ranks: int, owner: Ranks, limits: Limits | None
) -> Ranks:
    """Balance each group without regard to where its items are."""
    groups = counted_groups(balance, num_ranks)
    group = None if len(groups) == 1 else owner.astype(np.int64) // len(groups[0])
    columns, caps, within, pinned = np.empty((len(owner), 0), np.int64), np.empty(0, np.int64), None, None
    if limits is not None:
        columns, caps, within, pinned = limits
    return assign_jointly(
        np.stack(list(costs.values())),
        np.array([len(ranks) for ranks in groups]),
        group=group,
        equal_count=balance.equal_count,
        max_samples=balance.max_samples,
        primary=len(costs) - 1,
        sizes=columns,
        caps=caps,
        within=within,
        effort=balance.effort,
        pinned=pinned,
    )


def _within(costs: Mapping[str, Ints], balance: Balance, num_ranks: int, owner: Ranks, limits: Limits) -> Ranks:
    """Balance over all ranks within the limits. Samples that fill a rank alone keep it; others share the ranks left."""
    alone = fits_alone(limits.sizes, limits.caps)
    if balance.equal_count or balance.max_samples is not None or not alone.any():
        return _from_scratch(costs, balance, num_ranks, owner, limits)
    rank, others = limits.within.copy(), np.flatnonzero(~alone)
    if not len(others):
        return rank
    remaining = np.setdiff1d(np.arange(num_ranks, dtype=np.int32), rank[alone])
    inside = Limits(limits.sizes[others], limits.caps, np.searchsorted(remaining, rank[others]).astype(np.int32))
    if limits.pinned is not None:
        inside = inside._replace(pinned=np.where(limits.pinned[others] < 0, np.int32(-1), inside.within))
    few = {phase: column[others] for phase, column in costs.items()}
    rank[others] = remaining[_from_scratch(few, balance, len(remaining), owner[others], inside)]
    return rank


def stay_near(
    costs: Mapping[str, Ints], rank: Ranks, owner: Ranks, num_ranks: int, balance: Balance, limits: Limits
) -> tuple[Ranks, Ranks]:
    """Return (an assignment with nearly the peaks of `rank`, which balances a micro-step, in which few samples leave
    their `owner`'s node and column; `rank` with ranks named so that many stay). Both are the second where the first is
    not found.
    """
    by_item = np.ascontiguousarray(np.stack(list(costs.values()), axis=1))
    peaks = phase_peaks(by_item, rank, num_ranks)
    named = rank.copy()
    relabel(np.ones(len(owner), np.int64), owner, named, num_ranks)
    if fits_alone(limits.sizes, limits.caps).any():
        return named, named
    pairs = search_pairs(len(rank), num_ranks, balance.effort)
    size = balance.group_size or num_ranks
    targets = peaks + peaks // _NEAR
    near = move_in_grid(by_item, limits.sizes, limits.caps, owner, num_ranks, size, len(costs) - 1, targets, pairs)
    most = int(peaks.sum()) + int(peaks.sum()) // _GAIN
    if above_caps(limits.sizes, limits.caps, near, num_ranks) or int(sum_of_peaks(by_item, near, num_ranks)) > most:
        return named, named
    return near, named
