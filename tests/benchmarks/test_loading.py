"""Loaders in turns, at tiny sizes: lanes and peers deliver the same samples, and figures are what they say."""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.loading.consumers import CONSUMERS
from benchmarks.loading.corpus import Corpus
from benchmarks.loading.job import Job
from benchmarks.loading.lanes import BARE, LANES, Lane
from benchmarks.loading.measure import Figures, _figures, measure
from benchmarks.loading.processes import (
    LaneError,
    Memory,
    Spent,
    process_tree,
    run_in_child,
)
from benchmarks.loading.report import make_results
from benchmarks.throughput import lanes as lanes_module
from benchmarks.throughput.decoding import Tensors, pack
from benchmarks.throughput.lanes import FORKED, PEERS, chosen_lanes, name_of
from benchmarks.throughput.records import PeersJob
from benchmarks.throughput.run import PeersBench, make_job, run
from benchmarks.throughput.torch_peers import web_samples
from orchdata.bench import Result, WideTable, make_report
from orchdata.dataloader import DataLoader

TINY = Corpus(samples=12, shards=2, width=64, height=48, audio_seconds=0.2, variety=4)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "tars").mkdir()
    TINY.write(tmp_path / "tars")
    return make_job(PeersBench(data=str(tmp_path / "tars" / "*.tar"), batch_size=2, workers=1), tmp_path)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "lane",
    ["raw read, bytes only", BARE, "orchdata, threads", pytest.param("orchdata, processes", marks=pytest.mark.slow)],
)
def test_limits_and_ours_deliver_every_sample(job: Job, lane: str) -> None:
    assert sum(LANES[lane].load(job)) == 12


def test_the_lead_at_either_end_is_not_measured() -> None:
    worked: list[int] = []
    CONSUMERS["counted"] = worked.append
    try:
        found = _figures(iter([2] * 6), time.perf_counter(), 12, 4, "counted", 7)
    finally:
        del CONSUMERS["counted"]
    assert worked == [7] * 6
    # From the delivery of the second batch (4 samples) to that of the fourth (4 samples are left): two batches.
    assert (len(found.waits), len(found.works)) == (2, 2)
    assert found.samples_per_second > 0


def test_an_epoch_with_other_samples_is_refused() -> None:
    with pytest.raises(RuntimeError, match="an epoch delivered 10 of 12 samples"):
        _figures(iter([5, 5]), 0.0, 12, 4, "none", 0)
    with pytest.raises(RuntimeError, match="batches too large: nothing lies between the first and the last 4 of 12"):
        _figures(iter([12]), 0.0, 12, 4, "none", 0)


def test_a_child_gives_its_result_or_says_why_there_is_none(tmp_path: Path) -> None:
    assert run_in_child(operator.add, (2, 3), tmp_path, 60) == (5, Memory())
    with pytest.raises(LaneError, match="ZeroDivisionError: division by zero"):
        run_in_child(operator.truediv, (1, 0), tmp_path, 60)
    with pytest.raises(LaneError, match="its process ended with exit code 3"):
        run_in_child(os._exit, (3,), tmp_path, 60)
    with pytest.raises(LaneError, match="nowhere/python does not start: No such file"):
        run_in_child(operator.add, (2, 3), tmp_path, 60, python="/nowhere/python")


@pytest.mark.slow
def test_a_child_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    before = set(process_tree(os.getpid()))
    with pytest.raises(LaneError, match="not done after 3 s"):
        run_in_child(os.system, ("sleep 1000 & sleep 1000",), tmp_path, 3, watch=True)
    left = set(process_tree(os.getpid())) - before
    assert not [pid for pid in left if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def figures(rate: float) -> Figures:
    return Figures(
        first_batch_seconds=0.5,
        samples_per_second=rate,
        spent=(Spent(0.001, 0.0, 1.0), Spent(0.0025, 0.0005, 20.0), Spent(0.001, 0.0, 4.0)),
        waits=(0.01, 0.02),
        works=(0.05,),
    )


def test_a_report_holds_ours_against_the_limit_and_the_best_peers() -> None:
    rates = {BARE: 100.0, "orchdata, threads": 90.0, "orchdata, processes": 80.0}
    rates |= {"torch DataLoader": 60.0, "Grain, threads": 80.0}
    lanes = LANES | {"torch DataLoader": Lane("torch", len, in_processes=True), "Grain, threads": Lane("other", len)}
    peaks = {BARE: Memory(), "orchdata, threads": Memory(300, 120), "orchdata, processes": Memory(160, 150)}
    peaks |= {"torch DataLoader": Memory(200, 150), "Grain, threads": Memory(400, 100)}
    found = make_results(
        lanes,
        {name: [figures(rate), figures(rate)] for name, rate in rates.items()},
        peaks,
        {"Ray Data": "not installed"},
        sample_bytes=1e5,
        work_seconds=0.05,
    )
    ratios = {each.name: (each.median, each.met, each.note) for each in found if isinstance(each, Result)}
    assert ratios["orchdata, threads / bare threads"] == (0.9, False, "")
    assert ratios["orchdata, threads / fastest peer"] == (1.125, True, "Grain, threads")
    assert ratios["orchdata, threads / fastest in torch's DataLoader"] == (1.5, None, "torch DataLoader")
    # Each is compared with those that load as it does.
    assert ratios["orchdata, threads: peak PSS / leanest peer's with threads"] == (0.75, True, "Grain, threads")
    assert ratios["orchdata, processes: peak PSS / leanest peer's with processes"] == (0.8, True, "torch DataLoader")
    assert ratios["orchdata, processes: memory without files / leanest peer's with processes"][:2] == (1.0, False)
    table, by_process, missing = (each for each in found if isinstance(each, WideTable))
    assert missing.rows == (("Ray Data", "not installed"),)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert (row["loader"], row["samples/s"], row["MB/s"], row["of bare"]) == ("orchdata, threads", 90.0, 9.0, 0.9)
    assert (row["wait p50 ms"], row["CPU ms/sample"], row["work ms"]) == (15.0, 5.0, 50.0)
    name, mine, others, *sums = by_process.rows[0]
    assert (name, mine, others) == (BARE, 1.0, "3.00 + 1.00")
    assert sums == pytest.approx([4.5, 0.5, 25.0])


# `python -m benchmarks.throughput` at tiny sizes: other loaders deliver and decode the same samples as ours.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its tar open.
def test_all_sides_decode_the_same(job: PeersJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(job.cache))
    (ours,) = DataLoader(job.shards.open(), batch_size=12, collate_fn=pack, dp=(0, 1))
    by_number = pack([job.decoder(job.records[number]) for number in range(12)])
    web = web_samples(job.urls, job.decoder)
    (by_webdataset,) = torch.utils.data.DataLoader(web, batch_size=12, collate_fn=pack)
    for theirs in (by_number, by_webdataset):
        assert _equal(ours, theirs)


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("lane", PEERS)
def test_peers_deliver_every_sample(job: PeersJob, lane: str) -> None:
    described = chosen_lanes(name_of(lane))[lane]
    if described.absent:
        pytest.skip(described.absent)
    if described.prepare:
        folder = job.folder / described.folder
        folder.mkdir()
        run_in_child(described.prepare, (job, folder), job.folder, 120, python=described.python)
    figures, _ = run_in_child(measure, (described, job, "none", 0, 4), job.folder, 400, python=described.python)
    assert figures.samples_per_second > 0


def test_a_peer_runs_in_its_environment_or_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "ENVIRONMENTS", tmp_path)
    monkeypatch.setitem(PEERS, "Ray Data", Lane("other", len, "no_such_module"))
    found = chosen_lanes("ray,webdataset")
    assert found["Ray Data"].absent == "not installed: make peers-ray"
    assert (found["webdataset"].python, found["webdataset"].absent) == (sys.executable, "")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / ".installed").touch()
    found = chosen_lanes("ray")
    assert (found["Ray Data"].python, found["Ray Data"].absent) == (str(tmp_path / "ray" / "bin" / "python"), "")


def test_every_peer_has_an_environment_or_is_among_our_packages() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    environments = set(makefile.split("PEERS := ")[1].splitlines()[0].split())
    assert {name_of(lane) for lane in PEERS} - environments == {"torch", "webdataset", "datasets"}


@pytest.mark.slow
def test_a_peer_that_is_not_there_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "ENVIRONMENTS", tmp_path)
    monkeypatch.setitem(PEERS, "Ray Data", Lane("other", len, "no_such_module"))
    data = " ".join(TINY.write(tmp_path))
    config = PeersBench(data=data, batch_size=2, workers=1, peers="ray,torch", repeats=1, consumer="python")
    report = make_report("python -m benchmarks.throughput", config, run(config))
    shown = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [row[0] for row in shown["tables"][0]["rows"]] == [*LANES, *FORKED, "torch DataLoader"]
    assert shown["tables"][2]["rows"] == [["Ray Data", "not installed: make peers-ray"]]
