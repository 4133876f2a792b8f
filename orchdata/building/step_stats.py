"""What a step tells of itself: loads, bounds and tokens, worked out where the step is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.make_plan import PlanSpec
from orchdata.planning.plan import Plan
from orchdata.planning.price import waits_inside
from orchdata.planning.shares import cost_of_cells


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Figures of one step; all but `loads`, `feature_rows` and `loss_tokens` are of one rank's share.

    Attributes:
        samples: planned, failed ones among them.
        loss_tokens: of the whole step.
        tokens: LLM positions.
        padded_tokens: the same, had each microbatch been padded to its longest sample.
        own_streams: share of the samples that come from the rank's group's streams; None without groups.
        feature_rows: encoder phase -> `Plan.feature_rows`, where parts are assigned apart.
        loads: phase -> largest load unbalanced and balanced, lower bound, mean load, and what ranks wait for where they
            meet in each micro-step, float64 (5,).
        cost: of the step under its objective, and of a perfectly even one, float64 (2,).
        num_microbatches: of each rank.
    """

    samples: int
    loss_tokens: int
    tokens: int
    padded_tokens: int
    own_streams: float | None
    feature_rows: Mapping[str, NDArray[np.int64]]
    loads: Mapping[str, NDArray[np.float64]]
    cost: NDArray[np.float64]
    num_microbatches: int


def step_figures(spec: PlanSpec, plan: Plan, rank: int) -> StepFigures:
    """The figures of a plan made from `spec`, seen from a rank: milliseconds at thousands of ranks."""
    balanced, in_step = spec.costs.balanced, waits_inside(plan, spec.balance.objective)
    cells = {phase: plan.cells(phase) for phase in plan.phases}
    cost = cost_of_cells([cells[phase] for phase in balanced], in_step=in_step)
    mean = sum(_mean(plan, phase) for phase in balanced)
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
        own_streams=plan.own_streams(rank),
        feature_rows={phase: plan.feature_rows(phase) for phase in plan.parts},
        loads={phase: _loads(plan, phase, of_phase) for phase, of_phase in cells.items()},
        cost=np.array([cost, mean], np.float64),
        num_microbatches=plan.num_microbatches,
    )


def _loads(plan: Plan, phase: str, cells: NDArray[np.int64]) -> NDArray[Any]:
    largest = plan.loads_unbalanced(phase).max(), cells.sum(axis=1).max()
    in_micro_steps = cost_of_cells([cells], in_step=True)
    return np.array([*largest, plan.lower_bound(phase), _mean(plan, phase), in_micro_steps], np.float64)


def _mean(plan: Plan, phase: str) -> float:
    return int(plan.costs[phase].sum()) / plan.num_ranks
