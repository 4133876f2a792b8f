"""Benchmarks at tiny sizes measure all of their lanes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from ray_clusters import TestCluster

from benchmarks import clips, index_text, pauses, ray_engine
from orchdata.loaders.text.preprocessor import FastTokenizer

pytestmark = pytest.mark.slow


def test_ray(ray_cluster: TestCluster) -> None:
    results = ray_engine.run(ray_engine.RayBench(batches=4, mebibytes=1, samples=24, repeats=1))
    assert len(results) == 5 and all(min(each.values) > 0 for each in results)
    assert [each.demand for each in results if each.demand] == [300, 4, 0.75]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ways_of_indexing_texts() -> None:
    pytest.importorskip("tokenizers")
    results = index_text.run(index_text.IndexTextBench(shards=2, texts=5, words=30, repeats=1))
    assert [len(each.values) for each in results] == [1] * 5
    assert results[0].note == "1.00 times as fast (1.00 to 1.00)"


def test_pauses_here_and_in_another_process() -> None:
    pytest.importorskip("tokenizers")
    encode = FastTokenizer.encode
    results = pauses.run(pauses.PausesBench(documents=2, tokens=3000, repeats=1))
    assert len(results) == 3 and all(min(each.values) > 0 for each in results)
    assert all("in another process" in each.note for each in results)
    assert FastTokenizer.encode is encode


def test_decoders_of_clips_return_the_same_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    small = clips.ClipBench(seconds=1, fps=10, width=64, height=48, pictures=4, repeats=1)
    (table,) = clips.run(small)
    assert [row[0] for row in table.rows][:3] == ["mp4", "webm", "gif"] and len(table.rows) == 5
    assert all(row[number] > 0 for row in table.rows for number in range(1, 7))
    monkeypatch.setattr("benchmarks.clips._all", lambda *_: np.zeros((4, 48, 64, 3), np.uint8))
    with pytest.raises(ValueError, match="all shows other pictures"):
        clips.run(small)
