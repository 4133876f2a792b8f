"""`orchdata bench throughput` at tiny sizes: lanes deliver the same samples, and figures are what they say."""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from orchdata.bench.corpus import Corpus
from orchdata.bench.harness import Result, WideTable, make_report
from orchdata.bench.throughput import ThroughputBench, _job, run
from orchdata.bench.throughput.consumers import CONSUMERS, rounds_for
from orchdata.bench.throughput.decoding import PillowImages, Tensors, pack
from orchdata.bench.throughput.job import Job, joined, split
from orchdata.bench.throughput.lanes import BARE, LANES, chosen_lanes
from orchdata.bench.throughput.measure import Figures, _figures, measure
from orchdata.bench.throughput.processes import LaneError, Memory, cpu_seconds, memory_of, process_tree, run_in_child
from orchdata.bench.throughput.report import make_results
from orchdata.bench.throughput.torch_peers import web_samples
from orchdata.dataloader import DataLoader
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.recipe import Recipe

TINY = Corpus(samples=12, shards=2, width=64, height=48, audio_seconds=0.2, variety=4)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "tars").mkdir()
    TINY.write(tmp_path / "tars")
    data = (str(tmp_path / "tars" / "*.tar"),)
    return _job(ThroughputBench(data=data, batch_size=2, workers=1), tmp_path)


def test_a_record_gives_back_its_fields(job: Job) -> None:
    fields = job.records[3]
    assert {"__url__", "__key__", "jpg", "txt"} <= fields.keys()
    assert split(joined(fields)) == fields
    assert sum(
        len(value) for number in range(12) for value in job.records[number].values() if type(value) is bytes
    ) == (job.records.num_bytes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its tar open.
def test_all_sides_decode_the_same(job: Job) -> None:
    (ours,) = DataLoader(ShardDataset(list(job.urls), job.recipe), batch_size=12, collate_fn=pack, dp=(0, 1))
    by_number = pack([job.decoder(job.records[number]) for number in range(12)])
    web = web_samples(job.urls, job.decoder)
    (by_webdataset,) = torch.utils.data.DataLoader(web, batch_size=12, collate_fn=pack)
    for theirs in (by_number, by_webdataset):
        assert _equal(ours, theirs)


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_images_by_pillow_and_torch_are_those_of_our_pillow_resizer(job: Job) -> None:
    limits = {"max_tokens": 4}  # of 28 x 28 pixels: most images are made smaller
    jpegs = [job.records[number]["jpg"] for number in range(4)]
    plain = ImagePreprocessor(resizer="pillow", **limits)
    for data in jpegs:
        header = plain.probe(data, Recipe().limits)
        size = plain.count_header(header, Recipe().limits)
        found = []
        for images in (plain, PillowImages(**limits)):
            out = {"patches": np.zeros((size.num_rows, plain.patch_dim), np.uint16)}
            images.decode_into(data, size, out, Recipe().limits)
            found.append(torch.from_numpy(out["patches"]).view(torch.bfloat16).float())
        # Two roundings to bfloat16 (8 bits) of values up to about 2, and two of libjpeg's ways to make colours.
        assert (found[0] - found[1]).abs().max() < 0.1
        assert (found[0] - found[1]).abs().mean() < 0.01


@pytest.mark.parametrize(
    "lane",
    ["raw read, bytes only", BARE, "orchdata, threads", pytest.param("orchdata, processes", marks=pytest.mark.slow)],
)
def test_limits_and_ours_deliver_every_sample(job: Job, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(job.cache))
    assert sum(LANES[lane].load(job)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("lane", [name for name, lane in LANES.items() if lane.peer])
def test_peers_deliver_every_sample(job: Job, lane: str) -> None:
    if not LANES[lane].installed:
        pytest.skip(f"{LANES[lane].package} is not installed")
    if prepare := LANES[lane].prepare:
        folder = job.folder / LANES[lane].peer
        folder.mkdir()
        run_in_child(prepare, (job, folder), job.folder / "log", 120)
    figures, _ = run_in_child(measure, (lane, job, "none", 0, 4), job.folder / "log", 120)
    assert figures.samples_per_second > 0


def batches(*counts: int) -> Iterator[int]:
    yield from counts


def test_the_lead_at_either_end_is_not_measured() -> None:
    worked: list[int] = []
    CONSUMERS["counted"] = worked.append
    try:
        found = _figures(batches(2, 2, 2, 2, 2, 2), time.perf_counter(), 12, 4, "counted", 7)
    finally:
        del CONSUMERS["counted"]
    assert worked == [7] * 6
    # From the delivery of the second batch (4 samples) to that of the fourth (4 samples are left): two batches.
    assert (len(found.waits), len(found.works)) == (2, 2)
    assert found.samples_per_second > 0


def test_an_epoch_with_other_samples_is_refused() -> None:
    with pytest.raises(RuntimeError, match="an epoch delivered 10 of 12 samples"):
        _figures(batches(5, 5), 0.0, 12, 4, "none", 0)
    with pytest.raises(RuntimeError, match="batches too large: nothing lies between the first and the last 4 of 12"):
        _figures(batches(12), 0.0, 12, 4, "none", 0)


def test_work_is_as_long_as_asked() -> None:
    assert rounds_for("none", 1.0) == 0
    assert 0 < rounds_for("python", 1e-3) < rounds_for("python", 1.0)


def test_a_child_gives_its_result_or_says_why_there_is_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_in_child(operator.add, (2, 3), log, 60) == (5, Memory())
    with pytest.raises(LaneError, match="ZeroDivisionError: division by zero"):
        run_in_child(operator.truediv, (1, 0), log, 60)
    with pytest.raises(LaneError, match="its process ended with exit code 3"):
        run_in_child(os._exit, (3,), log, 60)


def test_a_child_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    before = set(process_tree(os.getpid()))
    with pytest.raises(LaneError, match="not done after 3 s"):
        run_in_child(os.system, ("sleep 1000 & sleep 1000",), tmp_path / "log", 3, watch=True)
    left = set(process_tree(os.getpid())) - before
    assert not [pid for pid in left if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_figures_of_a_process_tree() -> None:
    found = memory_of(os.getpid())
    assert found.pss >= found.own > 1 << 20
    assert cpu_seconds(os.getpid()) > 0


def figures(rate: float) -> Figures:
    return Figures(
        first_batch_seconds=0.5, samples_per_second=rate, cpu_seconds=0.005, waits=(0.01, 0.02), works=(0.05,)
    )


def test_a_report_holds_ours_against_the_limit_and_the_best_peers() -> None:
    rates = {BARE: 100.0, "orchdata, threads": 90.0, "torch DataLoader": 60.0, "Grain, threads": 80.0}
    peaks = {BARE: Memory(), "orchdata, threads": Memory(300, 120)}
    peaks |= {"torch DataLoader": Memory(200, 150), "Grain, threads": Memory(400, 100)}
    found = make_results(
        {name: [figures(rate), figures(rate)] for name, rate in rates.items()},
        peaks,
        {"Ray Data": "not installed"},
        sample_bytes=1e5,
        work_seconds=0.05,
    )
    ratios = {each.name: (each.median, each.met, each.note) for each in found if isinstance(each, Result)}
    assert ratios["orchdata, threads / bare threads"] == (0.9, False, "")
    assert ratios["orchdata, threads / fastest peer"] == (1.125, True, "Grain, threads")
    assert ratios["orchdata, threads / fastest in torch's DataLoader"] == (1.5, True, "torch DataLoader")
    assert ratios["orchdata, threads: peak PSS / leanest peer's"] == (1.5, False, "torch DataLoader")
    assert ratios["orchdata, threads: memory without files / leanest peer's"] == (1.2, False, "Grain, threads")
    table, missing = (each for each in found if isinstance(each, WideTable))
    assert missing.rows == (("Ray Data", "not installed"),)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert (row["loader"], row["samples/s"], row["MB/s"], row["of bare"]) == ("orchdata, threads", 90.0, 9.0, 0.9)
    assert (row["wait p50 ms"], row["CPU ms/sample"], row["work ms"]) == (15.0, 5.0, 50.0)


def test_peers_are_chosen_by_name() -> None:
    assert chosen_lanes("none") == [name for name, lane in LANES.items() if not lane.peer]
    assert chosen_lanes("all") == list(LANES)
    assert {"webdataset", "Grain, threads", "Grain, processes"} < set(chosen_lanes("webdataset, grain"))
    with pytest.raises(ValueError, match="no peer is called dali: say all, none, or some of datasets, "):
        chosen_lanes("dali")


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="consumer must be one of none, torch, python, got 'c'"):
        ThroughputBench(consumer="c")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        ThroughputBench(workers=0)
    config = ThroughputBench(data=tuple(TINY.write(tmp_path)), batch_size=4, workers=1, peers="none")
    with pytest.raises(ValueError, match="1 workers and batches of 4 need 24 samples, got 12"):
        run(config)


def test_the_default_budget_of_an_image_is_the_recipes() -> None:
    assert ThroughputBench().max_tokens == ImagePreprocessor().max_tokens


@pytest.mark.slow
def test_a_peer_that_is_not_there_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANES, "Ray Data", LANES["Ray Data"].__class__("other", len, None, "no_such", "ray", "ray"))
    data = tuple(TINY.write(tmp_path))
    config = ThroughputBench(data=data, batch_size=2, workers=1, peers="ray,torch", repeats=1, consumer="python")
    report = make_report("orchdata bench throughput", config, run(config))
    shown = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [row[0] for row in shown["tables"][0]["rows"]] == [*chosen_lanes("none"), "torch DataLoader"]
    assert shown["tables"][1]["rows"] == [["Ray Data", "not installed: pip install 'ray'"]]
    assert report.config["data"] == list(data) or report.config["data"] == data
