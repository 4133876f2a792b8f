"""The balancing benchmark at tiny sizes: all of it runs and its references are right; no time is asserted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.balance import demands, orders, run
from benchmarks.balance.cases import Scale
from benchmarks.balance.real_lengths import LISTS, real_distributions
from benchmarks.balance.regimes import REGIMES, rows
from orchdata.balancers import simulate_1f1b
from orchdata.bench.harness import make_report

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


def test_real_lengths_become_positions(tmp_path: Path) -> None:
    assert real_distributions(tmp_path) == {}
    columns = {
        "text_azure_llm_conv_2023": {"context_tokens": [100, 200_000], "generated_tokens": [50, 1]},
        "image_ade20k_train": {"width": [28, 28], "height": [42, 55]},
        "audio_librispeech_dev-other": {"samples_16khz": [16_000, 16_001]},
    }
    for name, values in columns.items():
        pq.write_table(
            pa.table({key: pa.array(column, pa.int32()) for key, column in values.items()}),
            tmp_path / f"{name}.parquet",
        )
    found = real_distributions(tmp_path)
    assert set(found) == {
        name + end for name in ("Azure chat", "ADE20K", "LibriSpeech other") for end in ("", " quadratic")
    }
    drawn = {name: set(make(np.random.default_rng(0), 50).tolist()) for name, make in found.items()}
    assert drawn["Azure chat"] == {150, 131_072}
    assert drawn["ADE20K"] == {6}  # 2 x 3 patches of 14 pixels.
    assert drawn["LibriSpeech other"] == {50, 51}  # A second is 50 positions, and a beginning one counts.
    assert len(LISTS) == 7


def test_the_reference_for_equal_counts() -> None:
    # 10 with the smallest of the others, 1; the mean of two ranks is (10 + 3 + 2 + 1) / 2 = 8.
    assert demands.equal_count_reference(np.array([2, 10, 0, 3, 1]), 2) == 11
    assert demands.equal_count_reference(np.array([4, 4, 4, 5]), 2) == 9  # The mean, rounded up.


def test_the_best_of_all_orders_is_the_least_simulated() -> None:
    forward, backward = orders.pipeline_times(np.random.default_rng(3), 3, 4)
    every = np.array(list(itertools.permutations(range(4))))
    least = min(simulate_1f1b(forward, backward, order) for order in every)
    assert orders.best_of_all_orders(forward, backward) == pytest.approx(least)


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


@pytest.mark.slow
def test_plots_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("first", "second"):
        command = [
            sys.executable,
            "-m",
            "benchmarks.pictures.balancing",
            str(tmp_path / folder),
            "--seeds",
            "2",
            "--steps",
            "8,16",
        ]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    for name in REGIMES:
        first, second = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in ("first", "second"))
        assert first == second
        assert b"<svg" in first
