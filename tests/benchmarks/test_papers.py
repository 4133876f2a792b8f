"""The comparison with the papers at tiny sizes: all of it runs, and its made-up samples are what was declared."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.papers import run
from benchmarks.papers.cases import CASES, REPORTED
from benchmarks.papers.disttrain import order_after_disttrain
from benchmarks.papers.pipeline import COLUMNS
from orchdata.bench import make_report

SMALL = run.PapersBench(small=True, steps=1)


def test_every_case_is_planned_and_nothing_beats_perfect() -> None:
    found = run.run(SMALL)
    json.dumps(make_report("python -m benchmarks.papers", SMALL, found).to_dict(), allow_nan=False)
    assumed, *tables, ordered, placed, reported = found
    assert all(0 < seconds < 1e3 for row in placed.rows for seconds in row[1:])  # type: ignore[operator]
    assert [row[0] for table in tables for row in table.rows] == [
        replace(case, ranks=run.SMALL_RANKS).title for case in CASES
    ]
    for row in (row for table in tables for row in table.rows):
        speedup = dict(zip(run.METHODS, row[1:], strict=False))
        assert speedup["none"] == 1.0
        assert all(value <= speedup["perfect"] * (1 + 1e-12) for value in speedup.values())  # type: ignore[operator]
    for row in ordered.rows:
        speedup = dict(zip(COLUMNS, row[1:], strict=True))
        assert speedup["both, our order"] >= speedup["both"]  # type: ignore[operator]
    assert {row[0].split(":")[0] for row in assumed.rows} == {row[0] for row in reported.rows}  # type: ignore[union-attr]
    assert all(f"{one.gain} ({one.known_from})" in "".join(table.note for table in found) for one in REPORTED)


def test_the_order_after_disttrain_by_hand() -> None:
    # Sizes: 3, 9, 8, 7, 6. Smallest first: 0. Kept for the tail, as there are two stages: the next smallest, 4.
    # Warm-up: 0 takes 2 on stage 1. The forwards of 3, 2, 1 (smallest first) on stage 0 take 1, 4, 3: 3 and 1 are
    # equally near, 3 comes first.
    # stage 0 | F0 0-1 | F3 1-2 | B0 3-3 |
    # stage 1 |        | F0 1-2 | B0 2-3 | F3 3-4 | B3 4-5 |
    # From 3 stage 0 waits for B3 until 5: an interval of 2. Of 2 and 1, which take 4 and 3, 1 is nearer.
    forward = [[1, 3, 4, 1, 2], [1, 1, 1, 1, 1]]
    backward = [[0, 4, 2, 4, 2], [1, 1, 1, 1, 1]]
    assert order_after_disttrain(forward, backward).tolist() == [0, 3, 1, 2, 4]
