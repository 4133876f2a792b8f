"""What post_balance adds to a step, measured at a tiny size: all of it runs; no time is asserted."""

from __future__ import annotations

import pytest

from benchmarks import post_balance


@pytest.mark.slow
def test_bench_of_post_balance() -> None:
    small = post_balance.PostBalanceBench(
        ranks=(2,), samples_per_rank=6, image_bytes=2_000, words=5, steps=3, training_milliseconds=1.0, repeats=2
    )
    found = {result.name: result for result in post_balance.run(small)}
    assert len(found["2 ranks: post_balance adds to an empty step"].values) == 2
    assert found["2 ranks: to a training step"].note.startswith("a training step sleeps 1 ms; 2 ranks shared ")
    assert found["2 ranks: bytes moved"].median > 0
    assert 0 < found["2 ranks: samples moved"].median < 100
    assert found["2 ranks: samples moved"].note == "of 12 a step"  # 6 of each of 2 ranks
    assert 1.0 <= found["2 ranks: largest load / mean"].median < 1.5
    assert found["2 ranks: by phase, adds to that"].note == "48 parts a step of all ranks"  # 4 of each sample
    assert found["2 ranks: by phase, bytes moved"].median > 0
    with pytest.raises(ValueError, match="steps and repeats must be at least 1, got 0 and 10"):
        post_balance.run(post_balance.PostBalanceBench(steps=0))
