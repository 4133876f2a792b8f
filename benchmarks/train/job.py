"""One rank of `python -m benchmarks.train`, run by torchrun: calibrate, train all lanes in turn, replay the exchanges.

other steps --calibrate--> cost model in seconds --plans of every lane--> steps, in turn --> records
                                                                           +--> routes --replayed alone--> seconds
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import orchdata as od
from benchmarks.train.calibration import Calibration, calibrate
from benchmarks.train.lanes import (
    Lane,
    Loads,
    Task,
    make_lane,
    make_model_config,
    make_recipe,
    read_task,
    run_in_turn,
    run_rank,
)
from orchdata.balancers.assignment import loads_of
from orchdata.dataset.indexed import IndexCosts
from orchdata.loaders.index.index import Index
from orchdata.planning.route import Route


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpec:
    """What a lane asks of the loader, and when its ranks wait for each other.

    Attributes:
        balance: how samples are shared out.
        phases: those that are balanced; None is all.
        waits: "step" where ranks meet at the end of the step only, "phase" where they meet after each phase too.
    """

    balance: od.Balance
    phases: tuple[str, ...] | None = None
    waits: str = "step"


LANES = {
    "unbalanced": LaneSpec(balance=od.Balance(scope="none")),
    "LLM only": LaneSpec(balance=od.Balance(objective="sum"), phases=("llm",)),
    "joint": LaneSpec(balance=od.Balance(objective="sum")),
    "per phase": LaneSpec(balance=od.Balance(assignment="per_phase"), waits="phase"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one rank does.

    Attributes:
        task: what to train on, and how much.
        calibration_steps, calibration_repeats: of the calibration.
        exchange_repeats: times to replay each step's exchanges.
    """

    task: Task
    calibration_steps: int
    calibration_repeats: int
    exchange_repeats: int


def work(job: Job) -> dict[str, Any]:
    """All of it; on rank 0 a JSON-safe dict, on others an empty one."""
    recipe = make_recipe()
    config = make_model_config(recipe)
    index = od.ShardDataset(job.task.shards, recipe=recipe).index(num_ranks=dist.get_world_size())
    calibration = calibrate(
        job.task, conv_stride=config.conv_stride, steps=job.calibration_steps, repeats=job.calibration_repeats
    )
    lanes = {name: _lane(job.task, spec, index, calibration.fit.model) for name, spec in LANES.items()}
    records = run_in_turn(job.task, lanes)
    hidden = config.llm.hidden
    exchanges = {name: replay(lane.routes, hidden, job.exchange_repeats) for name, lane in lanes.items()}
    return {"lanes": records, "exchange_seconds": exchanges, "calibration": _to_dict(calibration)} if records else {}


def _lane(task: Task, spec: LaneSpec, index: Index, cost: od.CostModel) -> Lane:
    if spec.phases is None:
        return make_lane(task, spec.balance, cost=cost)
    # The plan only knows what the balanced phases cost: weigh it by all.
    costs = dict(zip(cost.phases, cost.costs, strict=True))
    partial = od.CostModel(**{phase: costs[phase] for phase in spec.phases})
    whole = IndexCosts(index, cost)

    def weigh(plan: od.Plan) -> Loads:
        by_phase = {phase: whole.costs(phase, plan.row) for phase in whole.phases}
        return {phase: loads_of(values, plan.rank, plan.num_ranks) for phase, values in by_phase.items()}

    return make_lane(task, spec.balance, cost=partial, weigh=weigh)


def replay(routes: Sequence[Sequence[Route]], hidden: int, repeats: int) -> list[float]:
    """Seconds that each step's exchanges take by themselves, forward and backward, on the slowest rank.

    Ranks begin together, so the time includes no waiting for a rank that computes longer; and no exchange overlaps with
    computation, as some may in training.

    Args:
        routes: of each step, this rank's; equally many on every rank. Without any, nothing takes time.
        hidden: width of a row, in float32.
        repeats: of all steps, in turn; a step takes their median.
    """
    if not any(routes):
        return [0.0] * len(routes)
    seconds: list[list[float]] = [[] for _ in routes]
    for turn in range(repeats + 1):
        for step, ways in enumerate(routes):
            rows = [torch.randn(way.num_rows_in, hidden, requires_grad=True) for way in ways]
            gradients = [torch.ones(way.num_rows_out, hidden) for way in ways]
            dist.barrier()
            start = time.perf_counter()
            under_way = [
                od.exchange(row, way, requires_grad=True, async_op=True) for row, way in zip(rows, ways, strict=True)
            ]
            torch.autograd.backward([handle.wait() for handle in under_way], gradients)
            elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if turn:  # The first round warms up.
                seconds[step].append(elapsed.item())
    return [statistics.median(values) for values in seconds]


def _to_dict(calibration: Calibration) -> dict[str, Any]:
    step_seconds, exponent = calibration.step_seconds, calibration.fit.model.exponent
    return {"fit": asdict(calibration.fit), "step_seconds": step_seconds, "exponent": exponent}


def predicted_seconds(loads: Mapping[str, Sequence[int]], waits: str, exponent: int) -> float:
    """What a step's phases take by its plan: its slowest rank, or the sum of each phase's slowest.

    Args:
        loads: phase -> planned cost on each rank.
        waits: as LaneSpec has it.
        exponent: costs are seconds times 2**exponent.
    """
    by_phase = np.array(list(loads.values()), np.float64)
    slowest = by_phase.max(axis=1).sum() if waits == "phase" else by_phase.sum(axis=0).max()
    return float(slowest * 2.0**-exponent)


def main(job_path: str, result_path: str) -> None:
    """Entry point of each rank."""
    content = json.loads(Path(job_path).read_text())
    job = Job(**{**content, "task": read_task(content["task"])})
    run_rank(result_path, lambda: work(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
