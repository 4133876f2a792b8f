"""The packed kernels against plain-Python twins."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.bounds import equal_count_bound, strong_lower_bound
from orchdata.native.sorting import descending_order

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

cost_lists = st.lists(st.integers(1, 60), max_size=40)
large_lists = st.lists(st.integers(0, 2**50), max_size=60)


def descending(costs: list[int]) -> NDArray[np.int64]:
    return np.array(sorted(costs, reverse=True), np.int64)


def lower_bound_twin(costs: list[int], num_ranks: int) -> int:
    bound = -(-sum(costs) // num_ranks)
    for k in range(len(costs)):
        largest = sorted(costs, reverse=True)[: k * num_ranks + 1]
        if len(largest) == k * num_ranks + 1:
            bound = max(bound, sum(sorted(largest)[: k + 1]))
    return bound


@given(large_lists)
def test_descending_order_is_a_stable_sort(costs: list[int]) -> None:
    order = descending_order(np.array(costs, np.int64))
    assert order.tolist() == sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def test_descending_order_of_a_large_batch() -> None:
    costs = np.random.default_rng(0).integers(0, 2**61, 10_000)  # Above 4,096 the digits are wider.
    assert np.array_equal(descending_order(costs), np.argsort(-costs, kind="stable"))


@given(cost_lists, st.integers(1, 9))
def test_lower_bound_equals_its_twin(costs: list[int], num_ranks: int) -> None:
    assert strong_lower_bound(descending(costs), num_ranks) == lower_bound_twin(costs, num_ranks)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 4))
def test_no_assignment_of_equal_counts_is_below_its_bound(costs: list[int], num_ranks: int) -> None:
    fewest, extras = divmod(len(costs), num_ranks)
    best = sum(costs)
    for ways in product(range(num_ranks), repeat=len(costs)):
        counts = sorted(ways.count(rank) for rank in range(num_ranks))
        if counts == [fewest] * (num_ranks - extras) + [fewest + 1] * extras:
            best = min(best, max(sum(c for c, w in zip(costs, ways, strict=True) if w == r) for r in range(num_ranks)))
    assert equal_count_bound(descending(costs), num_ranks) <= best


def test_equal_count_bound_counts_what_the_giants_must_take() -> None:
    # Two giants need four companions between them, and only three samples are small: (90 + 90 + 1 + 1 + 1 + 20) / 2.
    assert equal_count_bound(descending([90, 90, 20, 20, 20, 1, 1, 1, 20]), 3) == 102
