"""Every way of indexing texts is measured, in turn."""

from __future__ import annotations

import os

import pytest

from benchmarks.index_text import IndexTextBench, run


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_every_way_is_measured() -> None:
    pytest.importorskip("tokenizers")
    results = run(IndexTextBench(shards=2, texts=5, words=30, repeats=1))
    assert [len(each.values) for each in results] == [1] * 5
    assert results[0].note == "1.00 times as fast (1.00 to 1.00)"
