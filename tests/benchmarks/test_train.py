"""`python -m benchmarks.train`: its parts by hand, and the whole of it made short. Nothing about time is asserted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.train.job import LANES, predicted_seconds
from benchmarks.train.records import compare_curves
from benchmarks.train.report import make_results
from benchmarks.train.run import TrainBench, run
from orchdata.bench import Result, WideTable, make_report


def test_a_step_takes_its_slowest_rank_or_the_slowest_of_each_phase() -> None:
    loads = {"image": [4, 0], "llm": [2, 6]}
    assert predicted_seconds(loads, "step", exponent=1) == 3.0  # max(4 + 2, 0 + 6) / 2
    assert predicted_seconds(loads, "phase", exponent=1) == 5.0  # (4 + 6) / 2


def record(seconds: float, loads: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "load_seconds": 0.5,
        "compute_seconds": seconds,
        "cpu_seconds": seconds,
        "step_seconds": seconds,
        "loss_sum": 10.0,
        "loss_tokens": 20,
        "llm_tokens": 100,
        "samples": 4,
        "loads": loads,
        "imbalance": {"llm": 1.0, "step": 1.0},
    }


def test_gains_are_shares_of_the_unbalanced_time() -> None:
    seconds = {"unbalanced": 10.0, "LLM only": 10.0, "joint": 8.0, "per phase": 6.0}
    loads = {"unbalanced": [12, 4], "LLM only": [12, 4], "joint": [8, 8], "per phase": [8, 8]}
    fit = {"costs": {"llm": {"linear": 1.0, "quadratic": 0.0, "constant": 0.0}}}
    fit |= {"seconds": 1.0, "residual": 0.1, "worst_residual": 0.2, "num_samples": 6}
    lanes = {
        name: [[[record(seconds[name], {"llm": loads[name]})]], [[record(1.0, {"llm": loads[name]})]]] for name in LANES
    }
    content = {
        "lanes": lanes,
        "exchange_seconds": {name: [0.3 if name == "per phase" else 0.0] for name in LANES},
        "calibration": {"fit": fit, "step_seconds": 4.0, "exponent": 1},
    }
    found = {one.name: one for one in make_results(content, 0, demands=True) if isinstance(one, Result)}
    # Predicted: 12 / 2 + 4 seconds unbalanced, 8 / 2 + 4 balanced: 20 % gained.
    assert found["joint: measured / predicted gain"].median == pytest.approx(1.0)
    assert found["per phase: measured / predicted gain"].median == pytest.approx(2.0)
    assert found["per phase: exchange / step time"].median == pytest.approx(0.05)
    assert found["joint: measured / predicted gain"].met
    assert "LLM only: measured / predicted gain" not in found  # none is predicted
    tables = {one.title: one for one in make_results(content, 0, demands=True) if isinstance(one, WideTable)}
    rows = {row[0]: row for row in tables["Training"].rows}
    assert rows["unbalanced"][1] == 10_000  # ms
    assert rows["unbalanced"][3] == 4_500  # ms: one rank of two waits 9 of 10 seconds


@pytest.mark.slow
def test_bench_train_made_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = TrainBench(steps=2, repeats=1, batch_size=3, quick=True)
    report = make_report("python -m benchmarks.train", config, run(config))
    json.dumps(report.to_dict(), allow_nan=False)
    assert report.met  # nothing is demanded
    found = {result.name: result.median for result in report.results}
    assert found["largest difference of loss curves"] < 1e-3  # float32, other order of summation
    assert 0 < found["per phase: exchange / step time"] < 1
    tables = {table.title: table for table in report.tables}
    assert [row[0] for row in tables["Training"].rows] == list(LANES)
    assert [row[0] for row in tables["Fitted costs, forward and backward"].rows] == ["image", "audio", "llm"]
    llm = {row[0]: float(str(row[3])) for row in tables["Imbalance of each phase, max/mean over ranks"].rows}
    assert llm["LLM only"] <= llm["unbalanced"]
    assert list(tmp_path.iterdir()) == []


def test_curves_are_compared_by_their_largest_relative_difference() -> None:
    assert compare_curves(np.array([2.0, 4.0]), np.array([2.0, 3.0])) == 0.25
