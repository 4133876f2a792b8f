"""Some steps of an epoch, planned under one Balance as in training: the cost of ranks waiting in them, and padding.

PlanSpec, steps --make_plan--> plans --price--> PlannedSteps: sums over the steps, and their standard errors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.costs.model import CostModel
from orchdata.dataset.shards import layout_costs
from orchdata.loaders.index.index import Index
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, SampleOrder
from orchdata.order.steps import Batches, GlobalBatches, StepTask, Sums, TokenBatches
from orchdata.order.token_sums import TokenCounts, TokenSums
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import Layout, Packed, Padded, fixed_length, row_lengths
from orchdata.planning.make_plan import PlanSpec, SampleCosts, make_plan
from orchdata.planning.plan import Plan
from orchdata.profiling.figures import Figures

Key = TypeVar("Key")

SMALL_ERROR: Final = 0.02
"""Steps are added until the standard error of waiting is below this."""
CLEAR: Final = 3.0
"""Standard errors of a paired difference from which two settings are called different."""
_STEPS_OF_LAYOUTS: Final = 8
_ROUND: Final = 1024


class PlannedStep(NamedTuple):
    """One step. Costs are in the unit of the cost model, see `orchdata.planning.balance`.

    `totals` are sums over ranks of each phase; `microbatches` are of each rank, samples and tokens of all. `tokenized`
    are the tokens that ranks read and tokenize, more than `tokens` where members of teams do so for whole sequences.
    """

    cost: int
    phase_costs: Mapping[str, int]
    totals: Mapping[str, int]
    microbatches: int
    samples: int
    tokens: int
    tokenized: int = 0


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

    def difference_error(self, other: PlannedSteps, *, paired: bool) -> float | None:
        """Return that of the difference of `waiting`. `paired`: both are of the same steps of an order."""
        mine, theirs = self._deviations(), other._deviations()
        if paired:
            return _standard_error(mine - theirs)
        errors = _standard_error(mine), _standard_error(theirs)
        return None if None in errors else float(np.hypot(*errors))  # type: ignore[arg-type]

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


AnyOrder = Order | MixtureOrder


def sums_of(order: AnyOrder, counts: TokenCounts) -> Sums:
    """Return the sums of tokens along an order; a mixture has its own."""
    return order if isinstance(order, MixtureOrder) else TokenSums(order, counts)


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
        sums = sums_of(order, size.counts)
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
    every standard error is below `SMALL_ERROR`, or there are `most`.

    After each round the steps so far are spread over an epoch. The specs differ in balance and costs, not in order and
    size of steps. `priced` are the phases that make up the step. Of a rank with `num_peers`, each encodes all media of
    the rank, unless a spec has them share.
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
        self.rows, self.drawn_from = cache(order.rows), cache(order.drawn_from)


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
        padding.append(_padding(name, layout, costs, spec_of(costs, its_balance), dummies))
    return tuple(padding)


def _padding(
    name: str, layout: Layout, costs: IndexCosts, spec: PlanSpec, dummies: Mapping[str, int] | None
) -> Figures:
    steps = spread_steps(spec, _STEPS_OF_LAYOUTS)
    used = held = microbatches = 0
    for step in steps:
        plan = make_plan(spec, step)
        used += int(costs.index.tokens_of(plan.row).sum())
        held += _positions(plan, layout, costs, dummies) if plan.filled is None else plan.filled[1]
        microbatches += plan.num_microbatches
    return Figures(
        layout=name,
        length=fixed_length(layout),
        padding=1 - used / held if held else 0.0,
        microbatches=microbatches / len(steps),
        steps=len(steps),
    )


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
