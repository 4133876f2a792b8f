"""Some steps of an epoch, planned under one Balance as in training, and the cost of ranks waiting in them.

PlanSpec, steps --make_plan--> plans --price--> PlannedSteps (sums over the steps)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, SampleOrder
from orchdata.order.steps import Batches, GlobalBatches, StepTask, Sums, TokenBatches
from orchdata.order.token_sums import TokenCounts, TokenSums
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec, SampleCosts, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSteps:
    """Some steps, planned. All attributes except `num_ranks` and the last one have one entry per step. See
    `orchdata.planning.price`.

    Attributes:
        balanced: phases of the cost model, which make up the step.
        costs, bounds: cost of the step, and a lower bound of it.
        phase_costs, phase_bounds: phase -> the same for each phase.
        totals: phase -> sum over ranks.
        microbatches: microbatches of each rank.
        samples: samples of all ranks.
        filled: tokens of samples in microbatches of one length, and positions of these; None if lengths vary.
        rows_between_nodes: encoder phase -> share of its features' rows that cross nodes, over all steps, if parts are
            assigned separately.
    """

    num_ranks: int
    balanced: tuple[str, ...]
    costs: tuple[int, ...]
    bounds: tuple[int, ...]
    phase_costs: Mapping[str, tuple[int, ...]]
    phase_bounds: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, tuple[int, ...]]
    microbatches: tuple[int, ...]
    samples: tuple[int, ...]
    filled: tuple[tuple[int, int], ...] | None
    rows_between_nodes: Mapping[str, float]

    @property
    def step(self) -> float:
        """Cost of the steps over that of perfectly even ones."""
        return self._over_mean(sum(self.costs), *self.balanced)

    @property
    def step_bound(self) -> float:
        """No assignment has a smaller `step`."""
        return self._over_mean(sum(self.bounds), *self.balanced)

    def phase(self, name: str) -> float:
        """Return `step` for one phase; 1 if no sample enters it."""
        return self._over_mean(sum(self.phase_costs[name]), name)

    def phase_bound(self, name: str) -> float:
        """Return `step_bound` for one phase."""
        return self._over_mean(sum(self.phase_bounds[name]), name)

    @property
    def mean_microbatches(self) -> float:
        """Micro-steps of a step."""
        return sum(self.microbatches) / len(self.microbatches)

    @property
    def fill(self) -> float | None:
        """Share of the microbatches' positions that have tokens of samples; None if lengths vary."""
        return None if self.filled is None else sum(used for used, _ in self.filled) / sum(of for _, of in self.filled)

    def _over_mean(self, cost: int, *phases: str) -> float:
        total = sum(sum(self.totals[phase]) for phase in phases)
        return cost * self.num_ranks / total if total else 1.0


def plan_steps(spec: PlanSpec, steps: Sequence[int]) -> PlannedSteps:
    """Plan these steps of epoch 0, and price them by `spec.balance.price`."""
    phases, balanced, price = spec.costs.phases, spec.costs.balanced, spec.balance.price
    costs, bounds, microbatches, samples, filled = [], [], [], [], []
    rows: dict[str, NDArray[np.int64]] = {}
    by_phase: dict[str, list[tuple[int, int, int]]] = {phase: [] for phase in phases}
    for step in steps:
        plan = make_plan(spec, StepTask(0, step))
        cells = {phase: plan.cells(phase) for phase in phases}
        costs.append(price.of([cells[phase] for phase in balanced]))
        bounds.append(plan.cost_bound(price, balanced))
        microbatches.append(plan.num_microbatches)
        samples.append(len(plan.row))
        filled += [] if plan.filled is None else [plan.filled]
        for phase in plan.parts:
            rows[phase] = rows.get(phase, np.zeros(3, np.int64)) + plan.feature_rows(phase)
        for phase, figures in by_phase.items():
            total = int(plan.costs[phase].sum())
            figures.append((price.of([cells[phase]]), plan.lower_bound(phase), total))
    columns = {phase: tuple(zip(*figures, strict=True)) for phase, figures in by_phase.items()}
    return PlannedSteps(
        num_ranks=spec.num_ranks,
        balanced=balanced,
        costs=tuple(costs),
        bounds=tuple(bounds),
        phase_costs={phase: column[0] for phase, column in columns.items()},
        phase_bounds={phase: column[1] for phase, column in columns.items()},
        totals={phase: column[2] for phase, column in columns.items()},
        microbatches=tuple(microbatches),
        samples=tuple(samples),
        filled=tuple(filled) or None,
        rows_between_nodes={phase: int(ways[2]) / max(1, int(ways.sum())) for phase, ways in rows.items()},
    )


AnyOrder = Order | MixtureOrder


def sums_of(order: AnyOrder, counts: TokenCounts) -> Sums:
    """Return the sums of tokens along an order; a mixture has its own."""
    return order if isinstance(order, MixtureOrder) else TokenSums(order, counts)


class StepSize(NamedTuple):
    """Size of a step over all ranks: `amount` samples, or LLM tokens counted by `counts`."""

    amount: int
    counts: TokenCounts | None = None


def epoch_spec(
    source: SampleCosts, order: AnyOrder, balance: Balance, size: StepSize, *, num_ranks: int, steps: int
) -> PlanSpec:
    """Return the spec of an epoch of `order`, or of `steps` steps with replacement if it is less than one step."""
    drawn: SampleOrder = order
    seed = 0 if isinstance(order, MixtureOrder) else order.seed
    batches: Batches = GlobalBatches(size=size.amount, drop_last=True)
    if size.counts is None:
        if order.length(0) < size.amount:
            drawn = Draws(order, seed, steps * size.amount)
    else:
        sums = sums_of(order, size.counts)
        total = sums.of_epoch(0)
        if total < size.amount:
            some = -(-steps * size.amount * order.length(0) // max(1, total))
            drawn = Draws(order, seed, some + some // 4)
            sums = ListedSums(np.cumsum(size.counts(drawn.rows(0, 0, drawn.num_samples)[1])))
        batches = TokenBatches(sums=sums, budgets=((0, size.amount),), drop_last=True)
    return PlanSpec(costs=source, order=drawn, batches=batches, balance=balance, num_ranks=num_ranks)


@dataclass(frozen=True, eq=False)
class ListedSums:
    """`TokenSums` of one epoch as an array: tokens up to and with each position, int64 (num_samples,)."""

    ends: NDArray[np.int64]

    def of_epoch(self, epoch: int) -> int:
        return int(self.ends[-1])

    def of_epochs_before(self, epoch: int) -> int:
        return epoch * self.of_epoch(epoch)

    def before(self, epoch: int, position: int) -> int:
        return int(self.ends[position - 1]) if position else 0

    def position(self, epoch: int, tokens: int) -> int:
        return int(np.searchsorted(self.ends, tokens, side="right"))


def spread_steps(spec: PlanSpec, most: int) -> list[int]:
    """Return up to `most` steps, spread evenly over the epoch."""
    return [int(step) for step in np.linspace(0, spec.num_steps - 1, min(most, spec.num_steps)).astype(np.int64)]


@dataclass(frozen=True)
class Draws:
    """Samples of `order` drawn with replacement, seeded: a global batch larger than the dataset can be planned.

    If `order` is of one data set, position p is drawn from stream p % streams, as there.
    """

    order: AnyOrder
    seed: int
    num_samples: int

    def length(self, epoch: int) -> int:
        return self.num_samples

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        picks = self._picks(epoch)[start:stop]
        source, row = self.order.rows(epoch, 0, self.order.length(epoch))
        return source[picks], row[picks]

    def drawn_from(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        streams: NDArray[np.int64] = self.order.drawn_from(epoch, 0, self.order.length(epoch))
        return streams[self._picks(epoch)[start:stop]]

    def _picks(self, epoch: int) -> NDArray[np.int64]:
        total, streams = self.order.length(epoch), self.order.streams
        turn = np.arange(self.num_samples) % min(streams, total)
        sizes = (total - 1 - turn) // streams + 1
        picks: NDArray[np.int64] = turn + streams * np.random.default_rng((self.seed, epoch)).integers(sizes)
        return picks
