"""Scopes of balancing: costs of samples or parts, and whose each is -> the rank of each.

         nothing is loaded yet                    held by ranks already: little moves
none     dealt out in turn                        stays
grouped  anew inside each group of ranks          inside each group; anew where counts are limited
grid     inside each group, then among the ranks of the same place in all groups
global   anew over all ranks                      over all ranks; anew where counts are limited

Every scope lowers what `Balance.objective` says: the sum over phases of the largest load, or the largest sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import balance_from, balance_grid, balance_grouped, lower_bound
from orchdata.balancers.phases import assign_jointly, search_pairs
from orchdata.balancers.placement import renamed
from orchdata.native.assign.phases import above_caps, refine_within, sum_of_peaks
from orchdata.native.move.minimal_move import pays, relabel
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_GAIN = 50  # Balancing a grid's micro-step anew has to lower what ranks wait for by this part.


class Limits(NamedTuple):
    """What a rank may hold: `sizes` int64 (num_items, num_caps) that sum to at most `caps` int64 (num_caps,); `within`
    is an assignment, int32 (num_items,), that keeps them and the scope.
    """

    sizes: Ints
    caps: Ints
    within: Ranks


def stream_ranks(stream: Ints, num_ranks: int) -> NDArray[np.int32]:
    """Whose streams each sample of a global batch is from: ranks share out the streams, in order and evenly.

    Args:
        stream: that each sample of the global batch is drawn from, int64 (num_samples,).
        num_ranks: at least 1; their counts of samples differ by at most one.

    Returns:
        int32 (num_samples,), ascending over the samples sorted by stream.
    """
    num_samples = len(stream)
    if num_ranks == 1:
        return np.zeros(num_samples, np.int32)
    stream_rank = np.empty(num_samples, np.int32)
    stream_rank[np.argsort(stream, kind="stable")] = np.arange(num_samples) * num_ranks // max(1, num_samples)
    return stream_rank


def dealt(num_samples: int, num_ranks: int) -> NDArray[np.int32]:
    """Samples dealt out in turn, int32 (num_samples,)."""
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
    """The rank of each sample or part, in every phase.

    Args:
        costs: phase -> int64 (num_items,), the phases to balance; the last of them, `llm`, is at least 1.
        balance: scope, objective and limits on counts; a group size where the scope needs one.
        num_ranks: at least 1.
        owner: int32 (num_items,), who holds each item; where none is loaded yet, whose stream it is drawn from.
        sizes: int64 (num_items,), of items that are held, what moving each takes; None where none is loaded yet.
        ranks_per_node: of items that are held, consecutive ranks among which they rather move.
        limits: caps that are kept, of items that are not held, where several phases share ranks under "barrier".

    Returns:
        int32 (num_items,); `owner` itself where held items stay.

    Raises:
        ValueError: more items than the limits on counts allow.
    """
    held, group_size = sizes is not None, balance.group_size or num_ranks
    if balance.scope == "none" or num_ranks == 1:
        return owner if held else dealt(len(owner), num_ranks)
    counted = balance.equal_count or balance.max_samples is not None
    if balance.scope != "grid" and (counted or not held):
        return _anew(costs, balance, num_ranks, owner, sizes, ranks_per_node or 1, limits)
    shared: Mapping[str, Ints] | Ints = costs
    if balance.objective == "sum" or len(costs) == 1:
        shared = np.sum(list(costs.values()), axis=0)
    if balance.scope == "grid":
        found = balance_grid(shared, owner, num_ranks, group_size).rank
        return found if limits is None else _kept(costs, found, owner, num_ranks, balance, limits)
    if balance.scope == "grouped":
        return balance_grouped(shared, owner, num_ranks, group_size, sizes=sizes).rank
    return balance_from(shared, owner, num_ranks, sizes=sizes, ranks_per_node=ranks_per_node).rank


def counted_groups(balance: Balance, num_ranks: int) -> list[range]:
    """The ranks among which `balance` limits counts, group by group."""
    size = balance.group_size or num_ranks
    return [range(first, min(first + size, num_ranks)) for first in range(0, num_ranks, size)]


def _anew(
    costs: Mapping[str, Ints],
    balance: Balance,
    num_ranks: int,
    owner: Ranks,
    sizes: Ints | None,
    ranks_per_node: int,
    limits: Limits | None,
) -> Ranks:
    """Balance each group by itself, wherever in it items are held; its ranks are named so that much of them stays."""
    groups = counted_groups(balance, num_ranks)
    group = None if len(groups) == 1 else owner.astype(np.int64) // len(groups[0])
    columns, caps, within = np.empty((len(owner), 0), np.int64), np.empty(0, np.int64), None
    if limits is not None:
        columns, caps, within = limits
    rank = assign_jointly(
        np.stack(list(costs.values())),
        np.array([len(ranks) for ranks in groups]),
        group=group,
        objective=balance.objective,
        equal_count=balance.equal_count,
        max_samples=balance.max_samples,
        primary=len(costs) - 1,
        sizes=columns,
        caps=caps,
        within=within,
        effort=balance.effort,
    )
    if sizes is None:
        return rank
    for ranks in groups:
        mine = slice(None) if group is None else np.flatnonzero((owner >= ranks.start) & (owner < ranks.stop))
        found = rank[mine] - np.int32(ranks.start)
        rank[mine] = ranks.start + renamed(found, owner[mine] - ranks.start, sizes[mine], len(ranks), ranks_per_node)
    return rank


def _kept(
    costs: Mapping[str, Ints], rank: Ranks, owner: Ranks, num_ranks: int, balance: Balance, limits: Limits
) -> Ranks:
    """A grid's `rank` within the limits; what is above the caps, or still above the bounds of phases, goes anywhere.

    Micro-steps leave nodes and columns few samples each, too few to be even by themselves. Where the rest is not moved
    easily, all are balanced anew over all ranks, and the ranks named so that much stays where it is from.
    """
    by_item = np.ascontiguousarray(np.stack(list(costs.values()), axis=1))
    bounds = np.array([lower_bound(of_phase, num_ranks) for of_phase in costs.values()], np.int64)
    pairs = search_pairs(len(rank), num_ranks, balance.effort)
    for start in (rank, limits.within.copy()):
        refine_within(by_item, limits.sizes, limits.caps, start, num_ranks, bounds + bounds // 1000, len(rank), pairs)
        if not above_caps(limits.sizes, limits.caps, start, num_ranks):
            break
    peaks = int(sum_of_peaks(by_item, start, num_ranks))
    if not pays(peaks, int(bounds.sum()), _GAIN):
        return start
    anywhere = _anew(costs, replace(balance, scope="global", group_size=None), num_ranks, owner, None, 1, limits)
    if not pays(peaks, int(sum_of_peaks(by_item, anywhere, num_ranks)), _GAIN):
        return start
    relabel(np.ones(len(owner), np.int64), owner, anywhere, num_ranks)
    return anywhere
