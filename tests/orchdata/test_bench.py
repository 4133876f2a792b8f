"""Benchmarks at tiny sizes: they run, their numbers are what they say, and nothing about time is asserted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from orchdata import bench
from orchdata.bench import Report, Result, make_report
from orchdata.cli.machine import PlanBench, ThroughputBench
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.preprocessor import TextPreprocessor


@dataclass(frozen=True)
class Settings:
    seed: int = 3
    folder: Path | None = Path("somewhere")


def test_a_result_has_median_quartiles_and_verdict() -> None:
    result = Result(name="x", unit="ms", values=(4.0, 1.0, 2.0, 3.0, 100.0), demand=3.0)
    assert (result.median, result.spread, result.met) == (3.0, (2.0, 4.0), True)
    assert Result(name="x", unit="x", values=(1.2,), demand=1.3, better="high").met is False
    assert Result(name="x", unit="x", values=(1.0, 2.0)).met is None
    assert Result(name="x", unit="x", values=(1.0, 2.0)).spread == (1.0, 2.0)


def test_a_report_is_json_lines_and_a_table() -> None:
    results = [Result(name="x", unit="ms", values=(2.0,), demand=1.0), Result(name="y", unit="x", values=(2.0,))]
    report = make_report("orchdata bench x", Settings(), results)
    assert not report.met
    assert json.loads(json.dumps(report.to_dict()))["config"] == {"seed": 3, "folder": "somewhere"}
    with pytest.raises(TypeError, match="config must be a dataclass instance"):
        make_report("x", {"seed": 3}, results)


def test_a_report_shows_no_secrets_of_urls() -> None:
    config = ThroughputBench(paths=("https://me:hidden@host/a.tar?signature=hidden", "b.tar"))
    text = json.dumps(make_report("orchdata bench throughput", config, []).to_dict())
    assert "https://host/a.tar?..." in text
    assert "b.tar" in text
    assert "hidden" not in text


def by_name(report: Report) -> dict[str, Result]:
    assert len({result.name for result in report.results}) == len(report.results)
    assert all(np.isfinite(result.values).all() for result in report.results)
    json.dumps(report.to_dict(), allow_nan=False)
    return {result.name.strip(): result for result in report.results}


def test_bench_plan() -> None:
    config = PlanBench(ranks=4, samples_per_rank=8, samples=2_000, repeats=2)
    found = by_name(make_report("orchdata bench plan", config, bench.run_plan(config)))
    assert len(found["plan one step"].values) == 2
    assert found["plan one step"].demand == 20.0
    assert 1.0 <= found["sum over phases of the largest load / lower bound"].median < 2.0
    with pytest.raises(ValueError, match="4 ranks x 8 need 32 samples, got 31"):
        bench.run_plan(PlanBench(ranks=4, samples_per_rank=8, samples=31))


@pytest.mark.parametrize("num_samples", [5, 12])
def test_throughput_of_a_data_set_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (number % 7 + 1)}) + "\n" for number in range(num_samples)))
    config = ThroughputBench(paths=(str(path),), batch_size=2, workers=1, repeats=1, consumer_ms=1)
    recipe = Recipe(text=TextPreprocessor(max_tokens=30))
    if num_samples < 6:
        with pytest.raises(ValueError, match="batches of 2 need 6 samples, got 5"):
            bench.run_throughput(config, recipe)
        return
    report = make_report("orchdata bench throughput", config, bench.run_throughput(config, recipe))
    assert list(by_name(report)) == ["bare threads", "threads", "processes"]
    rows = report.tables[0].rows
    assert all(isinstance(row[-1], float) and row[-1] >= 1 for row in rows[1:])  # ms of work


def test_throughput_of_a_made_up_data_set_leaves_the_users_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "_compared", lambda config, dataset: [dataset.index().num_rows])
    assert bench.run_throughput(ThroughputBench(samples=8, folder=str(tmp_path / "data"))) == [8]
    assert not (tmp_path / "cache").exists()
    assert os.environ["ORCHDATA_CACHE"] == str(tmp_path / "cache")
