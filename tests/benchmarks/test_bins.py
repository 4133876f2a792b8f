"""The benchmark of bins at tiny sizes: all of it runs, and what the other methods do is worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks import bins
from benchmarks.bins import BinsBench, of_a_buffer, of_a_knapsack, of_open_bins, tables
from orchdata.bench import WideTable


def test_every_method_packs_every_list(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: bins.lists()[name] for name in ("captions", "documents")}
    monkeypatch.setattr(bins, "lists", lambda: some)
    mine, *asked, others = tables(BinsBench(samples=96, ranks=4, peers=True))
    assert isinstance(mine, WideTable) and isinstance(others, WideTable)
    assert [row[0] for row in mine.rows] == [row[0] for row in others.rows] == list(some)
    assert len(asked) == 4
    for _, fill, l2, bound, opened, *_, above, over_mean, _ in mine.rows:
        assert 0 < fill <= 1 and l2 <= bound <= opened
        assert above >= 0 and over_mean >= 1
    assert all(row[1] <= min(row[3::2]) for row in others.rows)


def test_the_other_methods_worked_out_by_hand() -> None:
    sizes = [5, 6, 4, 5, 10, 1]
    assert of_a_buffer(sizes, 10) == [2, 1, 1, 2, 0, 3]
    assert of_open_bins(sizes, 10) == [0, 1, 1, 0, 2, 3]
    assert of_a_knapsack(sizes, 10) == [0, 1, 1, 0, 2, 3]
