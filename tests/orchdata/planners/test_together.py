"""`plan_together`: against every placement by other code, what it refuses, and the script that measures its table."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from orchdata.planners import TogetherPlan, TogetherTable, plan_together

SCRIPT = Path(__file__).parents[3] / "scripts" / "measure_together.py"


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


def ends_of(of: TogetherTable, where: dict[str, tuple[int, int]], tenths: dict[str, int]) -> float:
    """Run by small events: each tower has a device and a turn there; one turn starts when the last has ended."""
    ends = []
    for device in {device for device, _ in where.values()}:
        now = 0.0
        for turn in sorted({turn for at, turn in where.values() if at == device}):
            left = {name: 1.0 for name, at in where.items() if at == (device, turn)}
            if sum(tenths[name] for name in left) > 10:
                return float("inf")
            while left:
                pace = {}
                for name in left:
                    pace[name] = of.seconds[name][tenths[name]]
                    for other in left:
                        pace[name] *= of.slowdown[name][other] if other != name else 1
                span = min(part * pace[name] for name, part in left.items())
                now += span
                left = {name: part - span / pace[name] for name, part in left.items()}
                left = {name: part for name, part in left.items() if part > 1e-12}
        ends.append(now)
    return max(ends)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_best_of_every_placement(devices: int) -> None:
    shared = 0
    for seed in range(12):
        of = table(seed, "abc")
        plan = plan_together(of, num_devices=devices)
        slots = list(itertools.product(range(devices), range(3)))
        every = {
            tuple(places): min(
                ends_of(of, dict(zip("abc", places, strict=True)), dict(zip("abc", tenths, strict=True)))
                for tenths in itertools.product((2, 4, 5, 8, 10), repeat=3)
            )
            for places in itertools.product(slots, repeat=3)
        }
        assert plan.seconds == pytest.approx(min(every.values()))
        apart = [seconds for places, seconds in every.items() if len(set(places)) == 3]
        assert plan.in_turn_seconds == pytest.approx(min(apart))
        turned = replace(of, seconds=dict(reversed(of.seconds.items())))
        assert plan_together(turned, num_devices=devices) == plan
        assert TogetherPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert TogetherTable.from_dict(json.loads(json.dumps(of.to_dict()))) == of
        shared += plan.seconds < plan.in_turn_seconds
    assert 0 < shared < 12  # Side by side is not always better, nor worse.


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
