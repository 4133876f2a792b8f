"""What a step tells of itself: loads, bounds and tokens, worked out where the step is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Figures of one step; all but `loads` and `loss_tokens` are of one rank's share.

    Attributes:
        samples: planned, failed ones among them.
        loss_tokens: of the whole step.
        tokens: LLM positions.
        padded_tokens: the same, had each microbatch been padded to its longest sample.
        own_streams: share of the samples that come from the rank's group's streams; None without groups.
        loads: phase -> largest load unbalanced and balanced, lower bound and mean load, float64 (4,).
    """

    samples: int
    loss_tokens: int
    tokens: int
    padded_tokens: int
    own_streams: float | None
    loads: Mapping[str, NDArray[np.float64]]


def step_figures(plan: Plan, rank: int) -> StepFigures:
    """The figures of a plan, seen from a rank: milliseconds at thousands of ranks."""
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
        loads={phase: _loads(plan, phase) for phase in plan.phases},
    )


def _loads(plan: Plan, phase: str) -> NDArray[Any]:
    mean = plan.costs[phase].sum() / plan.num_ranks
    largest = plan.loads_unbalanced(phase).max(), plan.loads(phase).max()
    return np.array([*largest, plan.lower_bound(phase), mean], np.float64)
