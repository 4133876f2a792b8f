"""Microbatches: equal counts, caps hold, as few as brute force, clear errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.balancers import balance, split_microbatches

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

size_lists = st.lists(st.integers(1, 40), max_size=40)


@given(size_lists, st.integers(1, 5), st.booleans())
def test_caps_hold_and_every_sample_has_a_microbatch(sizes: list[int], num_ranks: int, in_step: bool) -> None:
    rank = balance(sizes, num_ranks).rank
    microbatch, count = split_microbatches(sizes, rank, num_ranks, max_size=40, in_step=in_step)
    assert microbatch.dtype == np.int32
    assert count >= 1
    assert ((microbatch >= 0) & (microbatch < count)).all()
    loads = np.zeros((num_ranks, count), np.int64)
    np.add.at(loads, (rank, microbatch), sizes)
    assert loads.max(initial=0) <= 40
    assert count >= -(-loads.sum(axis=1).max(initial=0) // 40)
    if in_step:
        assert (np.diff(loads, axis=1) <= 0).all()


def test_the_fewest_are_found_where_greedy_needs_one_more() -> None:
    sizes = [6, 5, 5, 4, 2, 2]  # 6+4+2 and 5+5+2; best-fit decreasing starts with 6+5.
    assert split_microbatches(sizes, [0] * 6, 1, max_size=12)[1] == 2


def test_the_count_is_that_of_the_rank_that_needs_most() -> None:
    microbatch, count = split_microbatches([5, 5, 5, 1], [0, 0, 0, 1], 2, max_size=5)
    assert count == 3
    assert microbatch.tolist() == [0, 1, 2, 0]  # Rank 1 has two empty ones at the end.


def test_costs_are_levelled_within_the_caps_on_sizes() -> None:
    costs, sizes = [9, 9, 1, 1], [2, 2, 2, 2]
    microbatch, count = split_microbatches(costs, [0] * 4, 1, sizes=sizes, max_size=4)
    assert count == 2
    assert microbatch[0] != microbatch[1]


def test_several_caps_hold_together() -> None:
    sizes = np.array([[4, 0], [4, 0], [0, 3], [0, 3], [1, 1]])
    microbatch, count = split_microbatches(sizes.sum(axis=1), [0] * 5, 1, sizes=sizes, max_size=[8, 4])
    assert count == 2
    for number in range(count):
        assert (sizes[microbatch == number].sum(axis=0) <= [8, 4]).all()


def test_a_sample_above_the_cap_has_its_own_or_is_an_error() -> None:
    microbatch, count = split_microbatches([50, 3, 4], [0, 0, 0], 1, max_size=10, oversize="own")
    assert count == 2
    assert microbatch[1] == microbatch[2] != microbatch[0]
    with pytest.raises(ValueError, match="sample 0 has size 50, above the cap of 10"):
        split_microbatches([50, 3, 4], [0, 0, 0], 1, max_size=10)


def test_a_given_number_is_used_or_refused() -> None:
    microbatch, count = split_microbatches([3, 3, 3, 3], [0, 0, 1, 1], 2, max_size=6, num_microbatches=2)
    assert count == 2
    assert microbatch.tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"num_microbatches=1 do not hold the samples within max_size=\[3\]: 2 do"):
        split_microbatches([3, 3, 3, 3], [0, 0, 1, 1], 2, max_size=3, num_microbatches=1)


def test_left_out_samples_and_empty_input() -> None:
    microbatch, count = split_microbatches([99, 3], [-1, 0], 2, max_size=6)
    assert (microbatch.tolist(), count) == ([-1, 0], 1)
    microbatch, count = split_microbatches([], [], 3, max_size=6)
    assert (microbatch.tolist(), count) == ([], 1)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 4))
def test_oversize_samples_are_alone(sizes: list[int], num_ranks: int) -> None:
    rank = np.arange(len(sizes)) % num_ranks
    microbatch, _ = split_microbatches(sizes, rank, num_ranks, max_size=15, oversize="own")
    for owner, number in set(zip(rank.tolist(), microbatch.tolist(), strict=True)):
        held = [size for size, r, m in zip(sizes, rank, microbatch, strict=True) if (r, m) == (owner, number)]
        assert sum(held) <= 15 or len(held) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": [0]}, r"rank must have one entry for each of the 2 costs, got shape \(1,\)"),
        ({"rank": [0, 2]}, r"rank\[1\] is 2; it must be from -1 to 1"),
        ({"rank": [0.0, 1.0]}, "rank must be integers, got dtype float64"),
        ({"sizes": [1]}, r"sizes must have one row for each of the 2 costs, got shape \(1, 1\)"),
        ({"max_size": 0}, "max_size must be at least 1, got 0"),
        ({"max_size": [5, 5]}, r"max_size must be 1 integer\(s\), one for each column of sizes, got \[5, 5\]"),
        ({"oversize": "drop"}, "oversize must be 'error' or 'own', got 'drop'"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"costs": [-1, 1]}, r"costs\[0\] is -1"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    given_arguments = {"costs": [1, 1], "rank": [0, 1], "num_ranks": 2, "max_size": 5} | arguments
    with pytest.raises(ValueError, match=message):
        split_microbatches(**given_arguments)  # type: ignore[arg-type]
