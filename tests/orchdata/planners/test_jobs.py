"""`plan_jobs`: against every schedule, in room that it has, and the same for any order and unit."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchdata.planners import GpuKind, Job, JobCell, JobsPlan, plan_jobs, read_jobs

FOUR = [GpuKind(name="a", nodes=1, gpus_a_node=4)]
MIXED = [GpuKind(name="a", nodes=3, gpus_a_node=4), GpuKind(name="b", nodes=4, gpus_a_node=2)]


def job(name: str, iterations: float, seconds: Mapping[int, float], submitted: float = 0.0) -> Job:
    cells = tuple(JobCell(kind="a", nodes=1, gpus_a_node=gpus, seconds=each) for gpus, each in seconds.items())
    return Job(name=name, iterations=iterations, cells=cells, submitted_seconds=submitted)


def three_jobs(seed: int) -> list[Job]:
    draw, jobs = random.Random(seed), []
    for name in "xyz":
        alone, power = draw.uniform(1, 10), draw.uniform(0.3, 1)
        jobs.append(
            job(name, draw.randint(10, 1000), {n: alone / n ** (power * draw.uniform(0.8, 1)) for n in (1, 2, 4)})
        )
    return jobs


def mixed_jobs(seed: int) -> list[Job]:
    """Twelve jobs that come one after another, with cells over several nodes, measured up to 30 % off."""
    draw, jobs = random.Random(seed), []
    for number in range(12):
        cells = []
        for kind, nodes, gpus in (("a", 1, 1), ("a", 1, 2), ("a", 2, 2), ("a", 2, 4), ("b", 1, 2), ("b", 4, 2)):
            seconds = draw.uniform(1, 2) / (nodes * gpus) ** 0.8
            pace = seconds * draw.uniform(0.8, 1.3)
            cells.append(JobCell(kind=kind, nodes=nodes, gpus_a_node=gpus, seconds=seconds, measured_seconds=pace))
        one = job(f"job {number}", draw.randint(50, 2000), {}, submitted=draw.uniform(0, 900))
        jobs.append(replace(one, cells=tuple(cells)))
    return jobs


def least_sum(left: Sequence[float], seconds: Sequence[Mapping[int, float]], held: Sequence[int], move: float) -> float:
    """Return the least sum of ends of every schedule on 4 GPUs that changes at ends. `held`: -1 has not run."""
    alive = [at for at, each in enumerate(left) if each > 0]
    if not alive:
        return 0.0
    best = math.inf
    for choice in itertools.product((0, 1, 2, 4), repeat=len(alive)):
        if not 0 < sum(choice) <= 4:
            continue
        starts = {at: move * (held[at] not in (-1, gpus)) for at, gpus in zip(alive, choice, strict=True) if gpus}
        gpus_of = dict(zip(alive, choice, strict=True))
        until = min(start + left[at] * seconds[at][gpus_of[at]] for at, start in starts.items())
        rest, cells = list(left), list(held)
        for at, start in starts.items():
            cells[at] = gpus_of[at]
            rest[at] -= max(0.0, until - start) / seconds[at][gpus_of[at]]
            rest[at] = rest[at] if rest[at] > 1e-9 * left[at] else 0.0
        for at in alive:
            if not gpus_of[at] and held[at] != -1:
                cells[at] = 0
        if until * len(alive) < best:
            best = min(best, until * len(alive) + least_sum(rest, seconds, cells, move))
    return best


def check(plan: JobsPlan, jobs: Sequence[Job], kinds: Sequence[GpuKind], move: float) -> None:
    """Nodes have room for all that run there, and the runs of a job are its iterations at the measured pace."""
    for kind in kinds:
        for node in range(kind.nodes):
            here = [run for run in plan.runs if run.cell.kind == kind.name and node in run.nodes]
            for now in {run.start_seconds for run in here}:
                used = sum(run.cell.gpus_a_node for run in here if run.start_seconds <= now < run.end_seconds)
                assert used <= kind.gpus_a_node
    for each in jobs:
        runs = [run for run in plan.runs if run.job == each.name]
        assert all(len(set(run.nodes)) == run.cell.nodes for run in runs)
        done = sum(
            max(0.0, run.end_seconds - run.start_seconds - move * (number > 0)) / run.cell.pace
            for number, run in enumerate(runs)
        )
        assert done == pytest.approx(each.iterations)
        assert plan.completion_seconds[each.name] == runs[-1].end_seconds - each.submitted_seconds
        assert runs[0].start_seconds >= each.submitted_seconds


@pytest.mark.parametrize("move", [0.0, 60.0])
def test_three_jobs_on_four_gpus_are_near_the_best_of_every_schedule(move: float) -> None:
    ratios = []
    for seed in range(60):
        jobs = three_jobs(seed)
        seconds = [{cell.gpus: cell.seconds for cell in each.cells} for each in jobs]
        best = least_sum([each.iterations for each in jobs], seconds, [-1] * 3, move)
        plan = plan_jobs(jobs, FOUR, move_seconds=move)
        check(plan, jobs, FOUR, move)
        ratios.append(sum(plan.completion_seconds.values()) / best)
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.10
    assert max(ratios) <= 1.35


def test_a_rule_that_takes_the_longest_first_is_seen_by_the_search() -> None:
    # Negative control: 4 GPUs to the longest job first is far from the best.
    jobs = three_jobs(1)
    seconds = [{cell.gpus: cell.seconds for cell in each.cells} for each in jobs]
    best = least_sum([each.iterations for each in jobs], seconds, [-1] * 3, 0)
    alone = sorted((each.iterations * min(cell.seconds for cell in each.cells) for each in jobs), reverse=True)
    assert sum(itertools.accumulate(alone)) > 1.35 * best


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_jobs_have_room_and_run_at_measured_seconds(seed: int) -> None:
    jobs = mixed_jobs(seed)
    check(plan_jobs(jobs, MIXED, move_seconds=7), jobs, MIXED, 7)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_order_of_jobs_and_kinds_changes_nothing_and_twice_the_seconds_are_twice_the_plan(seed: int) -> None:
    jobs = mixed_jobs(seed)
    plan = plan_jobs(jobs, MIXED, round_seconds=32, move_seconds=8)
    assert plan_jobs(jobs[::-1], MIXED[::-1], round_seconds=32, move_seconds=8).runs == plan.runs
    assert all(run.end_seconds % 32 == 0 for run in plan.runs)
    slower = [
        replace(
            each,
            submitted_seconds=2 * each.submitted_seconds,
            cells=tuple(replace(cell, seconds=2 * cell.seconds, measured_seconds=2 * cell.pace) for cell in each.cells),
        )
        for each in jobs
    ]
    twice = plan_jobs(slower, MIXED, round_seconds=64, move_seconds=16)
    assert twice.completion_seconds == {name: 2 * each for name, each in plan.completion_seconds.items()}


def test_times_of_the_clock_end_jobs_as_times_from_0_do() -> None:
    def mean(start: float) -> float:
        jobs = [job(f"j{at}", 10, {1: 0.37, 2: 0.2}, start + 0.7 * at) for at in range(6)]
        return plan_jobs(jobs, FOUR, move_seconds=1).mean_completion_seconds

    assert mean(1.7e9) == pytest.approx(mean(0.0), rel=1e-5)


def test_a_move_that_does_not_pay_is_not_made() -> None:
    jobs = [job("long", 100, {1: 10, 4: 3}), job("short", 10, {2: 10})]
    assert plan_jobs(jobs, FOUR, move_seconds=1).moves == 1  # long takes all GPUs when short has ended
    assert plan_jobs(jobs, FOUR, move_seconds=10_000).moves == 0


def test_the_plan_comes_back_from_json() -> None:
    plan = plan_jobs(mixed_jobs(0), MIXED)
    assert JobsPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_jobs_are_read_from_a_file(tmp_path: Path) -> None:
    cells = {"m": job("", 1, {1: 2.0}).cells}
    path = tmp_path / "jobs.csv"
    path.write_text("job,submitted_seconds,iterations,model,ignored\nx,5,10,m,8\n")
    assert read_jobs(path, cells) == [job("x", 10, {1: 2.0}, submitted=5)]
    with pytest.raises(ValueError, match="line 2: model is 'm'"):
        read_jobs(path, {})
    path.write_text("job,submitted_seconds,iterations,model\nx,5,ten,m\n")
    with pytest.raises(ValueError, match="line 2: .*ten"):
        read_jobs(path, cells)
    path.write_text("id,submitted_seconds,iterations,model\nx,5,ten,m\n")
    with pytest.raises(ValueError, match="column 'job' is missing"):
        read_jobs(path, cells)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GpuKind(name="a", nodes=0, gpus_a_node=4), r"GpuKind\('a'\).nodes must be at least 1, got 0"),
        (lambda: job("x", 10, {1: math.nan}), r"JobCell.seconds must be a finite number above 0, got nan"),
        (lambda: job("x", 10, {1: 0}), r"JobCell.seconds must be a finite number above 0, got 0"),
        (lambda: job("x", 0, {1: 1}), r"Job\('x'\).iterations must be a finite number above 0, got 0"),
        (lambda: plan_jobs([], FOUR), r"jobs must be one at least, each with its own name, got none"),
        (lambda: plan_jobs([job("x", 1, {8: 1})], FOUR), r"Job\('x'\).cells fit no kind of GPUs, got 1 x 8 a"),
        (lambda: plan_jobs([job("x", 1, {2: 2, 3: 1})], FOUR), r"of 'a' must divide one another, got 2 and 3"),
        (lambda: JobsPlan.from_dict({"run": []}), r"JobsPlan has 'run', which is none of its fields"),
    ],
)
def test_bad_input_is_one_line(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
