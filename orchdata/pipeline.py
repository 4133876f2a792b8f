"""Pipelines: a rank's planned microbatches -> the order in which its stages wait for each other least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import order_microbatches
from orchdata.plan import Plan


def pipeline_order(plan: Plan, rank: int, num_stages: int) -> NDArray[np.int32]:
    """Microbatches of one rank in a good order for 1F1B: int32 (num_microbatches,), the planned number at each place.

    Times are costs: every stage takes an equal share of the LLM's, the first one all encoders' too, and backward takes
    twice the forward. Only their ratios matter.
    """
    work = np.zeros((2, plan.num_microbatches), np.int64)  # Of encoders, and of the LLM.
    mine = plan.positions(rank)
    for phase, costs in plan.costs.items():
        np.add.at(work[1 if phase == "llm" else 0], plan.microbatch[mine], costs[mine])
    forward = np.tile(work[1], (num_stages, 1))
    forward[0] += num_stages * work[0]
    return order_microbatches(forward, 2 * forward).order
