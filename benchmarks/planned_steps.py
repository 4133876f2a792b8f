"""`python -m benchmarks.planned_steps`: seconds of training steps in four ways of balancing, planned and measured.

steps in another order --fit--> Module --simulate, with the balance of each lane--> seconds
other steps of the same samples, the lanes of benchmarks.train in turn --measured--> CPU seconds of the busiest rank

"per phase" is planned as its ranks wait: each phase's slowest, below 1 % more than the busiest rank's work. Run it
alone, on two cores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import orchdata as od
from benchmarks.command import run_command
from benchmarks.train.job import LANES, predicted_seconds
from benchmarks.train.run import WARMUP_STEPS, TrainBench, measured
from orchdata.bench import Result, WideTable
from orchdata.planners import Cluster, Layout, Module, Placement, Workload, simulate

RANKS, BATCH_SIZE = 2, 8
SHAPE = od.TransformerCost(hidden=64, layers=1, ffn=256)  # Seconds are fitted, and links and optimizer take no time.
CLUSTER = Cluster(gpus=RANKS, operations=1.0, memory=1e18, memory_bandwidth=1e30, within=1e30, between=1e30)
DEVIATIONS = 1.2816  # 80 % of a normal distribution lie within so many.
A, B = np.array([*combinations(range(len(LANES)), 2)]).T  # All pairs of lanes.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsBench:
    """What to measure.

    Attributes:
        runs: of each mix, each with its own data, weights and fit.
        mixes: descriptions of data sets, between commas.
        steps, repeats, calibration_steps, calibration_repeats: as `TrainBench` has them.
        seed: of the first run.
        keep: a folder for what runs measured. Those that it has are not measured again.
    """

    runs: int = 5
    mixes: str = "benchmarks/train/skewed.yaml,datasets/demo.yaml"
    steps: int = 16
    repeats: int = 3
    calibration_steps: int = 32
    calibration_repeats: int = 3
    seed: int = 0
    keep: str = ""


class Run(NamedTuple):
    """Seconds, float64 (lanes, steps); relative error of the fit; largest deviation from the trained plans."""

    planned: NDArray[np.float64]
    measured: NDArray[np.float64]
    error: float
    deviation: float


def one_run(config: StepsBench, mix: str, seed: int) -> Run:
    """Measure, and plan the same steps."""
    kept, size, count = (
        Path(config.keep) / f"{Path(mix).stem}-{seed}.json",
        RANKS * BATCH_SIZE,
        config.steps + WARMUP_STEPS,
    )
    if config.keep and kept.exists():
        given = json.loads(kept.read_text())
        return planned(given["content"], Workload.from_dict(given["workload"]))
    same = {name: getattr(config, name) for name in ("steps", "repeats", "calibration_steps", "calibration_repeats")}
    content, index = measured(TrainBench(ranks=RANKS, batch_size=BATCH_SIZE, dataset=mix, seed=seed, **same))
    cost, every = od.CostModel(**costs_of(content)), max(count, index.num_samples // size)
    workload = Workload.of(index, cost=cost, global_batch_size=size, seed=seed, steps=every).take(count)
    if config.keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"content": content, "workload": workload.to_dict()}))
    return planned(content, workload)


def costs_of(content: Mapping[str, Any]) -> dict[str, od.PhaseCost]:
    costs = content["calibration"]["fit"]["costs"]
    return {phase: od.PhaseCost(of["linear"], of["quadratic"], of["constant"]) for phase, of in costs.items()}


def planned(content: Mapping[str, Any], given: Workload) -> Run:
    """Plan what `content`, of `job.work`, measured."""
    calibration, fit = content["calibration"], content["calibration"]["fit"]
    modules = [Module(name, SHAPE, seconds={1: cost}) for name, cost in costs_of(content).items()]
    layout = Layout(placements=tuple(Placement(module=of, dp=RANKS) for of in modules), microbatch_tokens=10**9)
    plans, steps, deviations = [], [], []
    for name, lane in LANES.items():
        # A phase that is not balanced costs nearly nothing in plans; it keeps its seconds.
        phases = {
            phase: replace(of, costs=of.costs * 1000 if phase in (lane.phases or given.phases) else of.costs * 0 + 1)
            for phase, of in given.phases.items()
        }
        balance = lane.balance if lane.waits == "phase" else replace(lane.balance, objective="sum")
        seconds = simulate(layout, replace(given, phases=phases), CLUSTER, balance=balance).seconds
        ranks = content["lanes"][name]
        trained = [predicted_seconds(step[0]["loads"], lane.waits, calibration["exponent"]) for step in ranks[0]]
        deviations.append(abs(seconds / trained - 1).max())
        cpu = [[min(repeat["cpu_seconds"] for repeat in step) for step in rank] for rank in ranks]
        plans.append((seconds + fit["seconds"])[WARMUP_STEPS:])
        steps.append(np.max(cpu, axis=0)[WARMUP_STEPS:])
    return Run(np.array(plans), np.array(steps), fit["residual"], float(max(deviations)))


def means(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Return seconds of a step: (runs, planned or measured, lanes)."""
    return np.array([(one.planned.mean(axis=1), one.measured.mean(axis=1)) for one in runs])


def orders(run: Run, shift: int = 0) -> NDArray[np.bool_]:
    """Of each pair whose plans differ by over 1 %: whether steps do so too. `shift`: by plans of other lanes."""
    plan, step = np.roll(run.planned, shift, axis=0).mean(axis=1), run.measured.mean(axis=1)
    counted = abs(plan[A] / plan[B] - 1) > 0.01
    same: NDArray[np.bool_] = ((plan[A] > plan[B]) == (step[A] > step[B]))[counted]
    return same


def inside(run: Run) -> NDArray[np.bool_]:
    """Of each step: whether it lies in the interval of its lane, which has the formula of `Choice.interval`."""
    mean, (low, high) = run.planned.mean(axis=1), np.quantile(run.planned, (0.1, 0.9), axis=1)
    noise = DEVIATIONS * run.error * mean
    least, most = mean - np.hypot(mean - low, noise), mean + np.hypot(high - mean, noise)
    within: NDArray[np.bool_] = (run.measured >= least[:, None]) & (run.measured <= most[:, None])
    return within


def said(name: str, *values: float, **how: Any) -> Result:
    return Result(name=name, unit="", values=tuple(map(float, values)), **how)


def run(config: StepsBench) -> list[Result | WideTable]:
    """Measure; raises LaunchError where a rank fails."""
    rows: dict[str, list[tuple[str, float]]] = {"": [], "x": []}
    runs: list[Run] = []
    for mix in config.mixes.split(","):
        of = [one_run(config, mix, config.seed + number) for number in range(config.runs)]
        seconds, lanes, runs = means(of), [*LANES], runs + of
        pairs = [f"{lanes[a]} / {lanes[b]}" for a, b in zip(A, B, strict=True)]
        for unit, names, values in (("", lanes, seconds), ("x", pairs, seconds[:, :, A] / seconds[:, :, B])):
            found = values[:, 0] / values[:, 1]
            middle = (*np.median(values, axis=0), np.median(found, axis=0), found.min(axis=0), found.max(axis=0))
            rows[unit] += [
                (f"{Path(mix).stem}: {name}", *each)
                for name, each in zip(names, zip(*middle, strict=True), strict=True)
            ]
    planned, measured = np.moveaxis(means(runs), 1, 0)
    close = abs(planned[:, A] / planned[:, B] / (measured[:, A] / measured[:, B]) - 1) <= 0.03
    right, covered = [orders(one) for one in runs], np.array([inside(one) for one in runs])
    own = np.array([abs(one.measured / one.planned - 1) <= DEVIATIONS * one.error for one in runs])
    most: dict[str, Any] = {"demand": 0.9 * len(runs), "better": "high"}
    count = sum(map(len, right))
    ordered = (
        f"{np.concatenate(right).sum()} of {count} pairs; {close.size - count} others are planned within 1 %: no order"
    )
    columns = ("planned", "measured", "planned / measured", "least", "most")
    return [
        WideTable(title="A step, seconds: medians of runs", columns=("lane", *columns), rows=tuple(rows[""])),
        WideTable(title="Ratios: medians of runs", columns=("lanes", *columns), rows=tuple(rows["x"]), unit="x"),
        said(
            f"all ratios within 3 %, runs of {len(runs)}",
            close.all(axis=1).sum(),
            note=f"{close.sum()} of {close.size} ratios",
            **most,
        ),
        said(f"order right, runs of {len(runs)}", sum(map(all, right)), note=ordered, **most),
        said("with plans of other lanes: must be wrong", sum(bool(orders(one, 1).all()) for one in runs), demand=0.0),
        said(
            "steps in the 80 % interval of plan_run: distance from 80 %",
            abs(covered.mean() - 0.8),
            demand=0.1,
            note=f"{covered.mean():.1%} of {covered.size}",
        ),
        said(
            "steps within 1.28 errors of their own plan",
            *own.mean(axis=(1, 2)),
            note=f"{own.mean():.1%} of all; the planner gives no such interval",
        ),
        said("error of the fit", *(one.error for one in runs)),
        said(
            "largest deviation from the plan that was trained",
            *(one.deviation for one in runs),
            demand=0.05,
            note="equal LLM lengths may change places",
        ),
    ]


if __name__ == "__main__":
    run_command("benchmarks.planned_steps", StepsBench, run)
