"""The kernels that pack bins against plain-Python twins."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.native.fill_bins import MOST_PARTS, bins_bound, deal, martello_toth, waits

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


def l2_twin(sizes: list[int], capacity: int) -> int:
    """By its definition, with each threshold up to half of the capacity."""
    bound = 0
    for threshold in {0, *[size for size in sizes if 2 * size <= capacity]}:
        alone = [size for size in sizes if size > capacity - threshold]
        large = [size for size in sizes if 2 * size > capacity and size <= capacity - threshold]
        small = [size for size in sizes if 2 * size <= capacity and size >= threshold]
        rest = sum(small) - (len(large) * capacity - sum(large))
        bound = max(bound, len(alone) + len(large) + max(0, ceil(Fraction(rest, capacity))))
    return bound


def dual_twin(sizes: list[int], capacity: int) -> int:
    by_parts = (
        ceil(sum(Fraction(max(0, ceil(Fraction((k + 1) * size, capacity)) - 1), k) for size in sizes))
        for k in range(1, MOST_PARTS + 1)
    )
    return max(by_parts)


def fewest_twin(sizes: list[int], capacity: int) -> int:
    """The optimum, by trying everything."""
    best = len(sizes)

    def place(item: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if item == len(sizes):
            best = len(loads)
            return
        for b in range(len(loads)):
            if loads[b] + sizes[item] <= capacity:
                place(item + 1, [*loads[:b], loads[b] + sizes[item], *loads[b + 1 :]])
        place(item + 1, [*loads, sizes[item]])

    place(0, [])
    return best


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(50, 120))
def test_bounds_are_their_definitions(sizes: list[int], capacity: int) -> None:
    column = np.array(sorted(sizes, reverse=True), np.int64)
    assert martello_toth(column, capacity) == l2_twin(sizes, capacity)
    assert bins_bound(column, capacity) == max(l2_twin(sizes, capacity), dual_twin(sizes, capacity))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 40))
def test_no_packing_needs_fewer_than_the_bound(sizes: list[int], capacity: int) -> None:
    column = np.array(sorted(sizes, reverse=True), np.int64)
    assert bins_bound(column, capacity) <= fewest_twin(sizes, capacity)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=12), st.integers(1, 4))
def test_dealing_waits_no_longer_than_sorting(loads: list[tuple[int, int]], num_ranks: int) -> None:
    costs = np.array(loads, np.int64)
    order = deal(costs, num_ranks)
    assert sorted(order.tolist()) == list(range(len(loads)))
    sums = np.argsort(-costs.sum(axis=1), kind="stable")
    assert waits(costs, order, num_ranks) <= waits(costs, sums, num_ranks)
    one = costs[:, :1].copy()
    assert one[deal(one, num_ranks), 0].tolist() == sorted(one[:, 0].tolist(), reverse=True)


@pytest.mark.parametrize("phases", [1, 2])
def test_dealing_waits_what_the_best_order_does(phases: int) -> None:
    for seed in range(20):
        costs = np.random.default_rng(seed).integers(0, 50, (6, phases))
        best = min(waits(costs, np.array(order), 2) for order in permutations(range(6)))
        found = waits(costs, deal(costs, 2), 2)
        assert found == best if phases == 1 else found <= best * 1.2
