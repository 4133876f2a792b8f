"""What a step tells of itself: loads, bounds and tokens, worked out where the step is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec
from orchdata.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Figures of one step; all but `loads`, `feature_rows` and `loss_tokens` are of one rank's share.

    Attributes:
        samples: planned, failed ones among them.
        loss_tokens: of the whole step.
        tokens: LLM positions.
        filled: of the whole step, `Plan.filled`.
        padded_tokens: the same, had each microbatch been padded to its longest sample.
        own_streams: share of the samples that come from the rank's group's streams; None without groups.
        feature_rows: encoder phase -> `Plan.feature_rows`, where parts are assigned apart.
        loads: phase -> largest load unbalanced and balanced, lower bound, mean load, and what ranks wait for where they
            meet in each micro-step, float64 (5,).
        cost: of the step under `Balance.price`, and of a perfectly even one, float64 (2,).
        num_microbatches: of each rank.
        overflow: of the rank's share, whole samples by their first piece: samples truncated, LLM tokens that they lost,
            samples split, and pieces, int64 (4,).
        sources: of each source of a mixture, in the step over all ranks: samples, LLM positions, loss tokens, and
            passes begun so far, int64 (num_sources, 4); (0, 4) where there is none.
    """

    samples: int
    loss_tokens: int
    tokens: int
    padded_tokens: int
    filled: tuple[int, int] | None
    own_streams: float | None
    feature_rows: Mapping[str, NDArray[np.int64]]
    loads: Mapping[str, NDArray[np.float64]]
    cost: NDArray[np.float64]
    num_microbatches: int
    overflow: NDArray[np.int64]
    sources: NDArray[np.int64]


def step_figures(spec: PlanSpec, plan: Plan, rank: int) -> StepFigures:
    """The figures of a plan made from `spec`, seen from a rank: milliseconds at thousands of ranks."""
    alone = plan.num_ranks == plan.num_microbatches == 1 and plan.padded is None and not plan.parts
    alone = alone and spec.balance.price.num_stages is None
    return _figures_alone(spec, plan) if alone else _figures(spec, plan, rank)


def _figures(spec: PlanSpec, plan: Plan, rank: int) -> StepFigures:
    balanced, price = spec.costs.balanced, spec.balance.price
    cells = {phase: plan.cells(phase) for phase in plan.phases}
    cost = price.of([cells[phase] for phase in balanced])
    even = price.of_even([_mean(plan, phase) for phase in balanced], plan.num_microbatches)
    mine = plan.places(rank)
    lengths = plan.llm_positions[mine]
    microbatches = plan.microbatch[mine]
    padded_tokens = 0
    for microbatch in range(plan.num_microbatches):
        inside = lengths[microbatches == microbatch]
        padded_tokens += int(inside.max(initial=0)) * len(inside)
    return StepFigures(
        samples=len(mine),
        loss_tokens=plan.loss_tokens,
        tokens=int(lengths.sum()),
        padded_tokens=padded_tokens,
        filled=plan.filled,
        own_streams=plan.own_streams(rank),
        feature_rows={phase: plan.feature_rows(phase) for phase in plan.parts},
        loads={phase: _loads(plan, phase, of_phase) for phase, of_phase in cells.items()},
        cost=np.array([cost, even], np.float64),
        num_microbatches=plan.num_microbatches,
        overflow=_overflow(spec, plan.row[mine]),
        sources=_sources(plan),
    )


def _figures_alone(spec: PlanSpec, plan: Plan) -> StepFigures:
    """The same where one rank has everything at once: all loads are the sums."""
    totals = {phase: int(costs.sum()) for phase, costs in plan.costs.items()}
    balanced = sum(totals[phase] for phase in spec.costs.balanced)
    return StepFigures(
        samples=len(plan.row),
        loss_tokens=plan.loss_tokens,
        tokens=int(plan.llm_positions.sum()),
        padded_tokens=int(plan.llm_positions.max(initial=0)) * len(plan.row),
        filled=None,
        own_streams=plan.own_streams(0),
        feature_rows={},
        loads={phase: np.full(5, total, np.float64) for phase, total in totals.items()},
        cost=np.array([balanced, balanced], np.float64),
        num_microbatches=1,
        overflow=_overflow(spec, plan.row),
        sources=_sources(plan),
    )


def _overflow(spec: PlanSpec, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    index = spec.costs.index if isinstance(spec.costs, IndexCosts) else None
    if index is None or not any(index.totals["overflow"].values()):
        return np.zeros(4, np.int64)
    cut, piece = index.cut_tokens[rows], index.piece[rows]
    following = rows + 1
    continued = np.zeros(len(rows), np.bool_)
    inside = following < index.num_rows
    continued[inside] = index.piece[following[inside]] > 0
    split, pieces = (piece == 0) & continued, (piece > 0) | continued
    return np.array([np.count_nonzero(cut), cut.sum(), np.count_nonzero(split), np.count_nonzero(pieces)], np.int64)


def _sources(plan: Plan) -> NDArray[np.int64]:
    found = np.zeros((len(plan.sources), 4), np.int64)
    if plan.passes is not None and plan.source_loss_tokens is not None:
        np.add.at(found[:, 0], plan.dataset_id, 1)
        np.add.at(found[:, 1], plan.dataset_id, plan.llm_positions)
        found[:, 2] = plan.source_loss_tokens
        np.maximum.at(found[:, 3], plan.dataset_id, plan.passes + 1)
    return found


def _loads(plan: Plan, phase: str, cells: NDArray[np.int64]) -> NDArray[Any]:
    largest = plan.loads_unbalanced(phase).max(), cells.sum(axis=1).max()
    in_micro_steps = cells.max(axis=0).sum()
    return np.array([*largest, plan.lower_bound(phase), _mean(plan, phase), in_micro_steps], np.float64)


def _mean(plan: Plan, phase: str) -> float:
    return int(plan.costs[phase].sum()) / plan.num_ranks
