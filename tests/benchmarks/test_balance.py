"""The balancing benchmark at tiny sizes: all of it runs and its references are right; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.balance import run
from benchmarks.balance.cases import Scale
from benchmarks.balance.regimes import REGIMES, rows
from orchdata.bench import make_report

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = Scale(repeats=2, shrink=64)


@pytest.mark.slow
def test_every_demand_is_measured() -> None:
    found = run.all_demands(TINY)
    report = make_report("python -m benchmarks.balance", run.BalanceBench(), found)
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
    done = _command("--quick", "--ranks", "16", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["config"]["quick"] is True
    assert {"results", "tables", "machine"} <= set(report)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.balance", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", REGIMES)
def test_each_regime_gains(name: str) -> None:
    found = list(rows(REGIMES[name], seeds=2, steps=[16]))
    before, after = found[0], found[-1]
    assert all(row.low <= row.mean <= row.high for row in found)
    assert after.mean < before.mean
