"""What a number of ranks would see: plans of an epoch under every scope -> balance, locality, advice.

steps spread over the epoch   --plan, as in training--> loads --> imbalance, speedup, advice
steps one after another       --plan, as in training--> who reads which shard --> locality
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import advise
from orchdata.balancers.assignment import loads_of
from orchdata.order.order import Order, SampleOrder, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.assign import assign
from orchdata.planning.balance import Balance, Scope
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan

SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseImbalance:
    """max/mean of rank loads, where 1 is perfect: the time lost in a phase is 1 - 1/this.

    Attributes:
        unbalanced: samples dealt out in turn, as a plain sampler does.
        balanced: as the DataLoader assigns them, over all ranks.
        per_phase: as it does under `Balance(assignment="per_phase")`, where ranks share the parts of samples too.
        lower_bound: no assignment of whole samples can do better; above 1 where single samples are too large.
    """

    unbalanced: float
    balanced: float
    per_phase: float
    lower_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeProfile:
    """A scope of balancing: how even, and how near.

    Attributes:
        phases: phase -> max/mean of rank loads.
        step: the same of the whole step.
        speedup: cost of the step of scope "none" over that of this one.
        own_streams: share of samples that stay in the group of ranks whose streams they are drawn from.
        shards_per_group: shards that a group reads from in `Scale.locality_steps` steps, mean over groups.
        groups_per_shard: groups that read from a shard in these steps, mean over the shards that any group reads from:
            what groups read where each fetches the shards it needs whole, over what sharing these out would take. From
            1 (every shard is one group's) to the number of groups.
    """

    phases: Mapping[str, float]
    step: float
    speedup: float
    own_streams: float
    shards_per_group: float
    groups_per_shard: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Something to change, and max/mean of rank loads then; see `orchdata.balancers.Option`."""

    remedy: Literal["context parallel", "more samples"]
    factor: int
    imbalance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseAdvice:
    """What holds a phase back however it is balanced, in the step of median lower bound; see `balancers.advise`.

    Attributes:
        limit: what holds it back most.
        imbalance: max/mean of rank loads when nothing but this phase is balanced.
        cost_share: of all that the step's samples cost, in the phases that the cost model names.
        samples_per_rank: samples that have the phase.
        giants: samples that cost more than the mean load of a rank.
        largest: cost of the largest sample over the mean load.
        largest_shard, largest_key: which sample that is.
        remedies: what would help, of each kind the least that is enough, or all that is possible.
    """

    limit: Literal["nothing", "giant sample", "few samples"]
    imbalance: float
    cost_share: float
    samples_per_rank: float
    giants: int
    largest: float
    largest_shard: str
    largest_key: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a number of ranks would see, over `steps` steps spread evenly over an epoch.

    Attributes:
        with_replacement: the dataset has fewer samples than a global batch, so samples were drawn with replacement.
        group_size, groups: ranks of a group, as those of a node, and how many groups that makes.
        streams: of the order, as in `od.Shuffle(streams=...)`.
        locality_steps: consecutive steps, in the middle of the epoch, over which locality is measured.
        phases: every phase the dataset has; those the cost model does not name are not balanced.
        step: of the whole step, over the phases of the cost model, where ranks wait for each other after each phase.
        speedup, per_phase_speedup: cost of the unbalanced step over that of the balanced one; an estimate by the cost
            model. Per phase without the time that features travel.
        scopes: what each scope of balancing gives.
        advice: of the phases of the cost model.
    """

    ranks: int
    batch_size: int
    global_batch_size: int
    steps: int
    with_replacement: bool
    group_size: int
    groups: int
    streams: int
    locality_steps: int
    phases: Mapping[str, PhaseImbalance]
    step: PhaseImbalance
    speedup: float
    per_phase_speedup: float
    scopes: Mapping[Scope, ScopeProfile]
    advice: Mapping[str, PhaseAdvice]


def make_scale(
    source: IndexCosts,
    excluded: NDArray[np.int64],
    *,
    ranks: int,
    batch_size: int,
    group_size: int,
    streams: int | None,
    seed: int,
    steps: int,
) -> Scale:
    """Plan some steps of an epoch on `ranks` ranks; arguments as of `orchdata.profile.profile.profile`.

    Args:
        source: costs of an index.
        excluded: rows that are not in the order.
        streams: of the order; None for one a group.
    """
    groups = -(-ranks // group_size)
    streams = groups if streams is None else streams
    order = Order(source.index.num_samples, shuffle=Shuffle(streams=streams), seed=seed, excluded=excluded)
    global_batch_size = ranks * batch_size
    with_replacement = order.num_samples < global_batch_size
    drawn: SampleOrder = _Draws(order, seed, streams, steps * global_batch_size) if with_replacement else order
    spec = PlanSpec(
        costs=source,
        order=drawn,
        batches=GlobalBatches(size=global_batch_size, drop_last=True),
        balance=Balance(scope="none"),
        num_ranks=ranks,
    )
    count = min(steps, spec.num_steps)
    first = (spec.num_steps - count) // 2
    spread = [_Step(spec, int(step), group_size) for step in np.linspace(0, spec.num_steps - 1, count).astype(np.int64)]
    run = [_Step(spec, step, group_size) for step in range(first, first + count)]
    loads = _Loads(spread)
    phases = {phase: loads.imbalance(phase) for phase in source.phases}
    step = loads.imbalance(*source.balanced)
    return Scale(
        ranks=ranks,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        steps=count,
        with_replacement=with_replacement,
        group_size=group_size,
        groups=groups,
        streams=streams,
        locality_steps=count,
        phases=phases,
        step=step,
        speedup=step.unbalanced / step.balanced,
        per_phase_speedup=step.unbalanced / step.per_phase,
        scopes={scope: _scope_profile(scope, loads, run, source.index.shard) for scope in SCOPES},
        advice={phase: _advice(phase, loads, source) for phase in source.balanced},
    )


@dataclass(frozen=True)
class _Draws:
    """Samples of `order` drawn with replacement, seeded: a global batch larger than the dataset can be planned.

    As in `order`, position p is drawn from stream p % streams.
    """

    order: Order
    seed: int
    streams: int
    num_samples: int

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        total = self.order.num_samples
        stream = np.arange(start, stop) % min(self.streams, total)
        held = (total - 1 - stream) // self.streams + 1  # positions of the stream in an epoch of `order`
        picks = stream + self.streams * np.random.default_rng((self.seed, epoch, start)).integers(held)
        dataset_id, row = self.order.rows(epoch, 0, total)
        return dataset_id[picks], row[picks]


class _Step:
    """One global batch, and who gets which of its samples under every scope."""

    def __init__(self, spec: PlanSpec, step: int, group_size: int) -> None:
        self.spec = spec
        self.group_size = group_size
        self.plan: Plan = make_plan(spec, StepTask(0, step))
        self._number = step
        self.groups = -(-spec.num_ranks // group_size)
        self.stream_group = self.plan.stream_rank // group_size

    def rank(self, scope: Scope) -> NDArray[np.int32]:
        costs = {phase: self.plan.costs[phase] for phase in self.spec.costs.balanced}
        balance = Balance(scope=scope, group_size=self.group_size if scope in ("grouped", "grid") else None)
        return assign(costs, balance, self.spec.num_ranks, self.plan.stream_rank)

    def plan_per_phase(self) -> Plan:
        """The plan in which ranks share the parts of samples too."""
        return make_plan(replace(self.spec, balance=Balance(assignment="per_phase")), StepTask(0, self._number))

    def group(self, scope: Scope) -> NDArray[np.int32]:
        # Inside a group nothing changes where samples come from, so there is nothing to balance.
        return self.stream_group if scope == "grouped" else self.rank(scope) // self.group_size


class _Loads:
    """Rank loads of some steps: sums of largest loads, mean loads and lower bounds."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        spec = steps[0].spec
        self.plans = [step.plan for step in steps]
        self.phases, self.balanced = spec.costs.phases, spec.costs.balanced
        self._peaks: Counter[tuple[Scope, str]] = Counter()
        for scope in SCOPES:
            for step in steps:
                rank = step.rank(scope)
                for phase in self.phases:
                    loads = loads_of(step.plan.costs[phase], rank, spec.num_ranks)
                    self._peaks[scope, phase] += int(loads.max())
        per_phase = [step.plan_per_phase() for step in steps]
        self._per_phase = {phase: sum(int(plan.loads(phase).max()) for plan in per_phase) for phase in self.phases}
        self.bounds = {phase: [plan.lower_bound(phase) for plan in self.plans] for phase in self.phases}
        self.means = {
            phase: [int(plan.costs[phase].sum()) / spec.num_ranks for plan in self.plans] for phase in self.phases
        }

    def max_over_mean(self, scope: Scope, *phases: str) -> float:
        """Of phases after each of which ranks wait; 1 where nothing enters them."""
        mean = sum(sum(self.means[phase]) for phase in phases)
        return sum(self._peaks[scope, phase] for phase in phases) / mean if mean else 1.0

    def imbalance(self, *phases: str) -> PhaseImbalance:
        mean = sum(sum(self.means[phase]) for phase in phases)
        return PhaseImbalance(
            unbalanced=self.max_over_mean("none", *phases),
            balanced=self.max_over_mean("global", *phases),
            per_phase=sum(self._per_phase[phase] for phase in phases) / mean if mean else 1.0,
            lower_bound=sum(sum(self.bounds[phase]) for phase in phases) / mean if mean else 1.0,
        )


def _scope_profile(scope: Scope, loads: _Loads, run: Sequence[_Step], shard_of_row: NDArray[np.int32]) -> ScopeProfile:
    groups = run[0].groups
    group = np.concatenate([step.group(scope) for step in run])
    stream_group = np.concatenate([step.stream_group for step in run])
    shard = shard_of_row[np.concatenate([step.plan.row for step in run])].astype(np.int64)
    read = len(np.unique(shard * groups + group))  # pairs of a shard and a group that reads from it
    step = loads.max_over_mean(scope, *loads.balanced)
    return ScopeProfile(
        phases={phase: loads.max_over_mean(scope, phase) for phase in loads.phases},
        step=step,
        speedup=loads.max_over_mean("none", *loads.balanced) / step,
        own_streams=float(np.mean(group == stream_group)),
        shards_per_group=read / groups,
        groups_per_shard=read / len(np.unique(shard)),
    )


def _advice(phase: str, loads: _Loads, source: IndexCosts) -> PhaseAdvice:
    """Of the step whose lower bound over the mean is the median."""
    ratios = [bound / (mean or 1) for bound, mean in zip(loads.bounds[phase], loads.means[phase], strict=True)]
    plan = loads.plans[int(np.argsort(ratios, kind="stable")[len(ratios) // 2])]
    costs, index = plan.costs[phase], source.index
    found = advise(costs, plan.num_ranks)
    largest = int(costs.argmax())
    row = int(plan.row[largest])
    best = {option.remedy: option for option in found.options}  # the last of its kind is the best
    return PhaseAdvice(
        limit=found.limit,
        imbalance=found.makespan / found.mean if found.mean else 1.0,
        cost_share=int(costs.sum()) / sum(int(plan.costs[name].sum()) for name in loads.balanced),
        samples_per_rank=int(np.count_nonzero(costs)) / plan.num_ranks,
        giants=len(found.giants),
        largest=int(costs[largest]) / found.mean if found.mean else 0.0,
        largest_shard=index.shard_of(int(row)).url,
        largest_key=index.key(row),
        remedies=tuple(
            Remedy(remedy=option.remedy, factor=option.factor, imbalance=option.imbalance) for option in best.values()
        ),
    )
