"""How a step is shared out: the samples, the result, the protocol of the ways to pad microbatches, and scopes.

StepSamples --Padding.share_out--> Shares

Scopes of balancing: costs and current ranks of samples or parts -> the new rank of each. Every scope lowers
`Balance.price`: the sum over phases of the largest load, or the largest sum.

         nothing is loaded yet                  ranks have the items already: little moves
none     dealt out in turn                      nothing moves
grouped  from scratch in each group of ranks    in each group
grid     in each group, then among the ranks with the same number in all groups
global   from scratch over all ranks            over all ranks
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import (
    MAX_TOTAL,
    Limits,
    assign_jointly,
    loads_by_rank_and_microbatch,
    lower_bound,
    search_pairs,
)
from orchdata.balancers.microbatches import split_microbatches
from orchdata.balancers.moves import balance_from, balance_grid, balance_grouped
from orchdata.native.assign.phase_refine import phase_peaks
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.microbatches.within_caps import fits_alone
from orchdata.native.minimal_move import relabel
from orchdata.native.move_phases import move_in_grid
from orchdata.planning.balance import Balance, StepTeams

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_NEAR = 100  # A grid keeps samples near home while peaks are at most 1/100 above those of balancing over all ranks.
_GAIN = 50  # Where the sum of peaks would be more than 1/50 above theirs, it takes the assignment over all ranks.


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
    return assign_jointly(
        np.stack(list(costs.values())),
        np.array([len(ranks) for ranks in groups]),
        len(costs) - 1,
        limits,
        group=group,
        equal_count=balance.equal_count,
        max_samples=balance.max_samples,
        effort=balance.effort,
    )


def _within(costs: Mapping[str, Ints], balance: Balance, num_ranks: int, owner: Ranks, limits: Limits) -> Ranks:
    """Balance over all ranks within the limits. Samples that fill a rank alone keep it; others share the ranks left."""
    alone = fits_alone(limits.sizes, limits.caps)
    if balance.equal_count or balance.max_samples is not None or not alone.any():
        return _from_scratch(costs, balance, num_ranks, owner, limits)
    rank: Ranks = limits.within.copy()
    others = np.flatnonzero(~alone)
    if not len(others):
        return rank
    remaining = np.setdiff1d(np.arange(num_ranks, dtype=np.int32), rank[alone])
    inside = Limits(limits.sizes[others], limits.caps, np.searchsorted(remaining, rank[others]).astype(np.int32))
    if len(limits.pinned):
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


@dataclass(frozen=True, slots=True)
class Shares:
    """The rank and microbatch of each sample, int32 (num_samples,); all ranks have the same number of microbatches.
    Samples of `teams` are shared by several ranks, from `rank` on; None where all are whole.
    """

    rank: Ranks
    microbatch: Ranks
    num_microbatches: int
    teams: StepTeams | None = None

    def loads(self, costs: Ints, num_ranks: int) -> Ints:
        """Return the sum of costs in each rank's microbatches, int64 (num_ranks, num_microbatches)."""
        rank, microbatch = self.rank, self.microbatch
        if self.teams is not None:
            sample, rank = self.teams.members(rank)
            costs, microbatch = costs[sample], microbatch[sample]
        return loads_by_rank_and_microbatch(costs, rank, microbatch, num_ranks, self.num_microbatches)


def one_microbatch(rank: Ranks) -> Shares:
    return Shares(rank, np.zeros(len(rank), np.int32), 1)


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The samples of one step, and how they may be shared out: costs of balanced phases, `llm` last; sizes (positions)
    of capped phases, without any a step is one microbatch; `llm` positions, aligned; the rank from whose streams each
    is drawn.
    """

    costs: Mapping[str, Ints]
    sizes: Mapping[str, Ints]
    positions: Ints
    num_ranks: int
    balance: Balance
    stream_rank: Ranks

    @property
    def num_samples(self) -> int:
        return len(self.stream_rank)

    @property
    def meets_in_micro_steps(self) -> bool:
        """Ranks wait for each other in each of several micro-steps."""
        return self.balance.price.meets_in_micro_steps and bool(self.sizes) and self.num_ranks > 1

    @cached_property
    def total_costs(self) -> Ints:
        """Sum over phases, int64 (n,)."""
        total: Ints = np.sum(list(self.costs.values()), axis=0)
        return total

    @cached_property
    def by_sample(self) -> Ints:
        """Costs int64 (n, num_phases), C-contiguous."""
        return np.ascontiguousarray(np.stack(list(self.costs.values()), axis=1))

    @cached_property
    def capped(self) -> tuple[Ints, Ints]:
        """Sizes, int64 (n, num_caps), and their caps. A sample above a cap fills it; a further cap keeps such samples
        alone.
        """
        # A cap above the sum of all samples does not bind, and sums of it would overflow.
        caps = [min(self.balance.caps[phase], max(1, int(column.sum()))) for phase, column in self.sizes.items()]
        columns = [np.minimum(column, cap) for column, cap in zip(self.sizes.values(), caps, strict=True)]
        above = np.any([column > cap for column, cap in zip(self.sizes.values(), caps, strict=True)], axis=0)
        if above.any():
            columns.append(np.where(above, len(above), 1))
            caps.append(len(above))
        return np.stack(columns, axis=1), np.array(caps, np.int64)

    @property
    def groups(self) -> list[range]:
        """Groups of ranks that share out samples among themselves only."""
        whole = self.balance.scope != "grouped"
        return [range(self.num_ranks)] if whole else counted_groups(self.balance, self.num_ranks)

    def members(self, group: range) -> NDArray[np.intp]:
        """Return the indices of the samples of a group of ranks."""
        return np.flatnonzero((self.stream_rank >= group.start) & (self.stream_rank < group.stop))

    def of_phases(self, *phases: str) -> StepSamples:
        """Return the same samples with the costs of these phases only."""
        return replace(self, costs={phase: self.costs[phase] for phase in phases})

    def take(self, index: NDArray[np.integer]) -> StepSamples:
        """Return some of the samples."""
        return replace(
            self,
            costs={phase: column[index] for phase, column in self.costs.items()},
            sizes={phase: column[index] for phase, column in self.sizes.items()},
            positions=self.positions[index],
            stream_rank=self.stream_rank[index],
        )

    def over_all_ranks(self) -> StepSamples:
        """Return the same under scope "global" instead of "grid"."""
        if self.balance.scope != "grid":
            return self
        return replace(self, balance=replace(self.balance, scope="global", group_size=None))

    def assign(self) -> Ranks:
        """Return the rank of each sample by all phases, without microbatches."""
        return assign(self.costs, self.balance, self.num_ranks, self.stream_rank)

    def split(self, rank: Ranks, num_microbatches: int | None = None) -> Shares:
        """Split each rank's samples into microbatches within the caps, level in the sum of their costs; by default the
        fewest. Raises ValueError for a sample above a cap, unless `balance.oversize` is "own", or too few microbatches.
        """
        columns = list(self.sizes.values()) or [np.zeros(len(rank), np.int64)]
        microbatch, number = split_microbatches(
            self.total_costs,
            rank,
            self.num_ranks,
            sizes=np.stack(columns, axis=1),
            max_size=np.array([self.balance.caps[phase] for phase in self.sizes] or [MAX_TOTAL], np.int64),
            num_microbatches=num_microbatches,
            oversize="own" if self.balance.oversize == "own" else "error",
            in_step=self.balance.price.meets_in_micro_steps,
        )
        return Shares(rank, microbatch, number)

    def price(self, shares: Shares, llm_loads: Ints | None = None) -> int:
        """Return what ranks wait for, maybe with `llm` loads that have its padding."""
        loads = [shares.loads(column, self.num_ranks) for phase, column in self.costs.items() if phase != "llm"]
        own = shares.loads(self.costs["llm"], self.num_ranks) if llm_loads is None else llm_loads
        return self.balance.price.of([*loads, own])

    def keeps_counts(self, rank: Ranks) -> bool:
        """Return whether ranks have no more samples than `balance` allows, and equal numbers if it requires them."""
        counts = np.bincount(rank, minlength=self.num_ranks)
        if self.balance.max_samples is not None and int(counts.max()) > self.balance.max_samples:
            return False
        groups = counted_groups(self.balance, self.num_ranks) if self.balance.equal_count else []
        return all(int(np.ptp(counts[group.start : group.stop])) <= 1 for group in groups)


class Padding(ABC):
    """How `llm` microbatches are padded, and what that costs: a value that pickles. Costs and positions are of `llm`.
    `adds_up`: a microbatch costs the sum of its samples' costs.
    """

    __slots__ = ()
    adds_up: ClassVar[bool] = False

    @abstractmethod
    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """Assign samples to ranks and microbatches, by default the fewest, so that a step takes the least time of the
        ways that are tried. Raises ValueError for a sample above a cap, unless `balance.oversize` is "own", or too few
        microbatches.
        """

    @abstractmethod
    def loads(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        """Return the cost of each rank's `llm` microbatches with padding, int64 (num_ranks, num_microbatches)."""

    @abstractmethod
    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """Return what `loads` would be with samples dealt out in turn, and cut into as many microbatches, without
        regard to caps.
        """

    def lower_bound(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> int:
        """Return a bound: no assignment of whole samples has a smaller largest load."""
        return lower_bound(costs, num_ranks)

    def capacity(self, num_microbatches: int) -> int | None:
        """Return the tokens that fit into this number of microbatches; None if lengths vary."""
        return None

    def price(self, step: StepSamples, shares: Shares) -> int:
        """Return what ranks wait for, with the padding."""
        return step.price(shares, self.loads(step.costs["llm"], step.positions, shares, step.num_ranks))

    def cheapest(self, step: StepSamples, candidates: Iterable[Shares]) -> Shares:
        """Return the cheapest way. Ties: fewer micro-steps, then the first."""
        return min(candidates, key=lambda shares: (self.price(step, shares), shares.num_microbatches))
