"""The placement kernels against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.placement import place_greedily, swap_bins

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


@st.composite
def problems(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values (num_items, num_bins), and a capacity for each bin that holds all items together."""
    capacity = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    num_items = sum(capacity)
    row = st.lists(st.integers(0, 9), min_size=len(capacity), max_size=len(capacity))
    values = draw(st.lists(row, min_size=num_items, max_size=num_items))
    return np.array(values, np.int64), np.array(capacity, np.int64)


def greedy_twin(values: list[list[int]], capacity: list[int]) -> list[int]:
    room, bins = capacity.copy(), [-1] * len(values)
    pairs = [(-value, item, chosen) for item, row in enumerate(values) for chosen, value in enumerate(row)]
    for _, item, chosen in sorted(pairs):
        if bins[item] < 0 and room[chosen]:
            bins[item] = chosen
            room[chosen] -= 1
    return bins


def swap_twin(values: list[list[int]], bins: list[int], max_passes: int) -> list[int]:
    bins = bins.copy()
    for _ in range(max_passes):
        before = bins.copy()
        for item in range(len(bins)):
            gains = [
                values[item][bins[k]] - values[item][bins[item]] + values[k][bins[item]] - values[k][bins[k]]
                for k in range(len(bins))
            ]
            if max(gains) > 0:
                partner = gains.index(max(gains))
                bins[item], bins[partner] = bins[partner], bins[item]
        if bins == before:
            break
    return bins


@given(problems())
def test_greedy_equals_its_twin(problem: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
    values, capacity = problem
    assert place_greedily(values, capacity).tolist() == greedy_twin(values.tolist(), capacity.tolist())


@given(problems(), st.integers(0, 3))
def test_swaps_equal_their_twin_and_keep_the_books(
    problem: tuple[NDArray[np.int64], NDArray[np.int64]], max_passes: int
) -> None:
    values, capacity = problem
    bins = np.repeat(np.arange(len(capacity), dtype=np.int32), capacity)
    start = bins.copy()
    gained = swap_bins(values, bins, max_passes)
    items = np.arange(len(bins))
    assert bins.tolist() == swap_twin(values.tolist(), start.tolist(), max_passes)
    assert np.bincount(bins, minlength=len(capacity)).tolist() == capacity.tolist()
    assert gained == values[items, bins].sum() - values[items, start].sum()


def test_a_greedy_choice_is_mended_by_a_swap() -> None:
    # Taking 9 leaves item 1 with 0; the two together are better off the other way round: 8 + 8.
    values = np.array([[9, 8], [8, 0]], np.int64)
    bins = place_greedily(values, np.array([1, 1], np.int64))
    assert bins.tolist() == [0, 1]
    assert swap_bins(values, bins, 5) == 7
    assert bins.tolist() == [1, 0]
