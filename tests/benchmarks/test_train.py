"""`python -m benchmarks.train`: its parts by hand, and the whole of it made short. Nothing about time is asserted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shard_factory import omni_samples, write_shard

import orchdata as od
from benchmarks.launch import LaunchError, torchrun
from benchmarks.train import calibration
from benchmarks.train.calibration import lengths_of
from benchmarks.train.job import LANES, predicted_seconds
from benchmarks.train.lanes import make_model_config, make_recipe
from benchmarks.train.records import compare_curves, fastest_repeats
from benchmarks.train.report import make_results
from benchmarks.train.run import TrainBench, run
from orchdata.bench.harness import Result, WideTable, make_report
from orchdata.loaders.modalities.builtin import KINDS


def test_a_step_takes_its_slowest_rank_or_the_slowest_of_each_phase() -> None:
    loads = {"image": [4, 0], "llm": [2, 6]}
    assert predicted_seconds(loads, "step", exponent=1) == 3.0  # max(4 + 2, 0 + 6) / 2
    assert predicted_seconds(loads, "phase", exponent=1) == 5.0  # (4 + 6) / 2


def test_lengths_are_what_enters_each_phase(tmp_path: Path) -> None:
    recipe = make_recipe()
    write_shard(tmp_path / "a.tar", omni_samples(5))
    dataset = od.ShardDataset(tmp_path / "a.tar", recipe=recipe)
    index = dataset.index()
    (batch,) = od.DataLoader(dataset, global_batch_size=5, num_threads=0)
    lengths = lengths_of(batch, make_model_config(recipe).conv_stride)
    for code, phase in enumerate(KINDS):
        if phase in lengths:
            assert lengths[phase] == index.part_positions[index.part_modality == code].tolist()
    assert lengths["llm"] == index.llm_tokens.tolist()


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


def test_the_fastest_repeat_counts_on_every_rank() -> None:
    first = [[record(seconds, {}) for seconds in (1.0, 5.0, 2.0)]]
    second = [[record(seconds, {}) for seconds in (4.0, 1.0, 2.0)]]
    chosen = fastest_repeats([first, second])  # the slowest ranks took 4, 5 and 2 seconds
    assert [rank[0]["step_seconds"] for rank in chosen] == [2.0, 2.0]


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


@pytest.mark.parametrize(("name", "least"), [("ranks", 2), ("steps", 1), ("repeats", 1), ("batch_size", 1)])
def test_sizes_too_small_are_refused(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
        TrainBench(**{name: least - 1})


def test_a_dataset_without_audio_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.yaml"
    path.write_text("samples: 8\nshards: 1\nkinds: {image: {words: 3, image: {width: 64}}}\n")
    with pytest.raises(ValueError, match="the dataset has no audio"):
        run(TrainBench(dataset=str(path), steps=1, batch_size=1))


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


def test_a_calibration_that_does_not_tell_phases_apart_measures_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    fits = iter([ValueError("phase 'audio' costs nothing"), "fitted"])

    def measure(lane: Any, step: int, *_: Any) -> tuple[dict[str, list[int]], float, float]:
        steps.append(step)
        return {}, 1.0, 0.5

    def fit(measured: list[Any]) -> Any:
        found = next(fits)
        if isinstance(found, ValueError):
            raise found
        return found

    def gather(found: list[Any], mine: Any) -> None:
        found[0] = mine

    monkeypatch.setattr(calibration, "make_lane", lambda *_: None)
    monkeypatch.setattr(calibration, "replace", lambda task, **_: task)
    monkeypatch.setattr(calibration, "_measure", measure)
    monkeypatch.setattr(calibration, "_fit", fit)
    monkeypatch.setattr(calibration.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(calibration.dist, "all_gather_object", gather)
    task: Any = SimpleNamespace(seed=0)
    found = calibration.calibrate(task, conv_stride=1, steps=3, repeats=1)
    assert steps == list(range(2 + 3 + 3))
    assert found.fit == "fitted" and found.end_seconds == 0.5


def test_curves_are_compared_by_their_largest_relative_difference() -> None:
    assert compare_curves(np.array([2.0, 4.0]), np.array([2.0, 3.0])) == 0.25


def test_a_failing_rank_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('no more tea')")
    with pytest.raises(LaunchError, match="no more tea"), (tmp_path / "log").open("w+b") as log:
        torchrun([str(script)], num_ranks=2, environment={}, log=log)
