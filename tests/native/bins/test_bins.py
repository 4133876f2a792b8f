"""The kernels that pack bins against plain-Python twins."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.bins.bounds import MOST_PARTS, bins_bound, martello_toth
from orchdata.native.bins.deal import deal, waits
from orchdata.native.bins.fill import MISSES, Items, all_left, fill_bins
from orchdata.native.bins.pack import first_fit_bins, levels, pack
from orchdata.native.bins.resplit import ANY_COST, MOVABLE, contents_of, resplit, settle
from orchdata.native.bins.spread import LEVELS, spread
from orchdata.native.sorting import descending_order

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Rows = list[tuple[int, int, int]]
rows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 500)), min_size=1, max_size=24)
CAPS = (60, 75)


def items_of(given_rows: Rows) -> Items:
    table = np.array(given_rows, np.int64)
    return Items(table[:, :2].copy(), np.array(CAPS, np.int64), table[:, 2].copy())


def descending(items: Items) -> list[int]:
    return sorted(range(len(items.costs)), key=lambda item: -items.sizes[item, 0])


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


def fill_twin(items: Items, limits: list[int], turns: list[int], tries: int) -> tuple[list[int], int]:
    left = descending(items)
    sizes = items.sizes.tolist()
    bins = [-1] * len(left)
    for turn, b in enumerate(turns):
        if not left:
            return bins, turn
        load = [0, 0]
        while True:
            best, filled, looked, missed, tried = None, -1, 0, 0, None
            for place, item in enumerate(left):
                size = sizes[item][0]
                if size > limits[0] - load[0] or size == tried:
                    continue
                if looked > tries or missed > MISSES or 2 * size <= filled:
                    break
                if load[1] + sizes[item][1] > limits[1]:
                    missed += 1
                    continue
                rest = limits[0] - load[0] - size
                second = next((sizes[other][0] for other in left[place + 1 :] if sizes[other][0] <= rest), 0)
                together = size + (second if tries else 0)
                if together > filled:
                    best, filled = item, together
                if filled == limits[0] - load[0] or tries == 0 or size == 0:
                    break
                looked, tried = looked + 1, size
            if best is None:
                break
            left.remove(best)
            bins[best] = b
            load = [load[k] + sizes[best][k] for k in range(2)]
    return bins, len(turns)


@given(rows, st.sampled_from([0, 1, 4]), st.integers(1, 26))
def test_filling_is_its_twin(given_rows: Rows, tries: int, num_bins: int) -> None:
    items = items_of(given_rows)
    items.sizes[:, 1] = np.minimum(items.sizes[:, 1], items.caps[1])
    left = all_left(np.array(descending(items), np.int32), items.sizes[:, 0])
    bins, loads = np.full(len(given_rows), -1, np.int32), np.zeros((num_bins, 2), np.int64)
    turns = np.arange(num_bins)[::-1].copy()
    used = fill_bins(items, left, items.caps, turns, tries, bins, loads)
    assert (bins.tolist(), used) == fill_twin(items, list(CAPS), turns.tolist(), tries)
    found = np.zeros_like(loads)
    np.add.at(found, bins[bins >= 0], items.sizes[bins >= 0])
    assert found.tolist() == loads.tolist()


def spread_twin(items: Items, order: list[int], keys: list[int], num_bins: int) -> list[int]:
    units = [ceil(Fraction(cap, LEVELS)) for cap in CAPS]
    loads, work, bins = [[0, 0] for _ in range(num_bins)], [0] * num_bins, [-1] * len(keys)
    for item in order:
        size = items.sizes[item].tolist()
        by_level: dict[int, list[int]] = {}
        for b in range(num_bins):
            room = [max(0, (CAPS[k] - loads[b][k]) // units[k]) for k in range(2)]
            by_level.setdefault(min(LEVELS, *room) if any(loads[b]) or work[b] else LEVELS, []).append(b)
        needed = max(min(LEVELS, ceil(Fraction(size[k], units[k]))) for k in range(2))
        tops = {level: min(held_there, key=lambda b: (work[b], b)) for level, held_there in by_level.items()}
        fitting = [
            top
            for level, top in tops.items()
            if level >= max(0, needed - 1) and all(loads[top][k] + size[k] <= CAPS[k] for k in range(2))
        ]
        b = min(fitting, key=lambda b: (work[b], b)) if fitting else tops[max(tops)]
        bins[item] = b
        work[b] += keys[item]
        loads[b] = [loads[b][k] + size[k] for k in range(2)]
    return bins


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 500)), max_size=24), st.integers(1, 6))
def test_spreading_is_its_twin(given_rows: Rows, num_bins: int) -> None:
    items = items_of(given_rows or [(1, 1, 1)])
    order = descending_order(items.costs)
    bins, loads = np.zeros(len(items.costs), np.int32), np.zeros((num_bins, 2), np.int64)
    spread(items, order, items.costs, np.zeros(num_bins, np.int64), bins, loads)
    assert bins.tolist() == spread_twin(items, order.tolist(), items.costs.tolist(), num_bins)


def state(items: Items, bins: NDArray[np.int32], num_bins: int) -> tuple[int, int]:
    """What is above the caps in all, and the largest cost."""
    loads, costs = np.zeros((num_bins, 2), np.int64), np.zeros(num_bins, np.int64)
    np.add.at(loads, bins, items.sizes)
    np.add.at(costs, bins, items.costs)
    return int(np.maximum(0, loads - items.caps).sum()), int(costs.max())


@given(rows.filter(lambda found: len(found) <= MOVABLE), st.integers(0, 2**10))
def test_two_bins_are_shared_out_the_best_way_there_is(given_rows: Rows, sides: int) -> None:
    items = items_of(given_rows)
    bins = np.array([sides >> item & 1 for item in range(len(given_rows))], np.int32)
    before = state(items, bins, 2)
    best = min(state(items, np.array(way, np.int32), 2) for way in product(range(2), repeat=len(given_rows)))
    at = contents_of(items, bins.copy(), 2)
    better, _ = resplit(items, at, 0, 1, -1, np.empty(64, np.int32))
    if not better:
        assert at.bins.tolist() == bins.tolist()
        assert best[0] == before[0] and best[1] >= before[1] - (before[1] >> 10)
        return
    assert state(items, at.bins, 2) == best < before
    again = contents_of(items, at.bins.copy(), 2)
    assert at.loads.tolist() == again.loads.tolist() and at.costs.tolist() == again.costs.tolist()


@given(rows, st.integers(1, 5))
def test_settling_only_helps(given_rows: Rows, num_bins: int) -> None:
    items = items_of(given_rows)
    bins = np.arange(len(given_rows), dtype=np.int32) % num_bins
    before = state(items, bins, num_bins)
    at = contents_of(items, bins.copy(), num_bins)
    settle(items, at, np.full(num_bins, ANY_COST), 1, 10_000)
    within = state(items, at.bins, num_bins)
    assert within[0] <= before[0]
    settle(items, at, np.full(num_bins, int(items.costs.sum()) // num_bins), 1, 10_000)
    assert state(items, at.bins, num_bins) <= within


@given(rows, st.integers(1, 6), st.integers(1, 4))
def test_a_packing_keeps_the_caps_or_says_that_it_does_not(given_rows: Rows, num_bins: int, num_ranks: int) -> None:
    items = items_of(given_rows)
    bins, found = pack(items, num_bins, num_ranks)
    if found:
        assert state(items, bins, num_bins)[0] == 0
    assert pack(items, first_fit_bins(items), num_ranks)[1]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 4))
def test_levels_are_the_least_that_hold_all_costs(costs: list[int], num_bins: int, num_ranks: int) -> None:
    descending_costs = sorted(costs, reverse=True)
    found = levels(np.array(descending_costs, np.int64), num_bins, num_ranks).tolist()
    steps = -(-num_bins // num_ranks)
    leaders = [descending_costs[place] for place in range(0, len(costs), num_ranks)][:steps]
    leaders += [0] * (steps - len(leaders))
    assert found == sorted(found, reverse=True) and len(found) == steps
    assert all(level >= leader for level, leader in zip(found, leaders, strict=True))
    assert num_ranks * sum(found) >= sum(costs)
    assert sum(found) < max(sum(leaders), -(-sum(costs) // num_ranks)) + steps


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
