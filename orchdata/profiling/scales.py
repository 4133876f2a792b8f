"""The profile of a number of ranks: plans of an epoch under every scope -> balance, waiting, locality.

steps spread over the epoch   --plan, as in training--> cost of the step --> imbalance, speedup, waiting
consecutive steps             --plan, as in training--> which group reads which shard --> locality
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

import numpy as np

from orchdata.order.steps import StepTask
from orchdata.order.token_sums import TokenCounts
from orchdata.planning.balance import AssignmentKind, Balance, Scope
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, make_plan
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

SettingName = Literal["none", "llm", "joint", "per_phase", "grouped", "grid", "tokens"]
SETTINGS: Final[tuple[SettingName, ...]] = get_args(SettingName)
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
_NEAR: Final = ("grouped", "grid")
"""Scopes in which samples stay near the group that reads their stream: with one stream a group, each reads its own."""
MOST_REPEATS: Final = 16
"""A step of more times the data says nothing of larger data of the kind, and takes long to plan."""

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
) -> Figures:
    """Plan some steps of an epoch on `ranks` ranks; `order_of`: number of streams -> the order. See `profile`."""
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
    if size.counts is None and not limited:
        mean = max(1, sums_of(global_order, counts).of_epoch(0) // global_order.length(0))
        in_tokens, everywhere = StepSize(size.amount * mean, counts), tried["joint", "global"].balance
        spec = epoch_spec(source, global_order, everywhere, in_tokens, num_ranks=ranks, steps=most)
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
        )
    return Figures(
        ranks=ranks,
        batch_size=batch_size if batch_tokens is None else None,
        global_batch_size=size.amount if batch_tokens is None else None,
        batch_tokens=batch_tokens,
        global_batch_tokens=None if batch_tokens is None else size.amount,
        samples=balanced.mean("samples"),
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
            microbatches=steps.mean("microbatches"),
            better_than=tuple(
                other
                for other in planned
                if other != name and is_better(steps, planned[other], paired=steps_of[name] == steps_of[other])
            ),
        )
        for name, steps in planned.items()
    }
