"""The price of a plan: what its step costs, by what ranks wait for.

    plan --cells (num_ranks, num_microbatches) of each phase--> cost_of_cells --> step_cost

Under "barrier" ranks wait for each other after each phase of each micro-step (the m-th microbatch of all ranks), so a
step takes the sum over both of the largest cell. Under "sum" they meet at its end, and it takes the largest rank's
total. Where encoders are balanced apart, ranks meet in every exchange: that is a barrier whatever the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import lower_bound
from orchdata.planning.balance import Objective
from orchdata.planning.plan import Plan
from orchdata.planning.shares import cost_of_cells

Ints = NDArray[np.int64]


def step_cost(plan: Plan, objective: Objective, phases: Sequence[str]) -> int:
    """Cost of a step in the unit of its costs.

    Args:
        phases: those that count: `SampleCosts.balanced`, as others of the plan are in units of their own.
    """
    return cost_of_cells([plan.cells(phase) for phase in phases], in_step=waits_inside(plan, objective))


def waits_inside(plan: Plan, objective: Objective) -> bool:
    """Whether ranks wait for each other in each micro-step."""
    return objective == "barrier" or bool(plan.parts)


def step_lower_bound(plan: Plan, objective: Objective, phases: Sequence[str]) -> int:
    """No assignment of whole samples, or of parts where they are apart, has a smaller `step_cost`, whatever the number
    of micro-steps.
    """
    bounds = [plan.lower_bound(phase) for phase in phases]
    if waits_inside(plan, objective):
        return sum(bounds)
    return max(*bounds, lower_bound(np.sum([plan.costs[phase] for phase in phases], axis=0), plan.num_ranks))
