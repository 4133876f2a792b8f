"""Plans and builds any step of a run again, without moving the loader.

(epoch, step) --order, and the epoch's draw--> task --builder of any rank--> microbatches
"""

from __future__ import annotations

from dataclasses import replace

from orchdata.balancers.checks import checked_count, checked_epoch
from orchdata.building.spec import BuildSpec
from orchdata.building.step import BuiltStep
from orchdata.order.steps import Draw, Steps, StepTask
from orchdata.planning.make_plan import make_plan
from orchdata.planning.plan import Plan


def plan_again(spec: BuildSpec, steps: Steps, draw: Draw | None, *, epoch: int, step: int) -> Plan:
    """Return the plan of a step; arguments and errors as of `DataLoader.plan_at`."""
    return make_plan(spec.plan, _task(steps, draw, epoch, step))


def build_again(spec: BuildSpec, steps: Steps, draw: Draw | None, *, epoch: int, step: int, rank: int) -> BuiltStep:
    """Return a rank's share of a step; arguments and errors as of `DataLoader.step_at`."""
    if checked_count(rank, "rank", 0) >= spec.plan.num_ranks:
        raise ValueError(f"rank must be below the loader's {spec.plan.num_ranks} ranks, got {rank}")
    task = _task(steps, draw, epoch, step)
    return replace(spec, rank=rank).open().build(task)


def _task(steps: Steps, draw: Draw | None, epoch: int, step: int) -> StepTask:
    return steps.again(checked_epoch(epoch), checked_count(step, "step", 0), draw)
