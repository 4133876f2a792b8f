"""Pipelines: a rank's planned microbatches -> the order in which its stages wait for each other least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import order_microbatches
from orchdata.planning.plan import Plan


def pipeline_order(plan: Plan, rank: int, num_stages: int) -> NDArray[np.int32]:
    """Microbatches of one rank in a good order for 1F1B: int32 (num_microbatches,), the planned number at each place.

    Times are costs: every stage takes an equal share of the LLM's, the first one all encoders' too, and backward takes
    twice the forward. Only their ratios matter. Where encoders are balanced by themselves, ranks meet in every
    micro-step: all take the order of the largest costs.
    """
    encoders = [plan.cells(phase) for phase in plan.phases if phase != "llm"]
    llm = plan.cells("llm")
    cells = np.stack([np.sum([np.zeros_like(llm), *encoders], axis=0), llm])
    work = cells.max(axis=1) if plan.parts else cells[:, rank]
    forward = np.tile(work[1], (num_stages, 1))
    forward[0] += num_stages * work[0]
    return order_microbatches(forward, 2 * forward).order
