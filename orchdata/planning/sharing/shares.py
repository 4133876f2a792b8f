"""How a step is shared out: the samples, the result, and the protocol of the three ways to pad microbatches.

StepSamples --Padding.share_out--> Shares
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch, lower_bound
from orchdata.balancers.checks import MAX_TOTAL
from orchdata.balancers.microbatches import split_microbatches
from orchdata.planning.assign import assign, counted_groups
from orchdata.planning.balance import Balance
from orchdata.planning.teams import StepTeams

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


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
