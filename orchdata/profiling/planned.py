"""The profile of a number of ranks: plans of an epoch, as in training -> waiting, locality, padding.

steps spread over the epoch   --make_plan--> price: costs of steps, with standard errors --> waiting
consecutive steps             --make_plan--> which group reads which shard --------------> locality
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Final, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.costs.model import CostModel
from orchdata.dataset.indexed import IndexCosts, layout_costs
from orchdata.loaders.index.index import Index
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import MixedSource, SampleOrder, TokenCounts
from orchdata.order.steps import Batches, GlobalBatches, StepTask, TokenBatches
from orchdata.planning.balance import AssignmentKind, Balance, Layout, Packed, Padded, Scope, row_lengths
from orchdata.planning.parts import SampleCosts
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.profiling.content import Figures

Key = TypeVar("Key")

SMALL_ERROR: Final = 0.02
"""Steps are added until the standard error of waiting is below this."""
CLEAR: Final = 3.0
"""Standard errors of a paired difference from which two settings are called different."""
_STEPS_OF_LAYOUTS: Final = 8
_ROUND: Final = 1024


class PlannedStep(NamedTuple):
    """One step. Costs are in the unit of the cost model, see `orchdata.planning.balance`."""

    cost: int
    phase_costs: Mapping[str, int]
    totals: Mapping[str, int]  # sums over ranks of each phase
    microbatches: int  # of each rank
    samples: int
    tokens: int
    tokenized: int = 0  # that ranks read and tokenize: more where members of teams do so for whole sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSteps:
    """Some steps, planned. Costs are over those of perfectly even steps.

    `balanced` phases make up the step; it `adds_up` if ranks wait for each other after each phase.
    """

    num_ranks: int
    balanced: tuple[str, ...]
    adds_up: bool
    steps: tuple[PlannedStep, ...]

    @property
    def step(self) -> float:
        return self._over_mean([step.cost for step in self.steps])

    @property
    def costliest(self) -> float:
        return self._over_mean([max(step.cost for step in self.steps)] * len(self.steps))

    def _over_mean(self, costs: Sequence[int]) -> float:
        total = sum(step.totals[phase] for step in self.steps for phase in self.balanced)
        return sum(costs) * self.num_ranks / total if total else 1.0

    @property
    def waiting(self) -> float:
        """Share of the steps' time that ranks wait for each other, mean over ranks."""
        return 1 - 1 / self.step

    def waiting_in(self, phase: str) -> float:
        """Return the part of `waiting` in one phase of those that make up the step. Only if `adds_up`."""
        cost = self.num_ranks * sum(step.cost for step in self.steps)
        lost = sum(self.num_ranks * step.phase_costs[phase] - step.totals[phase] for step in self.steps)
        return lost / cost if cost else 0.0

    @property
    def waiting_error(self) -> float | None:
        """Standard error of `waiting` over the steps, see `_standard_error`; None for less than two steps."""
        return _standard_error(self._deviations())

    def _deviations(self) -> NDArray[np.float64]:
        """How each step changes `waiting`, a ratio of two sums, to the first order: float64 (num_steps,)."""
        costs = np.array([float(step.cost) for step in self.steps])
        totals = np.array([float(sum(step.totals[phase] for phase in self.balanced)) for step in self.steps])
        changes: NDArray[np.float64] = (costs * (1 - self.waiting) - totals / self.num_ranks) / max(1.0, costs.mean())
        return changes

    def mean(self, name: str) -> float:
        """Return the mean of `samples`, `tokens`, `tokenized` or `microbatches` of a step."""
        return float(sum(getattr(step, name) for step in self.steps) / len(self.steps))


def _standard_error(deviations: NDArray[np.float64]) -> float | None:
    """Return the standard error of the mean, larger for few values by Student's t over the normal quantile.

    The factor, 1.5 for 8 values and 1.04 for 64, is the approximation of Wallace (1959), "Bounds on normal
    approximations to Student's and the chi-square distributions".
    """
    if len(deviations) < 2:
        return None
    freedom = len(deviations) - 1
    student = np.sqrt(freedom * np.expm1((CLEAR * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))
    return float(student / CLEAR * deviations.std(ddof=1) / np.sqrt(len(deviations)))


def _planned(spec: PlanSpec, task: StepTask, priced: tuple[str, ...], num_peers: int) -> PlannedStep:
    price = spec.balance.price
    plan = make_plan(spec, task)
    # In the unit of an LLM that peers share, a peer that repeats its rank's encoding takes `num_peers` times as long.
    repeats = num_peers // spec.num_peers
    waits = {phase: plan.waits(phase) * (1 if phase == "llm" else repeats) for phase in spec.costs.phases}
    return PlannedStep(
        cost=price.of([waits[phase] for phase in priced]),
        phase_costs={phase: price.of([waits[phase]]) for phase in waits},
        totals={phase: int(plan.costs[phase].sum()) for phase in waits},
        microbatches=plan.num_microbatches,
        samples=len(plan.row),
        tokens=int(plan.llm_positions.sum()),
        tokenized=plan.tokenized,
    )


class StepSize(NamedTuple):
    """Size of a step over all ranks: `amount` samples, or LLM tokens counted by `counts`."""

    amount: int
    counts: TokenCounts | None = None

    @classmethod
    def of(cls, ranks: int, batch_size: int, batch_tokens: int | None, counts: TokenCounts) -> StepSize:
        """Return the size of a step of `batch_size` samples a rank, or of `batch_tokens` LLM tokens."""
        return cls(ranks * batch_size) if batch_tokens is None else cls(ranks * batch_tokens, counts)


def epoch_spec(source: SampleCosts, order: AnyOrder, balance: Balance, size: StepSize, *, num_ranks: int) -> PlanSpec:
    """Return the spec of an epoch of `order`: of whole steps, or of one with all samples if they are less than that."""
    batches: Batches = GlobalBatches(size=size.amount, drop_last=order.length(0) >= size.amount)
    if size.counts is not None:
        sums = order.sums(size.counts)
        batches = TokenBatches(sums=sums, budgets=((0, size.amount),), drop_last=sums.of_epoch(0) >= size.amount)
    return PlanSpec(costs=source, order=order, batches=batches, balance=balance, num_ranks=num_ranks)


def spread_steps(spec: PlanSpec, most: int) -> list[StepTask]:
    """Return `most` steps: spread evenly over epoch 0, or those of as many epochs as have so many."""
    if spec.num_steps >= most:
        return [StepTask(0, int(step)) for step in np.linspace(0, spec.num_steps - 1, most).astype(np.int64)]
    steps: list[StepTask] = []
    epoch = 0
    while len(steps) < most and (count := spec.steps.count(epoch)):
        steps += [StepTask(epoch, step) for step in range(min(count, most - len(steps)))]
        epoch += 1
    return steps


def plan_enough(
    specs: Mapping[Key, PlanSpec], priced: tuple[str, ...], first: int, most: int, num_peers: int = 1
) -> dict[Key, PlannedSteps]:
    """Plan the same steps under several specs: `first` of them, then each time about as many more as there are, until
    every standard error is below `SMALL_ERROR`, or there are `most`. After each round the steps so far are spread over
    an epoch. `priced` are the phases that make up the step.
    """
    steps = spread_steps(next(iter(specs.values())), most)
    known = np.zeros(len(steps), bool)
    planned: dict[Key, PlannedSteps] = {}
    rounds = 0
    while not known.all():
        count = min(first << rounds, len(steps))
        chosen = np.linspace(0, len(steps) - 1, count).astype(np.int64)
        new = [steps[place] for place in chosen[~known[chosen]].tolist()]
        known[chosen] = True
        rounds += 1
        for key, spec in specs.items():
            before = planned[key].steps if key in planned else ()
            planned[key] = PlannedSteps(
                num_ranks=spec.num_ranks,
                balanced=priced,
                adds_up=spec.balance.price.meets_in_micro_steps,
                steps=(*before, *(_planned(spec, task, priced, num_peers) for task in new)),
            )
        errors = [each.waiting_error for each in planned.values()]
        if all(error is not None and error < SMALL_ERROR for error in errors):
            break
    return planned


class KnownSteps:
    """An order that finds the samples of a step once, for all settings that are planned over the same steps."""

    def __init__(self, order: SampleOrder) -> None:
        self.order, self.num_samples, self.length = order, order.num_samples, order.length
        self.rows, self.samples = order.rows, cache(order.samples)
        self.sources: tuple[MixedSource, ...] = ()
        self.names: tuple[str, ...] = ()
        self.loss_weights: tuple[float, ...] = ()
        self.by, self.travels = order.by, False


def padding_of_layouts(
    index: Index,
    cost: CostModel | None,
    balance: Balance,
    spec_of: Callable[[IndexCosts, Balance], PlanSpec],
    *,
    multiple_of: int,
    dummies: Mapping[str, int] | None,
    length: int | None,
    longest: int,
    tokens_per_rank: float,
) -> tuple[Figures, ...]:
    """Plan a few steps in each layout, over all ranks, under the same caps.

    `dummies`: modality -> LLM tokens of its dummy; None if batches have none. Without `length`, microbatches of one
    length have the shortest that holds the longest sample and the mean of a rank's tokens.
    """
    if length is None:
        length = -(-max(longest, int(tokens_per_rank)) // _ROUND) * _ROUND
    caps = {phase: cap for phase, cap in balance.caps.items() if phase != "llm"}
    one_length = replace(balance, max_tokens={**caps, "llm": length})
    tried: tuple[tuple[str, Layout, Balance], ...] = (
        ("padded", Padded(multiple_of=multiple_of), balance),
        ("packed", Packed(multiple_of=multiple_of), balance),
        ("one length", Packed(multiple_of=multiple_of, length=length), one_length),
    )
    padding = []
    for name, layout, its_balance in tried:
        costs = layout_costs(index, cost, layout)
        spec = spec_of(costs, its_balance)
        plans = [make_plan(spec, step) for step in spread_steps(spec, _STEPS_OF_LAYOUTS)]
        used = sum(int(index.tokens_of(plan.row).sum()) for plan in plans)
        held = sum(
            _positions(plan, layout, costs, dummies) if plan.filled is None else plan.filled[1] for plan in plans
        )
        padding.append(
            Figures(
                layout=name,
                length=layout.length,
                padding=1 - used / held if held else 0.0,
                microbatches=sum(plan.num_microbatches for plan in plans) / len(plans),
                steps=len(plans),
            )
        )
    return tuple(padding)


def _positions(plan: Plan, layout: Layout, costs: IndexCosts, dummies: Mapping[str, int] | None) -> int:
    """Count the positions of all microbatches as they are built: those of the samples, and a last sequence of dummies
    where no sample of a microbatch has a modality, or there is no sample.
    """
    # The sequences of samples, by microbatch.
    count = plan.num_ranks * plan.num_microbatches
    microbatch = plan.rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    lengths = costs.index.tokens_of(plan.row)
    # Those of dummies.
    if dummies is not None:
        has_dummy = np.bincount(microbatch, minlength=count) == 0
        tokens = np.zeros(count, np.int64)
        for phase in costs.phases[:-1]:
            has_part = costs.positions(phase, plan.row) > 0
            is_missing = np.bincount(microbatch[has_part], minlength=count) == 0
            has_dummy |= is_missing
            tokens += is_missing * dummies.get(phase, 1)
        microbatch = np.concatenate([microbatch, np.flatnonzero(has_dummy)])
        lengths = np.concatenate([lengths, np.maximum(tokens[has_dummy], 1)])
    order = np.argsort(microbatch, kind="stable")
    ends = np.cumsum(np.bincount(microbatch, minlength=count))
    return sum(int(row_lengths(layout, its).sum()) for its in np.split(lengths[order], ends[:-1]))


SettingName = Literal["none", "llm", "joint", "per_phase", "grouped", "grid", "tokens", "teams", "peers"]
SETTINGS: Final[tuple[SettingName, ...]] = get_args(SettingName)
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
_NEAR: Final = ("grouped", "grid")
"""Scopes in which samples stay near the group that reads their stream: with one stream a group, each reads its own."""


@dataclass(frozen=True)
class LlmAlone(IndexCosts):
    """Costs for a balancer that looks at LLM tokens alone."""

    @property
    def balanced(self) -> tuple[str, ...]:
        return ("llm",)


def make_scale(
    source: IndexCosts,
    balance: Balance,
    order_of: Callable[[int], AnyOrder],
    *,
    ranks: int,
    batch_size: int,
    batch_tokens: int | None,
    counts: TokenCounts,
    group_size: int,
    streams: int | None,
    steps: int,
    most_steps: int,
    shared: Balance | None,
    num_peers: int,
) -> Figures:
    """Plan some steps of an epoch on `ranks` ranks; `order_of`: number of streams -> the order; `shared`: `balance`
    with teams. See `profile`.
    """
    # The orders, and the steps: spread for balance, consecutive for locality.
    groups = -(-ranks // group_size)
    global_streams = streams or 1
    streams = streams or groups
    order = order_of(streams)
    global_order = order if global_streams == streams else order_of(global_streams)
    size = StepSize.of(ranks, batch_size, batch_tokens, counts)
    planned_of = partial(
        plan_enough, priced=source.balanced, first=steps, most=max(steps, most_steps), num_peers=num_peers
    )

    def spec_of(order: AnyOrder) -> PlanSpec:
        spec = epoch_spec(source, order, balance, size, num_ranks=ranks)
        return replace(spec, order=KnownSteps(spec.order))

    base = spec_of(order)
    global_base = base if global_order is order else spec_of(global_order)

    # Plan every scope, each phase by itself, and by LLM tokens alone.
    limited = balance.equal_count or balance.max_samples is not None
    scopes = [scope for scope in SCOPES if not (limited and scope == "grid")]
    tried: dict[SettingName, PlanSpec] = {}
    for scope in scopes:
        of_scope = base if scope in _NEAR else global_base
        tried["joint" if scope == "global" else scope] = _scoped(of_scope, scope, "joint", group_size)
    tried["per_phase"] = _scoped(global_base, "global", "per_phase", group_size)
    if num_peers > 1:
        tried["peers"] = replace(tried["per_phase"], num_peers=num_peers)
    if shared is not None:
        tried["teams"] = replace(tried["joint"], balance=shared)
    if len(source.balanced) > 1:
        llm_alone = LlmAlone(**{field.name: getattr(source, field.name) for field in fields(source)})
        tried["llm"] = replace(tried["joint"], costs=llm_alone)
    near: set[SettingName] = {name for name in tried if name in _NEAR and base is not global_base}
    of_others = {name: spec for name, spec in tried.items() if name not in near}
    planned = planned_of(of_others)
    if near:
        planned |= planned_of({name: tried[name] for name in near})

    # Steps of as many tokens, and the steps in a row that show which group reads what.
    if size.counts is None and not limited:
        mean = max(1, global_order.sums(counts).of_epoch(0) // global_order.length(0))
        in_tokens = StepSize(size.amount * mean, counts)
        spec = epoch_spec(source, global_order, tried["joint"].balance, in_tokens, num_ranks=ranks)
        planned |= planned_of({"tokens": spec})
    settings = {name: planned[name] for name in SETTINGS if name in planned}
    count = min(steps, base.num_steps)
    first = (base.num_steps - count) // 2
    run = range(first, first + count)
    one_stream = base if streams == 1 else global_base if global_streams == 1 else spec_of(order_of(1))

    # The figures.
    of_settings = make_settings(settings, of_other_steps=_NEAR if near else ())
    if num_peers > 1:
        of_settings["peers"]["num_peers"] = num_peers
    of_scopes = {}
    for scope in scopes:
        read = _groups_per_shard(_scoped(base, scope, "joint", group_size), run, source, group_size)
        of_one_stream = read
        if one_stream is not base:
            of_one_stream = _groups_per_shard(_scoped(one_stream, scope, "joint", group_size), run, source, group_size)
        of_scopes[scope] = Figures(groups_per_shard=read, groups_per_shard_of_one_stream=of_one_stream)
    return Figures(
        ranks=ranks,
        batch_size=batch_size if batch_tokens is None else None,
        global_batch_size=size.amount if batch_tokens is None else None,
        batch_tokens=batch_tokens,
        global_batch_tokens=None if batch_tokens is None else size.amount,
        samples=settings["joint"].mean("samples"),
        steps=len(settings["none"].steps),
        less_than_a_step=not base.batches.drop_last,
        group_size=group_size,
        groups=groups,
        streams=streams,
        global_streams=global_streams,
        scopes=of_scopes,
        settings=of_settings,
    )


def _scoped(spec: PlanSpec, scope: Scope, assignment: AssignmentKind, group_size: int) -> PlanSpec:
    size = group_size if scope in _NEAR else None
    encode = spec.balance.encode if assignment == "per_phase" else "micro_step"
    balance = replace(spec.balance, scope=scope, assignment=assignment, encode=encode, group_size=size)
    return replace(spec, balance=balance, ranks_per_node=group_size if assignment == "per_phase" else None)


def _groups_per_shard(spec: PlanSpec, run: Sequence[int], source: IndexCosts, group_size: int) -> float:
    """Return how many groups read from a shard in consecutive steps, with whole samples."""
    groups = -(-spec.num_ranks // group_size)
    plans = [make_plan(spec, StepTask(0, step)) for step in run]
    group = np.concatenate([plan.rank for plan in plans]) // group_size
    shard = source.index.shard[np.concatenate([plan.row for plan in plans])].astype(np.int64)
    return len(np.unique(shard * groups + group)) / len(np.unique(shard))


def is_better(one: PlannedSteps, other: PlannedSteps, *, paired: bool) -> bool:
    """Whether ranks wait less in `one`, by at least `CLEAR` standard errors of the difference.

    Without an error, of single steps, it is never known.
    """
    mine, theirs = one._deviations(), other._deviations()
    errors = [_standard_error(each) for each in ((mine - theirs,) if paired else (mine, theirs))]
    known = [each for each in errors if each is not None]
    if len(known) < len(errors):
        return False
    return other.waiting - one.waiting > max(CLEAR * float(np.hypot.reduce(known)), 1e-9)


def make_settings(
    planned: Mapping[SettingName, PlannedSteps], *, of_other_steps: Collection[SettingName] = ()
) -> dict[SettingName, Figures]:
    """Return how long ranks wait in each setting, and which settings it clearly beats.

    Those of `of_other_steps` are planned over the same steps as each other; "tokens" has steps of its own.
    """
    steps_of = {name: "tokens" if name == "tokens" else name in of_other_steps for name in planned}
    return {
        name: Figures(
            waiting=steps.waiting,
            waiting_error=steps.waiting_error,
            costliest=steps.costliest,
            phases={phase: steps.waiting_in(phase) for phase in steps.balanced} if steps.adds_up else {},
            samples=steps.mean("samples"),
            tokens=steps.mean("tokens"),
            tokenized=steps.mean("tokenized") / max(1.0, steps.mean("tokens")),
            microbatches=steps.mean("microbatches"),
            better_than=tuple(
                other
                for other in planned
                if other != name and is_better(steps, planned[other], paired=steps_of[name] == steps_of[other])
            ),
        )
        for name, steps in planned.items()
    }
