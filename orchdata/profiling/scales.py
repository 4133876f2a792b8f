"""The profile of a number of ranks: plans of an epoch under every scope -> waiting, locality.

steps spread over the epoch   --plan, as in training--> cost of the step --> waiting
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
    most = max(steps, most_steps)

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
    planned = plan_enough(of_others, source.balanced, steps, most, num_peers)
    if near:
        planned |= plan_enough({name: tried[name] for name in near}, source.balanced, steps, most, num_peers)

    # Steps of as many tokens, and the steps in a row that show which group reads what.
    if size.counts is None and not limited:
        mean = max(1, sums_of(global_order, counts).of_epoch(0) // global_order.length(0))
        in_tokens = StepSize(size.amount * mean, counts)
        spec = epoch_spec(source, global_order, tried["joint"].balance, in_tokens, num_ranks=ranks)
        planned["tokens"] = plan_enough({"tokens": spec}, source.balanced, steps, most, num_peers)["tokens"]
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
