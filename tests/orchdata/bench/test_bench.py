"""Benchmarks at tiny sizes: they run, their numbers are what they say, and nothing about time is asserted."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchdata.bench import index, plan
from orchdata.bench.corpus import Corpus
from orchdata.bench.distributions import DISTRIBUTIONS, omni_phases
from orchdata.bench.harness import Report, Result, WideTable, anonymous_bytes, interleave, machine, make_report
from orchdata.bench.throughput import ThroughputBench
from orchdata.cli import app
from orchdata.dataset.shard_dataset import ShardDataset


@dataclass(frozen=True)
class Settings:
    seed: int = 3
    folder: Path | None = Path("somewhere")


def tick(step: float = 1.0) -> object:
    counter = itertools.count()
    return lambda: next(counter) * step


def test_interleaving_runs_in_turn_and_leaves_the_warm_up_out() -> None:
    calls: list[str] = []
    seconds = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1, clock=tick(0.5)
    )
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]  # Every second round backwards.
    assert seconds == {"a": (0.5, 0.5, 0.5), "b": (0.5, 0.5, 0.5)}
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        interleave({}, repeats=0)


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
    lines = [json.loads(line) for line in report.json_lines()]
    assert [(line["name"], line["met"], line["command"]) for line in lines] == [
        ("x", False, "orchdata bench x"),
        ("y", None, "orchdata bench x"),
    ]
    assert report.render_results().row_count == 2
    with pytest.raises(TypeError, match="config must be a dataclass instance"):
        make_report("x", {"seed": 3}, results)


def test_throughput_of_one_s_own_data_shows_no_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Result(name="ours / bare threads", unit="x", values=(0.5,), demand=0.97, better="high")]
    monkeypatch.setattr("orchdata.bench.throughput.run", lambda *_, **__: results)
    for options in ([], ["--json"]):
        printed = CliRunner().invoke(app, ["bench", "throughput", *options]).output
        assert "ours / bare threads" in printed
        assert not re.search("MISSED|0.97|demand +", printed)
    shown = Console(record=True, width=200, file=io.StringIO())
    shown.print(make_report("orchdata bench plan", Settings(), results).render_results())
    assert ">= 0.97: MISSED" in shown.export_text()  # of this repository's own


def test_a_report_shows_no_secrets_of_urls() -> None:
    config = ThroughputBench(paths=("https://me:hidden@host/a.tar?signature=hidden", "b.tar"))
    text = json.dumps(make_report("orchdata bench throughput", config, []).to_dict())
    assert "https://host/a.tar?..." in text
    assert "b.tar" in text
    assert "hidden" not in text


def test_a_report_shows_wide_tables_before_its_results() -> None:
    rows = (("text", 1.00094, None),)
    table = WideTable(title="ratios", columns=("case", "ours", "peer"), rows=rows, unit="x", note="of one batch")
    report = make_report("orchdata bench x", Settings(), [Result(name="x", unit="ms", values=(2.0,)), table])
    assert [result.name for result in report.results] == ["x"]
    assert json.loads(json.dumps(report.to_dict()))["tables"][0]["rows"] == [["text", 1.00094, None]]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report.render())
    shown = capture.get()
    assert "1.0009" in shown
    assert shown.index("ratios") < shown.index("orchdata bench x")


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["packages"]["numpy"] == np.__version__
    assert anonymous_bytes() > 1 << 20


def test_distributions_are_seeded_positive_integers() -> None:
    for make in DISTRIBUTIONS.values():
        costs = make(np.random.default_rng(1), 500)
        assert costs.dtype == np.int64
        assert costs.shape == (500,)
        assert costs.min() >= 0
        assert (costs == make(np.random.default_rng(1), 500)).all()
    assert omni_phases(np.random.default_rng(1), 500)["llm"].min() >= 1


def test_the_corpus_is_a_dataset_of_what_it_says(tmp_path: Path) -> None:
    urls = Corpus(samples=20, shards=3, width=64, height=48, audio_seconds=0.2, variety=4).write(tmp_path)
    found = ShardDataset(urls).index()
    assert (found.num_samples, len(found.bad_rows())) == (20, 0)
    assert found.totals["modalities"]["image"]["samples"] == 20
    assert 10 <= found.totals["modalities"]["audio"]["samples"] < 20
    with pytest.raises(ValueError, match="shards must be from 1 to the 2 samples, got 3"):
        Corpus(samples=2, shards=3).write(tmp_path)


def by_name(report: Report) -> dict[str, Result]:
    assert len({result.name for result in report.results}) == len(report.results)
    assert all(np.isfinite(result.values).all() for result in report.results)
    json.dumps(report.to_dict(), allow_nan=False)
    return {result.name.strip(): result for result in report.results}


def test_bench_plan() -> None:
    config = plan.PlanBench(ranks=4, samples_per_rank=8, samples=2_000, repeats=2)
    found = by_name(make_report("orchdata bench plan", config, plan.run(config)))
    assert len(found["plan one step"].values) == 2
    assert found["plan one step"].demand == 20.0
    assert 1.0 <= found["sum over phases of the largest load / lower bound"].median < 2.0
    with pytest.raises(ValueError, match="4 ranks x 8 need 32 samples, got 31"):
        plan.run(plan.PlanBench(ranks=4, samples_per_rank=8, samples=31))


@pytest.mark.slow
def test_bench_index() -> None:
    config = index.IndexBench(samples=12, words=10, small_shards=3, repeats=2)
    found = by_name(make_report("orchdata bench index", config, index.run(config)))
    assert found["walk shards and read media headers"].demand == 30_000.0
    assert found["costs under a recipe / the tokenizer alone"].median > 0
    assert found["index tars of one sample each"].demand == 1_000.0
    assert found["again, nothing changed"].median > 0
