"""The checker of "exactly once" finds lost, doubled, foreign and reordered samples, in one run and over resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from delivered_once import Key, wrong_deliveries

KEYS: list[Key] = [("a.tar", f"s{number}") for number in range(12)]
STEPS = [KEYS[start : start + 4] for start in range(0, 12, 4)]


def run(epoch: int, first: int, steps: Sequence[Sequence[Key]], ranks: int = 2) -> list[dict[str, Any]]:
    """The rows of a run from step `first` of an epoch on, each step dealt out to ranks, written as JSON has them."""
    rows = [
        {"rank": rank, "epoch": epoch, "step": step, "keys": keys[rank::ranks]}
        for step, keys in enumerate(steps, first)
        for rank in range(ranks)
    ]
    return [json.loads(json.dumps(row)) for row in rows]


def test_an_epoch_of_one_run_and_one_that_is_resumed_twice() -> None:
    assert wrong_deliveries([run(0, 0, STEPS)], KEYS, epochs=1) == []
    killed = [run(0, 0, STEPS[:2]), run(0, 1, STEPS[1:], ranks=3), run(0, 2, STEPS[2:], ranks=1)]
    assert wrong_deliveries(killed, KEYS, epochs=1) == []
    whole = [*run(0, 0, STEPS), *run(1, 0, STEPS[::-1])]
    assert wrong_deliveries([whole, run(1, 1, STEPS[1::-1])], KEYS, epochs=2) == []


def test_a_rank_that_was_killed_before_the_others_and_one_that_wrote_nothing() -> None:
    cut = [row for row in run(0, 0, STEPS) if (row["step"], row["rank"]) < (1, 1)]
    assert wrong_deliveries([cut, [], run(0, 1, STEPS[1:])], KEYS, epochs=1) == []
    assert "missing" in wrong_deliveries([cut, run(0, 2, STEPS[2:])], KEYS, epochs=1)[0]


def test_an_epoch_under_way_need_not_be_whole_but_has_nothing_twice() -> None:
    under_way = [run(0, 0, STEPS), run(1, 0, STEPS[:1])]
    assert wrong_deliveries(under_way, KEYS, epochs=1) == []
    assert wrong_deliveries(under_way, KEYS, epochs=2) == [
        "epoch 1: 8 samples (a.tar: s10, a.tar: s11, a.tar: s4, ...) missing, where 0 are to be left out"
    ]
    under_way[1] += run(1, 1, STEPS[:1])
    assert "epoch 1: 4 samples (a.tar: s0, " in wrong_deliveries(under_way, KEYS, epochs=1)[0]


SWAPPED = [STEPS[0], STEPS[2], STEPS[1]]


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([run(0, 0, [STEPS[0], STEPS[1][:3], STEPS[2]])], "1 samples (a.tar: s7) missing, where 0 are to be left out"),
        ([run(0, 0, [STEPS[0], STEPS[1], [*STEPS[2], KEYS[3]]])], "1 samples (a.tar: s3) more than once"),
        ([run(0, 0, [*STEPS, [("b.tar", "s0")]])], "1 samples (b.tar: s0) of no shard"),
        ([run(0, 0, STEPS), run(0, 1, SWAPPED[1:])], "step 1 of epoch 0 came again with other samples"),
        ([run(0, 0, STEPS[:1]), run(0, 2, STEPS[2:])], "a step is missing among [0, 2]"),
        ([run(0, 0, STEPS[:2]), run(0, 2, STEPS[1:])], "4 samples (a.tar: s4, a.tar: s5, a.tar: s6, ...) more than"),
        (
            [[*run(0, 0, STEPS), *run(0, 2, STEPS[2:])]],
            "run 0, rank 0: step 2 of epoch 0 comes after step 2 of epoch 0",
        ),
        ([[*run(0, 0, STEPS[:1]), *run(0, 2, STEPS[1:])]], "run 0, rank 1: step 2 of epoch 0 comes after step 0"),
        ([], "12 samples (a.tar: s0, a.tar: s1, a.tar: s10, ...) missing"),
    ],
    ids=["lost", "doubled", "foreign", "other order", "lost at resume", "late", "again", "skipped", "nothing"],
)
def test_each_problem_is_reported(runs: list[list[dict[str, Any]]], problem: str) -> None:
    reported = wrong_deliveries(runs, KEYS, epochs=1)
    assert any(problem in each for each in reported), reported


def test_samples_that_are_left_out_are_counted() -> None:
    assert wrong_deliveries([run(0, 0, STEPS[:2])], KEYS, epochs=1, dropped=4) == []
    for dropped in (3, 5):
        assert "4 samples" in wrong_deliveries([run(0, 0, STEPS[:2])], KEYS, epochs=1, dropped=dropped)[0]


def test_sources_that_come_round_again_come_round_evenly() -> None:
    small = [("b.tar", "t0"), ("b.tar", "t1")]
    steps = [[*STEPS[0], *small], [*STEPS[1], *small], [*STEPS[2], small[0]]]
    assert wrong_deliveries([run(0, 0, steps)], KEYS, small, epochs=1, repeats=True) == []
    assert wrong_deliveries([run(0, 0, steps)], KEYS, small, epochs=1)
    steps[2].append(small[0])
    assert "b.tar: t0" in wrong_deliveries([run(0, 0, steps)], KEYS, small, epochs=1, repeats=True)[0]
