"""The profile of a number of ranks: plans of an epoch under every scope -> balance, locality, advice.

steps spread over the epoch   --plan, as in training--> cost of the step --> imbalance, speedup, advice
consecutive steps             --plan, as in training--> which group reads which shard --> locality
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from orchdata.order.steps import StepTask
from orchdata.order.token_sums import TokenCounts
from orchdata.planning.balance import AssignmentKind, Balance, Scope
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.sharing.fixed import better_budget
from orchdata.profiling.ranks.advice import Change, PhaseAdvice, phase_advice, try_changes
from orchdata.profiling.ranks.cached import NodeCache, NodeReads
from orchdata.profiling.ranks.planned import (
    AnyOrder,
    PlannedSteps,
    StepSize,
    epoch_spec,
    plan_enough,
    sums_of,
    with_known_steps,
)
from orchdata.profiling.ranks.settings import LlmAlone, Setting, SettingName, make_settings

SCOPES: tuple[Scope, ...] = get_args(Scope)
_NEAR: Final = ("grouped", "grid")
"""Scopes in which samples stay near the group that reads their stream: with one stream a group, each reads its own."""
MOST_REPEATS: Final = 16
"""A step of more times the data says nothing of larger data of the kind, and takes long to plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseImbalance:
    """Cost that ranks wait for over the mean load, where 1 is perfect: the time lost in a phase is 1 - 1/this.

    It is max/mean of rank loads, or that of each micro-step if ranks meet in each and caps make several.

    Attributes:
        unbalanced: samples distributed in turn, as a plain sampler does, within the same caps.
        balanced: samples as the DataLoader assigns them, over all ranks.
        per_phase: the same under `Balance(assignment="per_phase")`, where the parts of samples are distributed too.
        lower_bound: no assignment of whole samples is better; above 1 if single samples are too large.
    """

    unbalanced: float
    balanced: float
    per_phase: float
    lower_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentProfile:
    """The result of a scope of balancing, in joint or per-phase assignment.

    Attributes:
        phases: phase -> cost that ranks wait for over the mean load.
        step: the same for the whole step.
        speedup: cost of the step of scope "none" under the same caps over that of this one.
        microbatches: microbatches of each rank in a step, mean over steps.
        fill: tokens of samples over positions of all microbatches, if these have one length; else None.
    """

    phases: Mapping[str, float]
    step: float
    speedup: float
    microbatches: float
    fill: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeProfile(AssignmentProfile):
    """A scope of balancing: how evenly whole samples are distributed, and how locally.

    Attributes:
        per_phase: the same scope with encoders balanced separately; None if nothing is balanced.
        own_streams: share of samples that stay in the group of ranks that reads their stream.
        shards_per_group: shards that a group reads from in `Scale.locality_steps` steps, mean over groups.
        groups_per_shard: groups that read from a shard in these steps, mean over the shards that any group reads from:
            the bytes read if each group fetches the shards it needs whole, over the bytes read if each shard were
            fetched once. From 1 (only one group reads each shard) to the number of groups.
        groups_per_shard_of_one_stream: the same if the order has one stream, as with `shuffle=True`.
        node: what a node with a cache reads, if nodes are groups; None without object storage.
    """

    per_phase: AssignmentProfile | None
    own_streams: float
    shards_per_group: float
    groups_per_shard: float
    groups_per_shard_of_one_stream: float
    node: NodeReads | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The profile of a number of ranks, over `steps` steps spread over an epoch.

    Steps are added, up to 64, until the standard error of each setting's waiting is below 2 points.

    Attributes:
        gpus: GPUs of all ranks, each a model-parallel group.
        batch_size, global_batch_size: samples of a step, per rank and of all; None if it is measured in tokens.
        batch_tokens, global_batch_tokens: LLM tokens of a step, per rank and of all; None if it is in samples.
        samples: samples of a step, mean.
        better_tokens: global_batch_tokens near that of the step that would fill microbatches of one length; None if
            the step fills them, or lengths vary.
        with_replacement: the dataset has less than a global batch, so samples were drawn with replacement.
        group_size, groups: ranks of a group, such as those of a node, and the number of groups.
        streams: streams of the order in groups and in a grid, as in `od.Shuffle(streams=...)`. Locality of every scope
            is measured with these.
        global_streams: streams of the order of the other settings: one, unless a number was given for all.
        locality_steps: consecutive steps, in the middle of the epoch, over which locality is measured.
        phases: every phase of the dataset; those that the cost model does not name are not balanced.
        step: the whole step, over the phases of the cost model.
        speedup, per_phase_speedup: cost of the unbalanced step over that of the balanced one; an estimate by the cost
            model. Per phase without the time to send features.
        rows_between_groups: encoder phase -> share of its features' rows that leave their group, such as their node,
            per phase over all ranks.
        scopes: result of each scope of balancing; without "grid" if counts of samples are limited.
        settings: how long ranks wait without balancing ("none"), balanced by LLM tokens alone ("llm", if the model has
            other phases), over all ranks with whole samples ("joint") or each phase apart ("per_phase"), in groups, in
            a grid, and with steps in tokens, of as many as the mean of the present steps ("tokens").
        advice: advice on the phases of the cost model, each balanced by itself in one microbatch.
        changes: alternatives to the whole step, planned; empty if it is within 2 % of the mean.
    """

    ranks: int
    gpus: int
    batch_size: int | None
    global_batch_size: int | None
    batch_tokens: int | None
    global_batch_tokens: int | None
    samples: float
    better_tokens: int | None
    steps: int
    with_replacement: bool
    group_size: int
    groups: int
    streams: int
    global_streams: int
    locality_steps: int
    phases: Mapping[str, PhaseImbalance]
    step: PhaseImbalance
    speedup: float
    per_phase_speedup: float
    rows_between_groups: Mapping[str, float]
    scopes: Mapping[Scope, ScopeProfile]
    settings: Mapping[SettingName, Setting]
    advice: Mapping[str, PhaseAdvice]
    changes: tuple[Change, ...]


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
) -> Scale:
    """Plan some steps of an epoch on `ranks` ranks. For other arguments see `orchdata.profiling.make_profile.profile`.

    Args:
        source: costs of an index.
        counts: its LLM tokens, as steps measure them.
        order_of: number of streams -> the order.
        streams: streams of the order; None for one per group in groups and in a grid, and one for all other settings.
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
    base = epoch_spec(source, order, balance, size, num_ranks=ranks, steps=most)
    with_replacement = base.order is not order
    base = global_base = with_known_steps(base)
    if global_order is not order:
        global_base = epoch_spec(source, global_order, balance, size, num_ranks=ranks, steps=most)
        with_replacement = global_base.order is not global_order
        global_base = with_known_steps(global_base)
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
        tried["llm", "global"] = replace(tried["joint", "global"], costs=LlmAlone.of(source))
    near = {key: spec for key, spec in tried.items() if key[1] in _NEAR and base is not global_base}
    others = {key: spec for key, spec in tried.items() if key not in near}
    planned, spread = plan_enough(others, source.balanced, steps, most)
    if near:
        planned |= plan_enough(near, source.balanced, steps, most)[0]
    joint = {scope: planned["joint", scope] for scope in scopes}
    apart: dict[Scope, PlannedSteps] = {scope: planned["per_phase", scope] for scope in scopes if scope != "none"}
    # Steps of as many tokens, and the steps in a row that show which group reads what.
    mean = max(1, sums_of(global_order, counts).of_epoch(0) // global_order.length(0))
    in_tokens = None
    if size.counts is None and balance.max_samples is None and not balance.equal_count:
        spec = epoch_spec(
            source,
            global_order,
            tried["joint", "global"].balance,
            StepSize(size.amount * mean, counts),
            num_ranks=ranks,
            steps=most,
        )
        in_tokens = plan_enough({"tokens": spec}, source.balanced, steps, most)[0]["tokens"]
    run = _steps_in_a_row(base, steps)
    locality = _localities(base, scopes, run, source, group_size)
    of_one_stream = locality
    if streams != 1:
        one = global_base
        if global_streams != 1:
            one = with_known_steps(epoch_spec(source, order_of(1), balance, size, num_ranks=ranks, steps=most))
        of_one_stream = _localities(one, scopes, run, source, group_size)
    unbalanced, balanced = joint["none"], joint["global"]
    return Scale(
        ranks=ranks,
        gpus=ranks * model_parallel,
        batch_size=batch_size if batch_tokens is None else None,
        global_batch_size=size.amount if batch_tokens is None else None,
        batch_tokens=batch_tokens,
        global_batch_tokens=None if batch_tokens is None else size.amount,
        samples=balanced.mean_samples,
        better_tokens=None
        if batch_tokens is None or source.length is None
        else better_budget(size.amount, source.length, ranks),
        steps=len(spread),
        with_replacement=with_replacement,
        group_size=group_size,
        groups=groups,
        streams=streams,
        global_streams=global_streams,
        locality_steps=len(run),
        phases={
            phase: PhaseImbalance(
                unbalanced=unbalanced.phase(phase),
                balanced=balanced.phase(phase),
                per_phase=apart["global"].phase(phase),
                lower_bound=balanced.phase_bound(phase),
            )
            for phase in source.phases
        },
        step=PhaseImbalance(
            unbalanced=unbalanced.step,
            balanced=balanced.step,
            per_phase=apart["global"].step,
            lower_bound=balanced.step_bound,
        ),
        speedup=unbalanced.step / balanced.step,
        per_phase_speedup=unbalanced.step / apart["global"].step,
        rows_between_groups=apart["global"].rows_between_nodes,
        scopes={
            scope: _scope_profile(
                joint[scope],
                unbalanced,
                apart.get(scope),
                locality[scope],
                of_one_stream[scope],
                cache
                and cache.reads(tried["joint", scope].balance, ranks=ranks, group_size=group_size, streams=streams),
            )
            for scope in scopes
        },
        settings=make_settings(_by_setting(planned, in_tokens), of_other_steps=_NEAR if near else ()),
        advice={
            phase: phase_advice(phase, source.index, tried["joint", "none"], spread, balanced)
            for phase in source.balanced
        },
        changes=try_changes(tried["joint", "global"], global_order, size, mean, balanced, steps, most),
    )


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


def _by_setting(
    planned: Mapping[_Tried, PlannedSteps], in_tokens: PlannedSteps | None
) -> dict[SettingName, PlannedSteps]:
    named = {name: planned[tried] for tried, name in _SETTING_OF.items() if tried in planned}
    return named if in_tokens is None else named | {"tokens": in_tokens}


def _steps_in_a_row(spec: PlanSpec, most: int) -> range:
    """Return up to `most` steps in the middle of the epoch."""
    count = min(most, spec.num_steps)
    first = (spec.num_steps - count) // 2
    return range(first, first + count)


def _scoped(spec: PlanSpec, scope: Scope, assignment: AssignmentKind, group_size: int) -> PlanSpec:
    size = group_size if scope in ("grouped", "grid") else None
    balance = replace(spec.balance, scope=scope, assignment=assignment, group_size=size)
    return replace(spec, balance=balance, ranks_per_node=group_size if assignment == "per_phase" else None)


class _Locality(NamedTuple):
    """See `ScopeProfile`."""

    own_streams: float
    shards_per_group: float
    groups_per_shard: float


def _scope_profile(
    planned: PlannedSteps,
    unbalanced: PlannedSteps,
    apart: PlannedSteps | None,
    locality: _Locality,
    of_one_stream: _Locality,
    node: NodeReads | None,
) -> ScopeProfile:
    joint = _assignment_profile(planned, unbalanced)
    return ScopeProfile(
        phases=joint.phases,
        step=joint.step,
        speedup=joint.speedup,
        microbatches=joint.microbatches,
        fill=joint.fill,
        per_phase=None if apart is None else _assignment_profile(apart, unbalanced),
        own_streams=locality.own_streams,
        shards_per_group=locality.shards_per_group,
        groups_per_shard=locality.groups_per_shard,
        groups_per_shard_of_one_stream=of_one_stream.groups_per_shard,
        node=node,
    )


def _assignment_profile(planned: PlannedSteps, unbalanced: PlannedSteps) -> AssignmentProfile:
    return AssignmentProfile(
        phases={phase: planned.phase(phase) for phase in planned.steps[0].totals},
        step=planned.step,
        speedup=unbalanced.step / planned.step,
        microbatches=planned.mean_microbatches,
        fill=planned.fill,
    )


def _localities(
    spec: PlanSpec, scopes: Sequence[Scope], run: Sequence[int], source: IndexCosts, group_size: int
) -> dict[Scope, _Locality]:
    return {scope: _locality(_scoped(spec, scope, "joint", group_size), run, source, group_size) for scope in scopes}


def _locality(spec: PlanSpec, run: Sequence[int], source: IndexCosts, group_size: int) -> _Locality:
    """Measure which groups read which shards in consecutive steps, with whole samples."""
    groups = -(-spec.num_ranks // group_size)
    plans = [make_plan(spec, StepTask(0, step)) for step in run]
    group = np.concatenate([plan.rank for plan in plans]) // group_size
    stream_group = np.concatenate([plan.stream_rank for plan in plans]) // group_size
    shard = source.index.shard[np.concatenate([plan.row for plan in plans])].astype(np.int64)
    read = len(np.unique(shard * groups + group))  # pairs of a shard and a group that reads from it
    return _Locality(float(np.mean(group == stream_group)), read / groups, read / len(np.unique(shard)))
