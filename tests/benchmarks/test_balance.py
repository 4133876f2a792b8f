"""Benchmarks of plans at tiny sizes: all of them run, their references are right, and no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.balance import peers
from benchmarks.balance import run as balance_run
from benchmarks.balance.cases import Scale
from benchmarks.balance.regimes import REGIMES, rows
from benchmarks.papers import pipeline
from benchmarks.papers import run as papers_run
from benchmarks.papers.cases import CASES, REPORTED
from benchmarks.papers.disttrain import order_after_disttrain
from benchmarks.plans import rounds, scopes
from benchmarks.plans import run as plans_run
from benchmarks.plans.mixes import mixes
from benchmarks.plans.scopes import COLUMNS
from orchdata.balancers import lower_bound
from orchdata.balancers.assignment import loads_of
from orchdata.bench import WideTable, make_report

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = Scale(repeats=2, shrink=64)


@pytest.mark.slow
def test_every_demand_is_measured() -> None:
    found = balance_run.all_demands(TINY)
    report = make_report("python -m benchmarks.balance", balance_run.BalanceBench(), found)
    json.dumps(report.to_dict(), allow_nan=False)
    names = [result.name for result in report.results]
    assert len(set(names)) == len(names)
    for regime in ("packed", "equal counts", "padded", "Karmarkar-Karp", "minimal move", "row/column", "all phases"):
        assert any(regime in name for name in names), regime
    ratios = [result for result in report.results if result.name.endswith("makespan/LB")]
    assert ratios
    assert all(1.0 <= value < 2.0 for result in ratios for value in result.values)
    assert any("brute force" in result.name and result.met for result in report.results)


@pytest.mark.slow
def test_the_whole_command_at_quick_sizes() -> None:
    options = ["--quick", "--ranks", "16", "--repeats", "2", "--json"]
    command = [sys.executable, "-m", "benchmarks.balance", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["config"]["quick"] is True
    assert {"results", "tables", "machine"} <= set(report)


@pytest.mark.parametrize("name", REGIMES)
def test_each_regime_gains(name: str) -> None:
    found = list(rows(REGIMES[name], seeds=2, steps=[16]))
    before, after = found[0], found[-1]
    assert all(row.low <= row.mean <= row.high for row in found)
    assert after.mean < before.mean


# Peers: each is the published method, whole, whether in plain Python or in numba.

METHODS = {
    "dealt": peers.dealt,
    "longest first": peers.longest_first,
    "first fit": peers.first_fit_decreasing,
    "differencing": peers.karmarkar_karp,
    "differencing in Python": peers.karmarkar_karp_python,
}
costs_lists = st.lists(st.integers(0, 60), max_size=40)


def makespan(costs: list[int] | NDArray[np.int64], rank: NDArray[np.int32], num_ranks: int) -> int:
    return int(loads_of(costs, rank, num_ranks).max())


@pytest.mark.parametrize("name", METHODS)
@settings(deadline=None, max_examples=40)
@given(costs=costs_lists, num_ranks=st.integers(1, 9))
def test_every_sample_that_costs_is_on_one_rank(name: str, costs: list[int], num_ranks: int) -> None:
    rank = METHODS[name](np.array(costs, np.int64), num_ranks)
    assert (rank.dtype, rank.shape) == (np.int32, (len(costs),))
    assert ((rank == -1) == (np.array(costs, np.int64) == 0)).all()
    assert rank.size == 0 or -1 <= rank.min() <= rank.max() < num_ranks
    assert makespan(costs, rank, num_ranks) >= lower_bound(np.array(costs, np.int64), num_ranks)


@given(costs=costs_lists, num_ranks=st.integers(1, 9))
def test_differencing_is_the_same_in_python_and_numba(costs: list[int], num_ranks: int) -> None:
    array = np.array(costs, np.int64)
    assert (peers.karmarkar_karp(array, num_ranks) == peers.karmarkar_karp_python(array, num_ranks)).all()


@given(rows=st.integers(1, 6), num_ranks=st.integers(1, 7), seed=st.integers(0, 99))
def test_balanced_differencing_holds_equal_counts(rows: int, num_ranks: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 30, rows * num_ranks)
    rank = peers.karmarkar_karp(costs, num_ranks, equal_count=True)
    assert (rank == peers.karmarkar_karp_python(costs, num_ranks, equal_count=True)).all()
    assert (np.bincount(rank, minlength=num_ranks) == rows).all()


def test_differencing_by_hand() -> None:
    # The textbook case: 8, 7, 6, 5, 4 on two ranks. 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: sums 16 and 14,
    # though 8 + 7 = 6 + 5 + 4 = 15 would be the best.
    costs = [8, 7, 6, 5, 4]
    rank = peers.karmarkar_karp(costs, 2)
    assert sorted(loads_of(costs, rank, 2)) == [14, 16]
    # Longest first: 8 | 7, 7+6 | 8+5, then 4 on either: 13 and 17.
    assert sorted(loads_of(costs, peers.longest_first(costs, 2), 2)) == [13, 17]


def test_first_fit_raises_its_capacity_until_all_fit() -> None:
    # The bound of 30 on two ranks is 15, and at 15 all fit: 8 + 7, and 6 + 5 + 4.
    assert makespan([8, 7, 6, 5, 4], peers.first_fit_decreasing([8, 7, 6, 5, 4], 2), 2) == 15
    # The bound of 22 is 11; there 7 + 3 and 6 + 3 leave no room for the last 3. At 12 it goes to the second.
    assert makespan([7, 6, 3, 3, 3], peers.first_fit_decreasing([7, 6, 3, 3, 3], 2), 2) == 12


# The benchmark of plans at tiny sizes: all of it runs, and its simple way is worked out by hand.


def test_every_mix_is_planned_in_every_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "SIZES", ((64, 8),))
    config = plans_run.PlansBench(small=True, steps=1)
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
    json.dumps(make_report("plans", plans_run.PlansBench(), [table, *results, *of_rounds]).to_dict(), allow_nan=False)


def test_the_simple_way_by_hand() -> None:
    """Two micro-steps of two ranks: the two images together, the two long texts together, and no rank waits."""
    costs = {"image": np.array([50, 0, 50, 0]), "llm": np.array([10, 10, 10, 10])}
    assert scopes.simple(costs, np.array([10, 10, 10, 10]), 2, 2) == 50 + 10 + 10


# The comparison with the papers at tiny sizes: all of it runs, and its made-up samples are what was declared.

SMALL = papers_run.PapersBench(small=True, steps=1)


@pytest.mark.slow
def test_every_case_is_planned_and_nothing_beats_perfect() -> None:
    found = papers_run.run(SMALL)
    json.dumps(make_report("python -m benchmarks.papers", SMALL, found).to_dict(), allow_nan=False)
    assumed, *tables, ordered, placed, reported = found
    assert all(0 < seconds < 1e3 for row in placed.rows for seconds in row[1:])  # type: ignore[operator]
    assert [row[0] for table in tables for row in table.rows] == [
        replace(case, ranks=papers_run.SMALL_RANKS).title for case in CASES
    ]
    for row in (row for table in tables for row in table.rows):
        speedup = dict(zip(papers_run.METHODS, row[1:], strict=False))
        assert speedup["none"] == 1.0
        assert all(value <= speedup["perfect"] * (1 + 1e-12) for value in speedup.values())  # type: ignore[operator]
    for row in ordered.rows:
        speedup = dict(zip(pipeline.COLUMNS, row[1:], strict=True))
        assert speedup["both, our order"] >= speedup["both"]  # type: ignore[operator]
    assert {row[0].split(":")[0] for row in assumed.rows} == {row[0] for row in reported.rows}  # type: ignore[union-attr]
    assert all(f"{one.gain} ({one.known_from})" in "".join(table.note for table in found) for one in REPORTED)


def test_the_order_after_disttrain_by_hand() -> None:
    # Sizes: 3, 9, 8, 7, 6. Smallest first: 0. Kept for the tail, as there are two stages: the next smallest, 4.
    # Warm-up: 0 takes 2 on stage 1. The forwards of 3, 2, 1 (smallest first) on stage 0 take 1, 4, 3: 3 and 1 are
    # equally near, 3 comes first.
    # stage 0 | F0 0-1 | F3 1-2 | B0 3-3 |
    # stage 1 |        | F0 1-2 | B0 2-3 | F3 3-4 | B3 4-5 |
    # From 3 stage 0 waits for B3 until 5: an interval of 2. Of 2 and 1, which take 4 and 3, 1 is nearer.
    forward = [[1, 3, 4, 1, 2], [1, 1, 1, 1, 1]]
    backward = [[0, 4, 2, 4, 2], [1, 1, 1, 1, 1]]
    assert order_after_disttrain(forward, backward).tolist() == [0, 3, 1, 2, 4]
