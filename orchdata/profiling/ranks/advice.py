"""What limits a step, and what would help: advice on each phase, and other steps planned for comparison.

one phase's costs of a usual step --balancers.advise--> PhaseAdvice
other caps, a larger batch        --plan, as in training--> Change
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from orchdata.balancers import advise
from orchdata.loaders.index.index import Index
from orchdata.order.steps import StepTask
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, SampleCosts, make_plan
from orchdata.profiling.ranks.planned import AnyOrder, PlannedSteps, StepSize, epoch_spec, plan_enough
from orchdata.profiling.ranks.settings import is_better

ENOUGH = 1.02  # A step this near its mean needs nothing.
LARGER_BATCHES = (2, 4)
MOST_SAMPLES = 1 << 18  # Larger global batches are not tried.


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A possible change, and max/mean of rank loads after it; see `orchdata.balancers.Option`."""

    remedy: Literal["context parallel", "more samples"]
    factor: int
    imbalance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseAdvice:
    """What limits a phase under any balancing, in the step with the median lower bound; see `balancers.advise`.

    Attributes:
        limit: the main limit.
        imbalance: max/mean of rank loads if only this phase is balanced, in one microbatch.
        cost_share: the phase's share of the cost of the step's samples, over the phases that the cost model names.
        samples_per_rank: samples that have the phase.
        giants: number of samples that cost more than the mean load of a rank.
        largest: cost of the largest sample over the mean load.
        largest_shard, largest_key: shard and key of that sample.
        remedies: what would help: of each kind the least that is enough, or the most that is possible.
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
class Change:
    """Another step over all ranks, planned: every cap of `max_tokens`, or the size of the batch, times `factor`.

    Attributes:
        factor: None for no cap.
        step: its cost over that of a perfectly even one, as `Scale.step.balanced`.
        steps: number of steps that were planned.
        with_replacement: the dataset has less than such a step, so samples were drawn with replacement.
        waiting, waiting_error, samples, tokens, microbatches: as in `Setting`.
        is_better: ranks wait less than in the balanced step, by at least three standard errors of the difference.
    """

    change: Literal["max_tokens", "batch_size"]
    factor: int | None
    step: float
    steps: int
    with_replacement: bool
    waiting: float
    waiting_error: float | None
    samples: float
    tokens: float
    microbatches: float
    is_better: bool


def phase_advice(
    phase: str, index: Index, spec: PlanSpec, steps: Sequence[StepTask], planned: PlannedSteps
) -> PhaseAdvice:
    """Return advice on one phase.

    Args:
        spec: the spec of `planned`.
        steps: its steps.
    """
    ratios = [step.phase_bounds[phase] / (step.totals[phase] or 1) for step in planned.steps]
    median = steps[int(np.argsort(ratios, kind="stable")[len(ratios) // 2])]
    uncapped = replace(spec, balance=replace(spec.balance, max_tokens=None), costs=_of_length(spec.costs, None))
    plan = make_plan(uncapped, median)
    costs = plan.costs[phase]
    advice = advise(costs, plan.num_ranks)
    largest = int(costs.argmax())
    row = int(plan.row[largest])
    best = {option.remedy: option for option in advice.options}  # the last of its kind is the best
    return PhaseAdvice(
        limit=advice.limit,
        imbalance=advice.makespan / advice.mean if advice.mean else 1.0,
        cost_share=int(costs.sum()) / sum(int(plan.costs[name].sum()) for name in planned.balanced),
        samples_per_rank=int(np.count_nonzero(costs)) / plan.num_ranks,
        giants=len(advice.giants),
        largest=int(costs[largest]) / advice.mean if advice.mean else 0.0,
        largest_shard=index.shard_of(row).url,
        largest_key=index.key(row),
        remedies=tuple(
            Remedy(remedy=option.remedy, factor=option.factor, imbalance=option.imbalance) for option in best.values()
        ),
    )


def try_changes(
    spec: PlanSpec, order: AnyOrder, size: StepSize, mean: int, planned: PlannedSteps, steps: int, most: int
) -> tuple[Change, ...]:
    """Plan possible changes of a step: larger caps, no caps, larger batches. None if the step is nearly even.

    Args:
        size: size of the step.
        mean: LLM tokens of a sample, mean.
        planned: the step as it is.
        steps, most: steps to plan for each change, see `plan_enough`.
    """
    if planned.step <= ENOUGH:
        return ()
    balance = spec.balance
    num_samples = size.amount if size.counts is None else size.amount // mean
    tried: list[tuple[Literal["max_tokens", "batch_size"], int | None]] = []
    if balance.caps:
        tried += [("max_tokens", 2), ("max_tokens", None)]
    tried += [("batch_size", factor) for factor in LARGER_BATCHES if factor * num_samples <= MOST_SAMPLES]
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
        result = plan_enough({"": other}, planned.balanced, steps, most)[0][""]
        changes.append(
            Change(
                change=change,
                factor=factor,
                step=result.step,
                steps=len(result.steps),
                with_replacement=other.order is not order,
                waiting=result.waiting,
                waiting_error=result.waiting_error,
                samples=result.mean_samples,
                tokens=result.mean_tokens,
                microbatches=result.mean_microbatches,
                is_better=is_better(result, planned, paired=False),
            )
        )
    return tuple(changes)


def _of_length(costs: SampleCosts, factor: int | None) -> SampleCosts:
    """Return costs for microbatches with `factor` times their fixed length; None for no fixed length."""
    if not isinstance(costs, IndexCosts) or costs.length is None:
        return costs
    return replace(costs, length=None if factor is None else factor * costs.length)
