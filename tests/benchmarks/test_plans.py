"""The benchmark of plans at tiny sizes: all of it runs, and its simple way is worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.balance.cases import Scale
from benchmarks.plans import rounds, run, scopes
from benchmarks.plans.mixes import mixes
from benchmarks.plans.scopes import COLUMNS
from orchdata.bench import WideTable, make_report


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


def test_peers_that_share_take_less_than_peers_that_repeat() -> None:
    scale = Scale(repeats=1, shrink=32)
    table, *results = rounds.peers(scale, 16_384, 2)
    assert isinstance(table, WideTable)
    for _, repeats, _, shared, by_step, bound in table.rows:
        assert 1 <= bound <= by_step <= 1.1 * shared < 1.1 * repeats  # type: ignore[operator]
    of_rounds = rounds.rounds(scale, 16_384)
    json.dumps(make_report("plans", run.PlansBench(), [table, *results, *of_rounds]).to_dict(), allow_nan=False)


def test_the_simple_way_by_hand() -> None:
    """Two micro-steps of two ranks: the two images together, the two long texts together, and no rank waits."""
    costs = {"image": np.array([50, 0, 50, 0]), "llm": np.array([10, 10, 10, 10])}
    assert scopes.simple(costs, np.array([10, 10, 10, 10]), 2, 2) == 50 + 10 + 10
