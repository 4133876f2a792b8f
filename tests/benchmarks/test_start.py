"""Benchmarks of starts at tiny sizes: they run, and nothing about time is asserted."""

from __future__ import annotations

import pytest

from benchmarks import parquet, start


@pytest.mark.slow
def test_starting_a_loader() -> None:
    found = {
        result.name.strip(): result
        for result in start.run(start.StartBench(ranks=4, samples_per_rank=8, samples=2_000, repeats=1))
    }
    for size in ("32", "200", "2,000"):
        assert found[f"{size} samples: checksums verified, on the first start of a machine"].median > 0
        assert found[f"{size} samples: anonymous memory of that process"].median > 1.0
        assert found[f"{size} samples: resume after nine tenths of an epoch / at its start"].median > 0
    assert found["anonymous memory, 2,000 samples - 32"].demand == 200.0
    with pytest.raises(ValueError, match="4 ranks x 8 need 32 samples, got 31"):
        start.StartBench(ranks=4, samples_per_rank=8, samples=31)


@pytest.mark.slow
def test_measuring_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "SMALL_FILES", 2)
    found = {result.name.strip(): result for result in parquet.run(parquet.ParquetBench(rows=30, repeats=1))}
    assert found["Parquet, a file of 30 rows, in a child process"].median > 0
    assert found["start of a child, with its first file"].median > 0
