"""Figures of `stats()`: each is declared here once, measured when a step is built, and added when it is delivered.

    PlannedShare --measure--> step_figures: name -> numbers --added--> name -> sum --show--> stats()[name]

The docstring of a measuring function says what `stats()` shows. Worker processes send the numbers unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.checks import MAX_TOTAL
from orchdata.planning.make_plan import PlanSpec
from orchdata.planning.plan import Plan

Add = Callable[[Any, Any], Any]
Measure = Callable[["PlannedShare"], Any]
Show = Callable[[Any, int], Any]

STAGES = ("planning", "reading", "decoding", "packing", "handing_over")
"""Of `BuiltStep.seconds`: what `stats()["milliseconds"]` shows per step."""


class PlannedShare:
    """A plan made from `spec`, seen from one rank: the input of figures. `is_alone`: one rank has everything in one
    microbatch, so all loads are sums.
    """

    def __init__(self, spec: PlanSpec, plan: Plan, rank: int, num_failures: int = 0) -> None:
        self.spec = spec
        self.plan = plan
        self.rank = rank
        self.num_failures = num_failures
        alone = plan.num_ranks == plan.num_microbatches == 1 and plan.padded.adds_up and not plan.parts
        self.price = spec.balance.price
        self.is_alone = alone and self.price.adds_up

    @cached_property
    def mine(self) -> NDArray[np.int64] | slice:
        """The samples of the rank, as an index into the columns of the global batch."""
        return slice(None) if self.is_alone else self.plan.places(self.rank)

    @property
    def counted(self) -> NDArray[np.int64] | slice:
        """Those of `mine` that count here: a shared sample counts on its first member alone."""
        return self.mine if self.plan.teams is None else np.flatnonzero(self.plan.rank == self.rank)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """LLM positions of each of the rank's samples, int64 (num_samples,)."""
        return self.plan.llm_positions[self.mine]

    @cached_property
    def cells(self) -> dict[str, NDArray[np.int64]]:
        return {phase: self.plan.cells(phase) for phase in self.plan.phases}

    def waits(self, cells: dict[str, NDArray[np.int64]]) -> float:
        """The price of cells, in the unit of `Plan.waits`."""
        balanced = self.spec.costs.balanced
        return float(self.price.of([cells[phase] * self.plan.peers_of(phase) for phase in balanced]))

    @cached_property
    def cells_unbalanced(self) -> dict[str, NDArray[np.int64]]:
        return {phase: self.plan.cells_unbalanced(phase) for phase in self.plan.phases}

    @cached_property
    def step_cost(self) -> float:
        """The price of the step as planned."""
        return self.even_cost if self.is_alone else self.waits(self.cells)

    @cached_property
    def unbalanced_cost(self) -> float:
        """The price of the step with samples dealt out in turn."""
        return self.even_cost if self.is_alone else self.waits(self.cells_unbalanced)

    @cached_property
    def even_cost(self) -> float:
        """The price of a perfectly even step."""
        means = [self.totals[phase] / self.plan.num_ranks for phase in self.spec.costs.balanced]
        return self.price.of_even(means, self.plan.num_microbatches)

    @cached_property
    def totals(self) -> dict[str, int]:
        return {phase: int(costs.sum()) for phase, costs in self.plan.costs.items()}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of `stats()`: its key; its numbers in a step (a number, a tuple, or a mapping of those by name; None
    adds nothing); (sum, number of steps) -> plain value; the first sum; and what adds a number, or each of a tuple.
    """

    name: str
    measure: Measure
    show: Show
    start: Any
    add: Add | tuple[Add, ...]

    def added(self, total: Any, numbers: Any) -> Any:
        """Return the sum with the numbers of one more step."""
        if numbers is None:
            return total
        if isinstance(numbers, dict):
            return total | {name: self.added(total.get(name), each) for name, each in numbers.items()}
        if total is None:
            return numbers
        if isinstance(self.add, tuple):
            return tuple(add(one, other) for add, one, other in zip(self.add, total, numbers, strict=True))
        return tuple(map(self.add, total, numbers)) if isinstance(numbers, tuple) else self.add(total, numbers)


FIGURES: list[Figure] = []
"""In the order of `stats()`."""


def step_figures(spec: PlanSpec, plan: Plan, rank: int, num_failures: int) -> dict[str, Any]:
    """Return the numbers of every figure in a step, by name. Takes milliseconds at thousands of ranks."""
    share = PlannedShare(spec, plan, rank, num_failures)
    return {figure.name: figure.measure(share) for figure in FIGURES}


def plain_figures(num_steps: int, num_samples: int) -> dict[str, Any]:
    """The sums of every figure over steps of one rank that no plan is made for: all samples cost the same."""
    even = float(num_samples), float(num_samples)
    return {
        **{figure.name: figure.start for figure in FIGURES},
        "samples": num_samples,
        "phases": {"llm": (float(num_samples),) * 6},
        "microbatches": num_steps,
        "step_imbalance": even,
        "step_imbalance_unbalanced": even,
        "saved": even,
        "padding_if_padded": (num_samples, num_samples),
    }


def _mean(total: Any, num_steps: int) -> float | None:
    return None if total is None else total / num_steps


def _named(*names: str) -> Show:
    return lambda total, num_steps: dict(zip(names, total, strict=True))


def _each(show: Show) -> Show:
    return lambda total, num_steps: {name: show(each, num_steps) for name, each in total.items()}


def _figure(
    show: Show = lambda total, _: total, *, start: Any = 0, add: Add | tuple[Add, ...] = operator.add
) -> Callable[[Measure], Measure]:
    """Declare a figure that the decorated function measures; the function's name is the key."""

    def declare(measure: Measure) -> Measure:
        FIGURES.append(Figure(measure.__name__, measure, show, start, add))
        return measure

    return declare


@_figure()
def samples(share: PlannedShare) -> int:
    """Samples delivered to this rank; the pieces of a split sample count one by one, and so do those of a document that
    windows cut.

    Per phase, and in a step that shares samples, one that failed stays, without loss. A shared one counts on the first
    of its ranks.
    """
    return len(share.plan.row[share.counted]) - (0 if share.plan.keeps_shapes else share.num_failures)


@_figure()
def loss_tokens(share: PlannedShare) -> int:
    """Planned loss tokens over all ranks."""
    return share.plan.loss_tokens


@_figure(_named("truncated", "cut_tokens", "split", "pieces"), start=(0, 0, 0, 0))
def overflow(share: PlannedShare) -> tuple[int, ...]:
    """The effect of `TextPreprocessor.overflow` on samples planned for this rank.

    Samples `truncated`, `cut_tokens` that they lost, samples `split` (counted with their first piece), and their
    `pieces`. They can be summed over ranks.
    """
    costs = share.spec.costs
    index = getattr(costs, "index", None)
    if index is None or not any(index.totals["overflow"].values()):
        return 0, 0, 0, 0
    rows = share.plan.row[share.counted]
    if share.plan.ranges is not None:  # a document counts where it begins
        rows = rows[share.plan.ranges.first[share.counted] == 0]
    cut, piece = index.cut_tokens[rows], index.piece[rows]
    following = rows + 1
    continued = np.zeros(len(rows), np.bool_)
    inside = following < index.num_rows
    continued[inside] = index.piece[following[inside]] > 0
    split, pieces = (piece == 0) & continued, (piece > 0) | continued
    return tuple(int(each.sum()) for each in (cut != 0, cut, split, pieces))


def _ratios(sums: tuple[float, ...], _: int) -> dict[str, float]:
    unbalanced, balanced, bound, mean, in_micro_steps, unbalanced_in_micro_steps = sums
    mean = mean or 1.0
    return {
        "imbalance_unbalanced": unbalanced / mean or 1.0,
        "imbalance": balanced / mean or 1.0,
        "imbalance_unbalanced_in_micro_steps": unbalanced_in_micro_steps / mean or 1.0,
        "imbalance_in_micro_steps": in_micro_steps / mean or 1.0,
        "lower_bound_over_mean": bound / mean or 1.0,
    }


@_figure(_each(_ratios), start={})
def phases(share: PlannedShare) -> dict[str, tuple[float, ...]]:
    """By phase, over the mean load of a rank: `imbalance_unbalanced` and `imbalance` (the largest load with samples
    dealt out in turn, and as planned), `lower_bound_over_mean` (no assignment is lower).

    Under od.Padded the loads of `llm` count padding and the mean does not, so it shows in all three; samples dealt out
    are cut into as many microbatches as the plan has. `imbalance_in_micro_steps`: the largest load of each micro-step
    (the same microbatch of all ranks), or round of an encoder, over the mean of all, which counts where ranks wait for
    each other in each; equal to `imbalance` where a step is one microbatch. `imbalance_unbalanced_in_micro_steps`: the
    same of samples dealt out.

    Where peers encode, encoder loads are of GPUs; samples dealt out are encoded by every peer of their rank.

    Samples are dealt out as torch's DistributedSampler does: the i-th of the global batch to rank i modulo ranks. Those
    of a rank are cut in this order into as many microbatches as the plan has, without regard to caps.
    """
    if share.is_alone:
        return {phase: (float(total),) * 6 for phase, total in share.totals.items()}
    plan = share.plan
    return {
        phase: (
            float(share.cells_unbalanced[phase].sum(axis=1).max()),
            float(cells.sum(axis=1).max()),
            float(plan.lower_bound(phase)),
            share.totals[phase] / plan.gpus(phase),
            float(cells.max(axis=0).sum()),
            float(share.cells_unbalanced[phase].max(axis=0).sum()),
        )
        for phase, cells in share.cells.items()
    }


@_figure(_mean)
def microbatches(share: PlannedShare) -> int:
    """Microbatches of a rank in a step, mean over steps."""
    return share.plan.num_microbatches


def _ratio(total: tuple[float, float], _: int) -> float:
    return total[0] / total[1] if total[1] else 1.0


@_figure(_ratio, start=(0.0, 0.0))
def step_imbalance(share: PlannedShare) -> tuple[float, float]:
    """Cost of the step over that of a perfectly even step, in the phases that are balanced, as ranks wait for each
    other (`Balance.price`): the step of `orchdata profile`. With a pipeline, the makespan of the slowest one over that
    of one with equal microbatches.
    """
    return share.step_cost, share.even_cost


@_figure(_ratio, start=(0.0, 0.0))
def step_imbalance_unbalanced(share: PlannedShare) -> tuple[float, float]:
    """What `step_imbalance` would be without balancing: with the samples of the same global batch dealt out in turn."""
    return share.unbalanced_cost, share.even_cost


def _saved(total: tuple[float, float], _: int) -> float:
    return 1 - total[0] / total[1] if total[1] else 0.0


@_figure(_saved, start=(0.0, 0.0))
def saved(share: PlannedShare) -> tuple[float, float]:
    """Share of the cost of the unbalanced step that balancing saves: 1 - `step_imbalance` /
    `step_imbalance_unbalanced`. An estimate from costs, for a job that waits for computation alone.
    """
    return share.step_cost, share.unbalanced_cost


@_figure(_saved, start=(0, 0))
def padding_if_padded(share: PlannedShare) -> tuple[int, int]:
    """Share of LLM positions that would be padding, if this rank's microbatches were padded to their longest sample, as
    od.Padded does. Packed microbatches have no such padding.
    """
    lengths, number = share.lengths, share.plan.num_microbatches
    groups = [lengths]
    if number > 1:
        microbatch = share.plan.microbatch[share.mine]
        groups = [lengths[microbatch == each] for each in range(number)]
    return int(lengths.sum()), sum(int(inside.max(initial=0)) * len(inside) for inside in groups)


@_figure(lambda total, num_steps: total and total[0] / total[1], start=None)
def fill(share: PlannedShare) -> tuple[int, int] | None:
    """Under od.Packed(length=...), tokens of samples over those of all ranks' microbatches; else None."""
    return share.plan.filled


@_figure(_mean, start=None)
def own_streams(share: PlannedShare) -> float | None:
    """Share of this rank's samples drawn from its group's streams, mean over steps; None where there are no groups."""
    return share.plan.own_streams(share.rank)


def _in_teams(total: dict[str, int], _: int) -> dict[str, Any]:
    sizes = sorted(total.keys() - {"all", "above_cap"}, key=int)
    shares = {size: total[size] / max(1, total["all"]) for size in sizes}
    return {"share": shares, "above_cap": total["above_cap"]} if total else {}


@_figure(_in_teams, start={})
def teams(share: PlannedShare) -> dict[str, int]:
    """Under `Balance(teams=)`, over all ranks and as planned: by size, the `share` of LLM positions in teams; and under
    oversize="own" the samples of which a rank has more than `max_tokens`, `above_cap`.
    """
    balance, size, lengths = share.spec.balance, share.plan.team_size, share.plan.llm_positions
    if balance.teams is None:
        return {}
    above = -(-lengths // size) > balance.caps.get("llm", MAX_TOTAL)
    in_teams = {str(each): int(lengths[size == each].sum()) for each in np.unique(size[size > 1]).tolist()}
    return {"all": int(lengths.sum()), "above_cap": int(above.sum()), **in_teams}


def _ways(rows: tuple[int, ...], num_steps: int) -> dict[str, float]:
    total = max(1, sum(rows))
    return {"rows": sum(rows) / num_steps, "within_nodes": rows[1] / total, "between_nodes": rows[2] / total}


@_figure(_each(_ways), start={})
def features(share: PlannedShare) -> dict[str, tuple[int, ...]]:
    """By encoder phase, where parts are assigned separately: `rows` that the encoder yields over all ranks, per step,
    and the shares of them that move `within_nodes` and `between_nodes`; the rest stay on their rank.

    A row is one row of the encoder's output. Where ranks per node are not known, each rank counts as a node.
    """
    return {phase: tuple(share.plan.feature_rows(phase).tolist()) for phase in share.plan.parts}


@_figure(
    _each(_named("samples", "tokens", "loss_tokens", "passes")),
    start={},
    add=(operator.add, operator.add, operator.add, max),
)
def sources(share: PlannedShare) -> dict[str, tuple[int, ...]]:
    """By source of a mixture, over all ranks and as planned: `samples`, `tokens` (LLM positions), `loss_tokens`, and
    started `passes` through it.
    """
    plan = share.plan
    if plan.passes is None or plan.source_loss_tokens is None:
        return {}
    counts = np.zeros((len(plan.sources), 4), np.int64)
    np.add.at(counts[:, 0], plan.source, 1)
    np.add.at(counts[:, 1], plan.source, plan.llm_positions)
    counts[:, 2] = plan.source_loss_tokens
    np.maximum.at(counts[:, 3], plan.source, plan.passes + 1)
    return dict(zip(plan.sources, map(tuple, counts.tolist()), strict=True))
