"""`python -m benchmarks.remote` at tiny sizes: all loaders deliver the samples of two epochs, and the server counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.loading.lanes import Lane
from benchmarks.remote.job import RemoteJob, measure
from benchmarks.remote.lanes import ALONE, NEAR, chosen_lanes
from benchmarks.remote.run import RemotePeersBench, run
from orchdata.bench import make_report


def job_of(samples: int) -> Any:
    return SimpleNamespace(cache="", samples=range(samples))


def lane_of(*counts: int) -> Lane:
    def load(job: RemoteJob) -> Iterator[int]:
        yield from counts

    return Lane("torch", load)


@pytest.mark.parametrize(
    ("counts", "delivered"),
    [((2, 2, 2, 2), 8), ((4, 4, 4), 12), ((2, 2, 2, 2, 2, 2), 2)],
    ids=["few", "many", "second"],
)
def test_an_epoch_of_another_size_is_an_error(
    counts: tuple[int, ...], delivered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", "")
    with pytest.raises(RuntimeError, match=f"an epoch delivered {delivered} of 10 samples"):
        measure(lane_of(*counts), job_of(10), 2)


@pytest.mark.slow
def test_every_loader_delivers_two_epochs_from_the_bucket() -> None:
    config = RemotePeersBench(samples=16, batch_size=2, workers=1, repeats=1, index_shards=1, latency_ms=1.0)
    report = make_report("python -m benchmarks.remote", config, run(config))
    shown = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    speeds, reads = ({row[0]: row[1:] for row in table["rows"]} for table in shown["tables"][:2])
    lanes = chosen_lanes("all")
    there = [name for name, lane in lanes.items() if not lane.absent]
    assert list(speeds) == there
    assert list(reads) == [name for name in there if NEAR not in name]
    # One range a sample, and the headers between its members: both epochs.
    assert reads[ALONE][:2] == [1.0, 1.0]
    assert 1.0 < reads[ALONE][2] < 1.1
    # Whole tars through pipes: 8 of them for 16 samples.
    assert reads["webdataset"][:2] == [0.5, 0.5]
    for name in ("orchdata, threads", "orchdata, processes"):
        assert 0.5 < reads[name][0] <= 1.2
        assert 1.0 <= reads[name][2] < 1.1
    assert {"indexing / fetching the tars whole"} < {result["name"] for result in shown["results"]}
