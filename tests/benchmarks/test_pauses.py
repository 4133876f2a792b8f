"""Pauses are measured here and in another process, with and without a loader."""

from __future__ import annotations

import pytest

from benchmarks.pauses import PausesBench, run
from orchdata.loaders.text.preprocessor import FastTokenizer


@pytest.mark.slow
def test_pauses_of_all_lanes_are_measured() -> None:
    pytest.importorskip("tokenizers")
    encode = FastTokenizer.encode
    results = run(PausesBench(documents=2, tokens=3000, repeats=1))
    assert len(results) == 3 and all(min(each.values) > 0 for each in results)
    assert all("in another process" in each.note for each in results)
    assert FastTokenizer.encode is encode
