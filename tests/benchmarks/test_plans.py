"""The benchmark of plans at tiny sizes: all of it runs, and its simple way is worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.balance.cases import Scale
from benchmarks.plans import run, scopes
from benchmarks.plans.effort import effort, large_plans, plans_by_effort
from benchmarks.plans.mixes import large_mixes, mixes
from benchmarks.plans.scopes import COLUMNS
from orchdata.bench.harness import WideTable, make_report


def test_every_mix_is_planned_in_every_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "SIZES", ((64, 8),))
    config = run.PlansBench(small=True, steps=1)
    found = scopes.scopes(Scale(repeats=1, shrink=32), config.max_tokens)
    json.dumps(make_report("python -m benchmarks.plans", config, found).to_dict(), allow_nan=False)
    declared, *tables = (table for table in found if isinstance(table, WideTable))
    assert [row[0] for row in declared.rows] == list(mixes())
    assert len(tables) == 2
    for row in (row for table in tables for row in table.rows):
        ratio = dict(zip(COLUMNS, row[1:], strict=False))
        assert all(isinstance(value, float) and value >= 1.0 for value in ratio.values())
        assert ratio["joint"] <= ratio["by sums"]  # type: ignore[operator]


def test_each_search_is_measured_at_each_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.plans.effort.SIZES", ((64, 4, 1.1, 1.0),))
    found = effort(Scale(repeats=1, shrink=32))
    table = plans_by_effort(Scale(repeats=1, shrink=256), 16_384)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert len(found) == 6
    assert all(value >= 1.0 for result in found[::2] for value in result.values)


def test_large_global_batches_have_rows_with_micro_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.plans.effort.LARGE", ((512, 32, False), (512, 16, True)))
    table = large_plans(Scale(repeats=1, shrink=64), 8192)
    assert [row[0] for row in table.rows[:3]] == [f"{name}, 10 x 32" for name in large_mixes()]
    for row in table.rows:
        figures = dict(zip(table.columns, row, strict=True))
        assert int(str(figures["micro-steps"])) >= 1
        assert float(figures["wait, joint"] or 0) >= 1.0 and float(figures["ms, grid"] or 0) > 0


def test_the_simple_way_by_hand() -> None:
    """Two micro-steps of two ranks: the two images together, the two long texts together, and no rank waits."""
    costs = {"image": np.array([50, 0, 50, 0]), "llm": np.array([10, 10, 10, 10])}
    assert scopes.simple(costs, np.array([10, 10, 10, 10]), 2, 2) == 50 + 10 + 10
