"""`python -m benchmarks.throughput` at tiny sizes: other loaders deliver and decode the same samples as ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.lanes import LANES, Lane
from benchmarks.loading.measure import measure
from benchmarks.loading.processes import run_in_child
from benchmarks.throughput import lanes as lanes_module
from benchmarks.throughput.decoding import Tensors, pack
from benchmarks.throughput.lanes import FORKED, PEERS, chosen_lanes, name_of
from benchmarks.throughput.records import PeersJob
from benchmarks.throughput.run import PeersBench, make_job, run
from benchmarks.throughput.torch_peers import web_samples
from orchdata.bench import make_report
from orchdata.dataloader import DataLoader

TINY = Corpus(samples=12, shards=2, width=64, height=48, audio_seconds=0.2, variety=4)


@pytest.fixture
def job(tmp_path: Path) -> PeersJob:
    (tmp_path / "tars").mkdir()
    TINY.write(tmp_path / "tars")
    return make_job(PeersBench(data=str(tmp_path / "tars" / "*.tar"), batch_size=2, workers=1), tmp_path)


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
    figures, _ = run_in_child(measure, (described, job, "none", 0, 4), job.folder, 120, python=described.python)
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
