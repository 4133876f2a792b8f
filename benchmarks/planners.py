"""`python -m benchmarks.planners`: plans of jobs, waves and towers, against other rules and every schedule.

public traces and tables of Crius's artifact --plan_jobs--> mean completion, next to first come first served
random cases --plan_jobs, plan_waves--> over the best of every schedule, by the search of their tests

The traces are read as the artifact's simulator reads them: iterations / 5, rounds of 300 s, until the last job ends. As
asked, a job of 4 GPUs or more loses its first round to tuning, as there, and a model that was not measured runs at 1.8
times a larger one's pace. Without the folder of fixtures that part is left out. `--together` measures pairs of small
towers on this machine's CPU: run it alone.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from benchmarks.command import run_command
from orchdata.bench import Result, WideTable
from orchdata.planners.jobs import GpuKind, Job, JobCell, Running, plan_jobs, run_jobs
from orchdata.planners.waves import Operators, TogetherTable, plan_together, plan_waves, side_by_side

REPOSITORY = Path(__file__).resolve().parents[1]
ARENA = REPOSITORY.parent / "shared" / "fixtures" / "cluster" / "arena"
KINDS = [
    GpuKind(name=name, nodes=nodes, gpus_a_node=gpus)
    for name, nodes, gpus in (("a100", 80, 4), ("v100", 20, 16), ("a40", 160, 2), ("a10", 160, 2))
]
NODE = {kind.name: kind.gpus_a_node for kind in KINDS}
SIZES = {
    "wide_resnet": ["500M", "1B", "2B", "4B", "6.8B", "13B"],
    "bert": ["760M", "1.3B", "2.6B", "6.7B", "15B", "39B"],
    "moe": ["690M", "1.3B", "2.4B", "10B", "27B", "70B"],
}
ROUND, MOVE, SCALE, LONGEST = 300.0, 60.0, 5, 300.0
TOWERS = ("wide", "narrow", "few_rows", "many_rows", "attention")
OF_ARTIFACT = {
    "pai": (2.07, 0.70),
    "venus": (4.00, None),
}  # Hours, first come first served and Crius, by its simulator.


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannersBench:
    """What to measure.

    Attributes:
        cases: random ones, of jobs and of waves.
        seed: of the first.
        together: also measure pairs of towers.
    """

    cases: int = 200
    seed: int = 0
    together: bool = False


def usable(seconds: object) -> bool:
    """Whether a measured or estimated time is one: 0, -1, or more than a round do not run."""
    return isinstance(seconds, float) and 0 < seconds <= LONGEST


def arena_cells(*, estimated: bool) -> dict[str, tuple[JobCell, ...]]:
    """Cells of each model and batch; with `estimated`, those with an estimate: decided from it, run as measured."""
    measured = json.loads((ARENA / "seconds.json").read_text())["optimal"]
    estimates = json.loads((ARENA / "estimates.json").read_text())
    cells: dict[str, tuple[JobCell, ...]] = {}
    for model, by_shape in measured.items():
        found = []
        for shape, seconds in by_shape.items():
            nodes, kind, _, _, gpus, _ = shape.split("_")
            sums = [each[-1] for each in estimates.get(model, {}).get(shape, []) if usable(each[-1])]
            if usable(seconds) and (sums or not estimated):
                found.append(
                    JobCell(
                        kind=kind,
                        nodes=int(nodes),
                        gpus_a_node=int(gpus),
                        seconds=min(sums) if estimated else seconds,
                        measured_seconds=seconds,
                    )
                )
        cells[model] = tuple(found)
    return cells


def trace(name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Rows of a trace, and the start of the round in which its simulator sees each."""
    with open(ARENA / f"simulate_trace_{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        after = float(row["submission_time"]) - float(rows[0]["submission_time"])
        yield row, max(0, math.ceil(after / ROUND) - 1) * ROUND


def jobs_of(name: str, cells: Mapping[str, Sequence[JobCell]], scale: int) -> list[Job]:
    """Jobs of a trace that have a cell."""
    return [
        Job(
            name=f"{number:05d}",
            iterations=int(row["num_iteration"]) // scale,
            cells=tuple(cells[f"{row['model_name'].replace('__', '_')}_{row['batch_size']}"]),
            submitted_seconds=at,
        )
        for number, (row, at) in enumerate(trace(name))
        if cells.get(f"{row['model_name'].replace('__', '_')}_{row['batch_size']}")
    ]


def jobs_as_asked(name: str) -> list[Job]:
    """Jobs of a trace on the GPUs that they ask for, each with one cell."""
    measured = json.loads((ARENA / "seconds.json").read_text())["optimal"]
    jobs = []
    for number, (row, at) in enumerate(trace(name)):
        kind, gpus = row["gpu_type"], int(row["num_gpu"])
        nodes, each = max(1, gpus // NODE[kind]), min(gpus, NODE[kind])
        family, size = row["model_name"].split("__")
        larger = SIZES[family][SIZES[family].index(size) :]
        shape = f"{nodes}_{kind}_{nodes}_n_{each}_d"
        found = (measured.get(f"{family}_{one}_{row['batch_size']}", {}).get(shape) for one in larger)
        steps, seconds = next((k, one) for k, one in enumerate(found) if one is not None)
        seconds /= 1.8**steps
        tuned = ROUND / seconds if gpus >= 4 else 0.0
        jobs.append(
            Job(
                name=f"{number:05d}",
                iterations=int(row["num_iteration"]) // SCALE + tuned,
                cells=(JobCell(kind=kind, nodes=nodes, gpus_a_node=each, seconds=seconds),),
                submitted_seconds=at,
            )
        )
    return jobs


def first_come(running: Running) -> list[JobCell | None]:
    """First come first served in a queue for each set of kinds, on the fastest free cell, never moved."""
    free = {kind.name: [kind.gpus_a_node] * kind.nodes for kind in KINDS}
    for each in running.active:
        if each.cell:
            for node in each.nodes:
                free[each.cell.kind][node] -= each.cell.gpus_a_node
    chosen, blocked = [], set()
    for each in running.active:
        queue = frozenset(cell.kind for cell in each.job.cells) if len(each.job.cells) == 1 else frozenset()
        mine = each.cell
        for cell in sorted(each.job.cells, key=lambda cell: cell.pace) if not mine and queue not in blocked else ():
            room = free[cell.kind]
            fitting = sorted((left, node) for node, left in enumerate(room) if left >= cell.gpus_a_node)
            if len(fitting) >= cell.nodes:
                for _, node in fitting[: cell.nodes]:
                    room[node] -= cell.gpus_a_node
                mine = cell
                break
        if not mine:
            blocked.add(queue)
        chosen.append(mine)
    return chosen


def traces() -> tuple[WideTable, list[Result]]:
    """Mean completion of the artifact's jobs, in hours."""
    cells, estimated = arena_cells(estimated=False), arena_cells(estimated=True)
    rows: list[tuple[str | float | None, ...]] = []
    results = []
    for name, scale in (("pai", SCALE), ("venus", SCALE), ("venus", 1), ("philly", SCALE)):
        title = f"{name}, all iterations" if scale == 1 else f"{name}, iterations / {scale}"
        asked = None
        if scale == SCALE:
            asked = run_jobs(jobs_as_asked(name), KINDS, first_come, ROUND, 0.0).mean_completion_seconds / 3600
        for given, how in ((cells, "measured"), (estimated, "estimated")):
            jobs = jobs_of(name, given, scale)
            started = time.thread_time()
            plan = plan_jobs(jobs, KINDS, round_seconds=ROUND, move_seconds=MOVE)
            spent = time.thread_time() - started
            ours = plan.mean_completion_seconds / 3600
            fastest = run_jobs(jobs, KINDS, first_come, ROUND, MOVE).mean_completion_seconds / 3600
            crius = OF_ARTIFACT.get(name, (None, None))[1] if scale == SCALE else None
            numbers = (len(jobs), asked, fastest, ours, ours / fastest, crius, plan.moves, spent)
            rows.append((f"{title}, {how}", *numbers))
            if how == "measured":
                demand = 0.75 if name == "philly" or scale == 1 else 1.0
                over = f"{title}: mean completion over first come first served on the fastest free cell"
                results.append(Result(name=over, unit="x", values=(ours / fastest,), demand=demand))
        if asked and name in OF_ARTIFACT:
            theirs = OF_ARTIFACT[name][0]
            off = f"{name}: first come first served as asked, from the artifact's {theirs} h"
            results.append(Result(name=off, unit="%", values=(100 * abs(asked / theirs - 1),), demand=5))
    columns = (
        "trace, decided from",
        "jobs",
        "as asked",
        "fastest free",
        "plan_jobs",
        "over it",
        "Crius",
        "moves",
        "CPU s",
    )
    note = "as asked, fastest free: first come first served. Jobs without an estimate are left out of those rows."
    return WideTable(title="Mean completion, hours", columns=columns, rows=tuple(rows), note=note), results


def loaded(path: Path) -> ModuleType:
    """A Python file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def over_every_schedule(config: PlannersBench) -> list[Result]:
    """Random small cases over the best of every schedule."""
    tests = REPOSITORY / "tests" / "orchdata" / "planners"
    jobs, waves = loaded(tests / "test_jobs.py"), loaded(tests / "test_waves.py")
    found: dict[str, list[float]] = {}
    for seed in range(config.seed, config.seed + config.cases):
        three = jobs.three_jobs(seed)
        seconds = [{cell.gpus: cell.seconds for cell in job.cells} for job in three]
        best = jobs.least_sum([job.iterations for job in three], seconds, [-1] * 3, MOVE)
        plan = plan_jobs(three, jobs.FOUR, move_seconds=MOVE)
        found.setdefault("3 jobs on 4 GPUs", []).append(sum(plan.completion_seconds.values()) / best)
        for num_runs, most in ((2, 5), (3, 4), (4, 3)):
            runs = waves.graph(seed, num_runs, most)
            ratio = plan_waves(runs, 4).seconds / waves.earliest_end(runs, 4)
            found.setdefault(f"{num_runs} runs on 4 devices", []).append(ratio)
    demands = {
        "3 jobs on 4 GPUs": (1.10, 1.35),
        "2 runs on 4 devices": (1.03, 1.15),
        "3 runs on 4 devices": (1.03, 1.15),
    }
    results = []
    for name, ratios in found.items():
        mean, worst = demands.get(name, (None, None))
        title = f"{name}, {len(ratios)} cases, over every schedule"
        results.append(Result(name=f"{title}: mean", unit="x", values=(statistics.mean(ratios),), demand=mean))
        results.append(Result(name=f"{title}: worst", unit="x", values=(max(ratios),), demand=worst))
    return results


def many_runs(seed: int) -> list[Result]:
    """100 runs on 64 devices."""
    draw = np.random.default_rng(seed)
    runs = []
    for number in range(100):
        alone, power = draw.uniform(0.2, 2), draw.uniform(0.5, 1)
        seconds = {1 << k: float(alone / (1 << k) ** power) for k in range(7)}
        runs.append(Operators(name=f"{number:03d}", count=int(draw.integers(4, 49)), seconds=seconds))
    started = time.thread_time()
    plan = plan_waves(runs, 64)
    spent = time.thread_time() - started
    return [
        Result(name="100 runs on 64 devices: planned", unit="s CPU", values=(spent,), demand=3),
        Result(name="100 runs on 64 devices: over the bound", unit="x", values=(plan.seconds / plan.bound_seconds,)),
    ]


def pairs_of_towers() -> tuple[WideTable, list[Result]]:
    """Each two of five towers, a second of steps of each, side by side and in turn: planned and measured."""
    script = loaded(REPOSITORY / "scripts" / "measure_together.py")
    towers = script.Towers({name: f"benchmarks.towers:{name}" for name in TOWERS}, "cpu")
    rows: list[tuple[str | float | None, ...]] = []
    off, right = [], []
    try:
        measured: TogetherTable = script.measure(towers, (script.HALF, 10), 0.4, 3)
        for pair in itertools.combinations(TOWERS, 2):
            steps = {name: max(1, round(1 / measured.seconds[name][10])) for name in pair}
            of = {name: {share: each * steps[name] for share, each in measured.seconds[name].items()} for name in pair}
            table = TogetherTable(device=measured.device, seconds=of, slowdown=measured.slowdown)
            plan, (planned, _) = plan_together(table), min(side_by_side(table, pair))
            both = max(map(sum, towers.side_by_side(dict.fromkeys(pair, script.HALF), steps).values()))
            turns = sum(sum(towers.side_by_side({name: 10}, steps)[name]) for name in pair)
            off.append(100 * abs(planned / both - 1))
            # Right where the other way is no more than 2 % faster.
            chosen, other = (both, turns) if plan.seconds < plan.in_turn_seconds else (turns, both)
            right.append(chosen <= 1.02 * other)
            rows.append((" + ".join(pair), planned, both, plan.in_turn_seconds, turns, off[-1], float(right[-1])))
    finally:
        towers.close()
    columns = ("towers", "planned", "side by side", "planned", "in turn", "off, %", "right")
    return WideTable(title="Two towers on the CPU, seconds", columns=columns, rows=tuple(rows)), [
        Result(
            name="two towers side by side: planned seconds from measured ones, worst",
            unit="%",
            values=(max(off),),
            demand=15,
        ),
        Result(name="side by side or in turn: right, of 10", unit="", values=(sum(right),), demand=9, better="high"),
    ]


def run(config: PlannersBench) -> list[Result | WideTable]:
    found: list[Result | WideTable] = []
    if ARENA.is_dir():
        table, results = traces()
        found += [table, *results]
    found += [*over_every_schedule(config), *many_runs(config.seed)]
    if config.together:
        table, results = pairs_of_towers()
        found += [table, *results]
    return found


if __name__ == "__main__":
    run_command("benchmarks.planners", PlannersBench, run)
