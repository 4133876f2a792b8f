"""The profile of a number of ranks: plans of an epoch under every scope -> balance, waiting, locality, other steps.

steps spread over the epoch   --plan, as in training--> cost of the step --> imbalance, speedup, waiting
consecutive steps             --plan, as in training--> which group reads which shard --> locality
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from orchdata.caching.own import own_streams
from orchdata.order.steps import StepTask
from orchdata.order.token_sums import TokenCounts
from orchdata.planning.balance import AssignmentKind, Balance, Scope
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, SampleCosts, make_plan
from orchdata.planning.sharing.fixed import better_budget
from orchdata.profiling.figures import Figures
from orchdata.profiling.planned import (
    CLEAR,
    AnyOrder,
    KnownSteps,
    PlannedSteps,
    StepSize,
    epoch_spec,
    plan_enough,
    sums_of,
)
from orchdata.ranks.parallel import Rank

SettingName = Literal["none", "llm", "joint", "per_phase", "grouped", "grid", "tokens"]
SETTINGS: Final[tuple[SettingName, ...]] = get_args(SettingName)
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
_NEAR: Final = ("grouped", "grid")
"""Scopes in which samples stay near the group that reads their stream: with one stream a group, each reads its own."""
MOST_REPEATS: Final = 16
"""A step of more times the data says nothing of larger data of the kind, and takes long to plan."""
_ENOUGH: Final = 1.02  # A step this near its mean needs nothing.
_LARGER_BATCHES: Final = (2, 4)
_MOST_SAMPLES: Final = 1 << 18  # Larger global batches are not tried.

_Tried = tuple[Literal["joint", "per_phase", "llm"], Scope]
"""What is balanced, and in which scope."""
_SETTING_OF: Final[Mapping[_Tried, SettingName]] = {
    ("joint", "none"): "none",
    ("llm", "global"): "llm",
    ("joint", "global"): "joint",
    ("per_phase", "global"): "per_phase",
    ("joint", "grouped"): "grouped",
    ("joint", "grid"): "grid",
}


@dataclass(frozen=True)
class LlmAlone(IndexCosts):
    """Costs for a balancer that looks at LLM tokens alone."""

    @property
    def balanced(self) -> tuple[str, ...]:
        return ("llm",)


class NodeCache(NamedTuple):
    """A cache on each node, and the data.

    Attributes:
        max_bytes: cap of each cache.
        stored_bytes: of all shards.
        read_bytes: what samples take in an epoch, over all nodes, read by range.
    """

    max_bytes: int
    stored_bytes: int
    read_bytes: int

    def reads(self, balance: Balance, *, ranks: int, group_size: int, streams: int) -> Figures:
        """Return what a node reads from the second epoch on, if nodes are groups of ranks."""
        own = own_streams(Rank(0, ranks, ranks_per_node=group_size), balance, streams)
        hits = 0.0
        if own is not None:
            hits = min(1.0, self.max_bytes / max(1.0, self.stored_bytes * len(own) / streams))
        return Figures(hits=hits, fetched_bytes=round(self.read_bytes * min(1.0, group_size / ranks) * (1 - hits)))


def make_scale(
    source: IndexCosts,
    balance: Balance,
    order_of: Callable[[int], AnyOrder],
    *,
    ranks: int,
    model_parallel: int,
    batch_size: int,
    batch_tokens: int | None,
    counts: TokenCounts,
    group_size: int,
    streams: int | None,
    steps: int,
    most_steps: int,
    cache: NodeCache | None = None,
) -> Figures:
    """Plan some steps of an epoch on `ranks` ranks. For other arguments see `profile`.

    Args:
        counts: LLM tokens of samples, as steps measure them.
        order_of: number of streams -> the order.
        cache: of each node; None without object storage.
    """
    # The orders, and the steps: spread for balance, consecutive for locality.
    groups = -(-ranks // group_size)
    global_streams = streams or 1
    streams = streams or groups
    order = order_of(streams)
    global_order = order if global_streams == streams else order_of(global_streams)
    size = StepSize.of(ranks, batch_size, batch_tokens, counts)
    most = max(steps, most_steps)

    def spec_of(order: AnyOrder) -> tuple[PlanSpec, bool]:
        spec = epoch_spec(source, order, balance, size, num_ranks=ranks, steps=most)
        return replace(spec, order=KnownSteps(spec.order)), spec.order is not order

    base, with_replacement = spec_of(order)
    global_base = base
    if global_order is not order:
        global_base, with_replacement = spec_of(global_order)

    # Plan every scope in both assignments, and by LLM tokens alone.
    limited = balance.equal_count or balance.max_samples is not None
    scopes = [scope for scope in SCOPES if not (limited and scope == "grid")]
    tried: dict[_Tried, PlanSpec] = {}
    for scope in scopes:
        of_scope = base if scope in _NEAR else global_base
        tried["joint", scope] = _scoped(of_scope, scope, "joint", group_size)
        if scope != "none":
            tried["per_phase", scope] = _scoped(of_scope, scope, "per_phase", group_size)
    if len(source.balanced) > 1:
        llm_alone = LlmAlone(**{field.name: getattr(source, field.name) for field in fields(source)})
        tried["llm", "global"] = replace(tried["joint", "global"], costs=llm_alone)
    near = {key: spec for key, spec in tried.items() if key[1] in _NEAR and base is not global_base}
    others = {key: spec for key, spec in tried.items() if key not in near}
    planned = plan_enough(others, source.balanced, steps, most)
    if near:
        planned |= plan_enough(near, source.balanced, steps, most)

    # Steps of as many tokens, and the steps in a row that show which group reads what.
    settings = {name: planned[tried_as] for tried_as, name in _SETTING_OF.items() if tried_as in planned}
    mean = max(1, sums_of(global_order, counts).of_epoch(0) // global_order.length(0))
    everywhere = tried["joint", "global"]
    if size.counts is None and not limited:
        in_tokens = StepSize(size.amount * mean, counts)
        spec = epoch_spec(source, global_order, everywhere.balance, in_tokens, num_ranks=ranks, steps=most)
        settings["tokens"] = plan_enough({"tokens": spec}, source.balanced, steps, most)["tokens"]
    count = min(steps, base.num_steps)
    first = (base.num_steps - count) // 2
    run = range(first, first + count)
    one_stream = base if streams == 1 else global_base if global_streams == 1 else spec_of(order_of(1))[0]

    # The figures.
    unbalanced, balanced, apart = planned["joint", "none"], planned["joint", "global"], planned["per_phase", "global"]
    of_scopes = {}
    for scope in scopes:
        locality = _locality(_scoped(base, scope, "joint", group_size), run, source, group_size)
        of_one_stream = locality
        if one_stream is not base:
            of_one_stream = _locality(_scoped(one_stream, scope, "joint", group_size), run, source, group_size)
        of_scopes[scope] = Figures(
            **_assigned(planned["joint", scope], unbalanced),
            per_phase=None if scope == "none" else _assigned(planned["per_phase", scope], unbalanced),
            **locality,
            groups_per_shard_of_one_stream=of_one_stream.groups_per_shard,
            node=cache
            and cache.reads(tried["joint", scope].balance, ranks=ranks, group_size=group_size, streams=streams),
        )
    return Figures(
        ranks=ranks,
        gpus=ranks * model_parallel,
        batch_size=batch_size if batch_tokens is None else None,
        global_batch_size=size.amount if batch_tokens is None else None,
        batch_tokens=batch_tokens,
        global_batch_tokens=None if batch_tokens is None else size.amount,
        samples=balanced.mean("samples"),
        better_tokens=None
        if batch_tokens is None or source.length is None
        else better_budget(size.amount, source.length, ranks),
        steps=len(unbalanced.steps),
        with_replacement=with_replacement,
        group_size=group_size,
        groups=groups,
        streams=streams,
        global_streams=global_streams,
        locality_steps=len(run),
        phases={
            phase: Figures(
                unbalanced=unbalanced.phase(phase),
                balanced=balanced.phase(phase),
                per_phase=apart.phase(phase),
                lower_bound=balanced.phase_bound(phase),
            )
            for phase in source.phases
        },
        step=Figures(
            unbalanced=unbalanced.step,
            balanced=balanced.step,
            per_phase=apart.step,
            lower_bound=balanced.step_bound,
        ),
        speedup=unbalanced.step / balanced.step,
        per_phase_speedup=unbalanced.step / apart.step,
        rows_between_groups=apart.rows_between_nodes,
        scopes=of_scopes,
        settings=make_settings(settings, of_other_steps=_NEAR if near else ()),
        changes=_try_changes(everywhere, global_order, size, mean, balanced, steps, most),
    )


def _scoped(spec: PlanSpec, scope: Scope, assignment: AssignmentKind, group_size: int) -> PlanSpec:
    size = group_size if scope in _NEAR else None
    balance = replace(spec.balance, scope=scope, assignment=assignment, group_size=size)
    return replace(spec, balance=balance, ranks_per_node=group_size if assignment == "per_phase" else None)


def _assigned(planned: PlannedSteps, unbalanced: PlannedSteps) -> Figures:
    return Figures(
        phases={phase: planned.phase(phase) for phase in planned.steps[0].totals},
        step=planned.step,
        speedup=unbalanced.step / planned.step,
        microbatches=planned.mean("microbatches"),
        fill=planned.fill,
    )


def _locality(spec: PlanSpec, run: Sequence[int], source: IndexCosts, group_size: int) -> Figures:
    """Measure which groups read which shards in consecutive steps, with whole samples."""
    groups = -(-spec.num_ranks // group_size)
    plans = [make_plan(spec, StepTask(0, step)) for step in run]
    group = np.concatenate([plan.rank for plan in plans]) // group_size
    stream_group = np.concatenate([plan.stream_rank for plan in plans]) // group_size
    shard = source.index.shard[np.concatenate([plan.row for plan in plans])].astype(np.int64)
    read = len(np.unique(shard * groups + group))  # pairs of a shard and a group that reads from it
    return Figures(
        own_streams=float(np.mean(group == stream_group)),
        shards_per_group=read / groups,
        groups_per_shard=read / len(np.unique(shard)),
    )


def is_better(one: PlannedSteps, other: PlannedSteps, *, paired: bool) -> bool:
    """Whether ranks wait less in `one`, by at least `CLEAR` standard errors of the difference.

    Without an error, of single steps, it is never known.
    """
    error = one.difference_error(other, paired=paired)
    return error is not None and other.waiting - one.waiting > max(CLEAR * error, 1e-9)


def make_settings(
    planned: Mapping[SettingName, PlannedSteps], *, of_other_steps: Collection[SettingName] = ()
) -> dict[SettingName, Figures]:
    """Return how long ranks wait in each setting, and which settings it clearly beats.

    Args:
        of_other_steps: settings that are planned over the same steps as each other, and over others than the rest.
            "tokens" has steps of its own.
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
            microbatches=steps.mean("microbatches"),
            better_than=tuple(
                other
                for other in planned
                if other != name and is_better(steps, planned[other], paired=steps_of[name] == steps_of[other])
            ),
        )
        for name, steps in planned.items()
    }


def _try_changes(
    spec: PlanSpec, order: AnyOrder, size: StepSize, mean: int, planned: PlannedSteps, steps: int, most: int
) -> tuple[Figures, ...]:
    """Plan other steps than `planned`: larger caps, no caps, larger batches. None if it is nearly even."""
    if planned.step <= _ENOUGH:
        return ()
    balance = spec.balance
    num_samples = size.amount if size.counts is None else size.amount // mean
    tried: list[tuple[str, int | None]] = [("max_tokens", 2), ("max_tokens", None)] if balance.caps else []
    tried += [("batch_size", factor) for factor in _LARGER_BATCHES if factor * num_samples <= _MOST_SAMPLES]
    changes = []
    for change, factor in tried:
        changed, costs, other_size = balance, spec.costs, size
        if change == "batch_size":
            larger = factor or 1
            other_size = size._replace(amount=size.amount * larger)
            if balance.max_samples is not None:
                changed = replace(balance, max_samples=balance.max_samples * larger)
        else:
            caps = None if factor is None else {phase: factor * cap for phase, cap in balance.caps.items()}
            changed, costs = replace(balance, max_tokens=caps), _of_length(spec.costs, factor)
        other = epoch_spec(costs, order, changed, other_size, num_ranks=spec.num_ranks, steps=most)
        result = plan_enough({"": other}, planned.balanced, steps, most)[""]
        changes.append(
            Figures(
                change=change,
                factor=factor,
                step=result.step,
                steps=len(result.steps),
                with_replacement=other.order is not order,
                waiting=result.waiting,
                waiting_error=result.waiting_error,
                samples=result.mean("samples"),
                tokens=result.mean("tokens"),
                microbatches=result.mean("microbatches"),
                is_better=is_better(result, planned, paired=False),
            )
        )
    return tuple(changes)


def _of_length(costs: SampleCosts, factor: int | None) -> SampleCosts:
    """Return costs for microbatches with `factor` times their fixed length; None for no fixed length."""
    if not isinstance(costs, IndexCosts) or costs.length is None:
        return costs
    return replace(costs, length=None if factor is None else factor * costs.length)
