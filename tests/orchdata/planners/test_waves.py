"""`plan_waves`: against every schedule, above its bound, with devices for all that runs. `plan_together`: against every
placement by other code, and the script that measures its table.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchdata.planners import Operators, TogetherPlan, TogetherTable, WavesPlan, plan_together, plan_waves

SCRIPT = Path(__file__).parents[3] / "scripts" / "measure_together.py"
Running = tuple[tuple[float, int, int], ...]  # End, run, devices.


def linear(name: str, count: int, seconds: float) -> Operators:
    return Operators(name=name, count=count, seconds={size: seconds / size for size in (1, 2, 3, 4)})


def graph(seed: int, num_runs: int, most: int) -> list[Operators]:
    draw, runs = random.Random(seed), []
    for number in range(num_runs):
        alone, power = draw.uniform(0.2, 2), draw.uniform(0.3, 1)
        seconds = {size: alone / size ** (power * draw.uniform(0.85, 1)) for size in (1, 2, 3, 4)}
        after = tuple(str(other) for other in range(number) if draw.random() < 0.3)
        runs.append(Operators(name=str(number), count=draw.randint(1, most), seconds=seconds, after=after))
    return runs


def earliest_end(runs: Sequence[Operators], devices: int) -> float:
    """Return the earliest end of all schedules: each operator starts at 0 or when another ends. `after` looks back."""
    before = [[int(name) for name in run.after] for run in runs]
    after = [[other for other in range(len(runs)) if number in before[other]] for number in range(len(runs))]
    fastest = [min(run.seconds.values()) for run in runs]
    cheapest = [min(size * each for size, each in run.seconds.items()) for run in runs]
    seen: dict[object, float] = {}
    best = math.inf

    def least(now: float, left: Sequence[int], running: Running) -> float:
        """No end is earlier: by device-seconds, and by the longest way."""
        area = sum((end - now) * size for end, _, size in running) + sum(map(float.__mul__, map(float, left), cheapest))
        way = [0.0] * len(runs)
        for number in reversed(range(len(runs))):
            now_runs = sum(end - now for end, run, _ in running if run == number)
            way[number] = now_runs + left[number] * fastest[number] + max((way[k] for k in after[number]), default=0)
        return now + max(area / devices, *way)

    def follow(now: float, left: tuple[int, ...], running: Running) -> None:
        nonlocal best
        if not running and not any(left):
            best = min(best, now)
            return
        state = (left, tuple(sorted((run, size, round(end - now, 9)) for end, run, size in running)))
        if least(now, left, running) >= best * (1 - 1e-12) or seen.get(state, math.inf) <= now:
            return
        seen[state] = now
        busy = {run for _, run, _ in running}
        ended = [not count and number not in busy for number, count in enumerate(left)]
        ready = [k for k in range(len(runs)) if left[k] and k not in busy and all(ended[j] for j in before[k])]
        free = devices - sum(size for *_, size in running)
        for sizes in itertools.product([*sorted(runs[0].seconds, reverse=True), 0], repeat=len(ready)):
            started = [(now + runs[k].seconds[size], k, size) for k, size in zip(ready, sizes, strict=True) if size]
            if sum(sizes) > free or not (started or running):
                continue
            every = (*running, *started)
            until = min(end for end, *_ in every)
            rest = tuple(count - (k in {run for _, run, _ in started}) for k, count in enumerate(left))
            follow(until, rest, tuple(each for each in every if each[0] > until + 1e-12))

    follow(0.0, tuple(run.count for run in runs), ())
    return best


def check(plan: WavesPlan, runs: Sequence[Operators], devices: int) -> None:
    for now in {run.start_seconds for run in plan.runs}:
        assert sum(run.devices for run in plan.runs if run.start_seconds <= now < run.end_seconds) <= devices
    spans = {}
    for run in runs:
        mine = [each for each in plan.runs if each.name == run.name]
        assert sum(each.operators for each in mine) == run.count
        for each in mine:
            taken = each.operators * run.seconds[each.devices]
            assert each.end_seconds - each.start_seconds == pytest.approx(taken)
        assert all(one.end_seconds <= two.start_seconds for one, two in itertools.pairwise(mine))
        spans[run.name] = (mine[0].start_seconds, mine[-1].end_seconds)
    assert all(spans[other][1] <= spans[run.name][0] for run in runs for other in run.after)
    assert plan.seconds == max(end for _, end in spans.values()) >= plan.bound_seconds


def test_devices_of_spindles_example() -> None:
    plan = plan_waves([linear("a", 8, 1.9 / 8), linear("b", 12, 1.5 / 12), linear("c", 6, 0.6 / 6)], 4)
    assert plan.relaxed == pytest.approx({"a": 1.9, "b": 1.5, "c": 0.6})
    assert plan.allocated == {"a": ((2, 8),), "b": ((2, 8), (1, 4)), "c": ((1, 6),)}
    assert plan.bound_seconds == pytest.approx(1.0)


def test_a_run_that_is_named_twice_is_waited_for_like_others() -> None:
    runs = [linear("a", 1, 1.0), linear("c", 5, 1.0), replace(linear("b", 1, 1.0), after=("a", "a", "c"))]
    plan = plan_waves(runs, 4)
    starts = {run.name: run.start_seconds for run in plan.runs}
    assert starts["b"] >= max(run.end_seconds for run in plan.runs if run.name == "c")


@pytest.mark.slow
def test_small_graphs_end_near_the_best_of_every_schedule() -> None:
    ratios = []
    for seed in range(24):
        runs = graph(seed, 2 + seed % 2, 4)
        plan = plan_waves(runs, 4)
        check(plan, runs, 4)
        ratios.append(plan.seconds / earliest_end(runs, 4))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.03
    assert max(ratios) <= 1.15


def test_operators_in_turn_on_all_devices_are_seen_by_the_search() -> None:
    # Negative control: without devices of their own, runs that scale badly end late.
    runs = [Operators(name=str(k), count=3, seconds={1: 1.0, 2: 0.9, 3: 0.85, 4: 0.8}) for k in range(2)]
    assert sum(run.count * run.seconds[4] for run in runs) > 1.15 * earliest_end(runs, 4)


@pytest.mark.slow
def test_a_larger_graph_has_room_and_its_order_and_unit_change_nothing() -> None:
    runs = graph(3, 12, 9)
    plan = plan_waves(runs, 4)
    check(plan, runs, 4)
    assert plan_waves(runs[::-1], 4) == plan
    slower = [replace(run, seconds={size: 2 * each for size, each in run.seconds.items()}) for run in runs]
    assert plan_waves(slower, 4).seconds == 2 * plan.seconds


def test_the_plan_comes_back_from_json() -> None:
    runs = graph(1, 3, 4)
    plan = plan_waves(runs, 4)
    assert WavesPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert [Operators.from_dict(json.loads(json.dumps(run.to_dict()))) for run in runs] == runs


def table(seed: int, names: str) -> TogetherTable:
    draw = random.Random(seed)
    seconds = {}
    for name in names:
        alone, power = draw.uniform(1, 4), draw.uniform(0.1, 1)
        seconds[name] = {tenths: alone / tenths**power for tenths in (2, 4, 5, 8, 10)}
    return TogetherTable(
        device="made up",
        seconds=seconds,
        slowdown={name: {other: draw.uniform(1, 1.6) for other in names if other != name} for name in names},
    )


def seconds_of_turn(of: TogetherTable, towers: tuple[tuple[str, int], ...]) -> float:
    """Run towers side by side with these tenths, by small events."""
    if sum(tenths for _, tenths in towers) > 10:
        return float("inf")
    now, left = 0.0, dict.fromkeys(towers, 1.0)
    while left:
        pace = {}
        for name, tenths in left:
            slowdowns = [of.slowdown[name][other] for other, _ in left if other != name]
            pace[name, tenths] = of.seconds[name][tenths] * math.prod(slowdowns)
        span = min(part * pace[tower] for tower, part in left.items())
        now += span
        left = {tower: part - span / pace[tower] for tower, part in left.items()}
        left = {tower: part for tower, part in left.items() if part > 1e-12}
    return now


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("devices", [1, 2])
def test_the_best_of_every_placement(devices: int) -> None:
    shared = 0
    for seed in range(12):
        of = table(seed, "abc")
        plan = plan_together(of, num_devices=devices)
        # Each tower has a device and a turn there; one turn starts when the last has ended.
        seconds = functools.cache(functools.partial(seconds_of_turn, of))
        every = {}
        for places in itertools.product(itertools.product(range(devices), range(3)), repeat=3):
            turns = [[[k for k in range(3) if places[k] == (at, n)] for n in range(3)] for at in range(devices)]
            every[places] = min(
                max(sum(seconds(tuple(("abc"[k], tenths[k]) for k in turn)) for turn in device) for device in turns)
                for tenths in itertools.product((2, 4, 5, 8, 10), repeat=3)
            )
        assert plan.seconds == pytest.approx(min(every.values()))
        apart = [seconds for places, seconds in every.items() if len(set(places)) == 3]
        assert plan.in_turn_seconds == pytest.approx(min(apart))
        turned = replace(of, seconds=dict(reversed(of.seconds.items())))
        assert plan_together(turned, num_devices=devices) == plan
        assert TogetherPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert TogetherTable.from_dict(json.loads(json.dumps(of.to_dict()))) == of
        shared += plan.seconds < plan.in_turn_seconds
    assert 0 < shared < 12  # Side by side is not always better, nor worse.


@pytest.mark.slow
def test_the_script_measures_a_table(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("measure_together", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "table.json"
    towers = [f"--tower={name}=unittest.mock:Mock" for name in "ab"]  # a step that does nothing
    script.main([*towers, "--seconds", "0.01", "--repeats", "1", "--out", str(out)])
    plan = plan_together(TogetherTable.from_dict(json.loads(out.read_text())))
    assert plan.in_turn_seconds >= plan.seconds > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operators(name="a", count=0, seconds={1: 1.0}), r"Operators\('a'\).count must be at least 1, got 0"),
        (lambda: Operators(name="a", count=1, seconds={1: math.nan}), r"seconds\[1\] .* got nan"),
        (lambda: plan_waves([linear("a", 1, 1)], 0), r"devices must be at least 1, got 0"),
        (
            lambda: plan_waves([Operators(name="a", count=1, seconds={8: 1.0})], 4),
            r"must have a size up to 4, got \[8\]",
        ),
        (lambda: plan_waves([linear("a", 1, 1)] * 2, 4), r"its own name, got \['a', 'a'\]"),
        (
            lambda: plan_waves([Operators(name="a", count=1, seconds={1: 1.0}, after=("b",))], 4),
            r"Operators\('a'\).after has 'b', which is no run",
        ),
        (
            lambda: plan_waves([Operators(name="a", count=1, seconds={1: 1.0}, after=("a",))], 4),
            r"Operators.after must have no cycle, got a -> a",
        ),
        (lambda: plan_together(None), r"needs a measured table, got None: run scripts/measure_together.py"),
        (lambda: plan_together(table(0, "abcde")), r"must be of 1 to 4 towers, got \['a', 'b'"),
        (lambda: plan_together(table(0, "ab"), num_devices=0), r"num_devices must be at least 1, got 0"),
        (
            lambda: TogetherTable(device="", seconds={"a": {5: 1.0}}, slowdown={}),
            r"seconds\['a'\] must be by tenths from 1 to 10, and have 10, got \[5\]",
        ),
        (
            lambda: TogetherTable(device="", seconds={"a": {10: 0.0}}, slowdown={}),
            r"seconds\['a'\]\[10\] must be a finite number above 0, got 0.0",
        ),
        (
            lambda: TogetherTable(device="", seconds={"a": {10: 1.0}, "b": {10: 1.0}}, slowdown={"a": {"b": 1.0}}),
            r"slowdown\['b'\]\['a'\] must be a finite number above 0, got None",
        ),
    ],
)
def test_bad_input_is_one_line(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
