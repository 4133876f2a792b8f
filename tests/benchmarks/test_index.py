"""`python -m benchmarks.index` at tiny sizes, and the data that benchmarks make up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.index import IndexBench, run
from benchmarks.loading.corpus import Corpus
from orchdata.bench import make_report
from orchdata.dataset.shard_dataset import ShardDataset


def test_the_corpus_is_a_dataset_of_what_it_says(tmp_path: Path) -> None:
    urls = Corpus(samples=20, shards=3, width=64, height=48, audio_seconds=0.2, variety=4).write(tmp_path)
    found = ShardDataset(urls).index()
    assert (found.num_samples, len(found.bad_rows())) == (20, 0)
    assert found.totals["modalities"]["image"]["samples"] == 20
    assert 10 <= found.totals["modalities"]["audio"]["samples"] < 20
    with pytest.raises(ValueError, match="shards must be from 1 to the 2 samples, got 3"):
        Corpus(samples=2, shards=3).write(tmp_path)


@pytest.mark.slow
def test_bench_index() -> None:
    config = IndexBench(samples=12, words=10, small_shards=3, repeats=2)
    report = make_report("python -m benchmarks.index", config, run(config))
    json.dumps(report.to_dict(), allow_nan=False)
    found = {result.name.strip(): result for result in report.results}
    assert found["walk shards and read media headers"].demand == 30_000.0
    assert found["costs under a recipe / the tokenizer alone"].median > 0
    assert found["index tars of one sample each"].demand == 1_000.0
    assert found["again, nothing changed"].median > 0
