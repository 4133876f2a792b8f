"""The packed kernels against plain-Python twins."""

from __future__ import annotations

from itertools import product
from math import gcd

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.bounds import common_divisor, equal_count_bound, strong_lower_bound
from orchdata.native.assign.multifit import first_fit, multifit
from orchdata.native.assign.packed import longest_first, recount
from orchdata.native.assign.ranking import ranks_by_load
from orchdata.native.assign.refine import best_exchange, lower_makespan, refine
from orchdata.native.sorting import descending_order, present_descending

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

cost_lists = st.lists(st.integers(1, 60), max_size=40)
large_lists = st.lists(st.integers(0, 2**50), max_size=60)


def descending(costs: list[int]) -> NDArray[np.int64]:
    return np.array(sorted(costs, reverse=True), np.int64)


def longest_first_twin(costs: list[int], num_ranks: int, limit: int, extras: int) -> list[int]:
    """LPT by a linear scan: least load, then count, then rank."""
    loads, counts, owner = [0] * num_ranks, [0] * num_ranks, []
    for cost in costs:
        open_ranks = [r for r in range(num_ranks) if counts[r] < limit or (counts[r] == limit and extras > 0)]
        rank = min(open_ranks, key=lambda r: (loads[r], counts[r], r))
        extras -= counts[rank] == limit
        loads[rank] += cost
        counts[rank] += 1
        owner.append(rank)
    return owner


def first_fit_twin(costs: list[int], num_ranks: int, capacity: int, limit: int) -> list[int] | None:
    loads, counts, owner = [0] * num_ranks, [0] * num_ranks, []
    for cost in costs:
        rank = next((r for r in range(num_ranks) if loads[r] + cost <= capacity and counts[r] < limit), None)
        if rank is None:
            return None
        loads[rank] += cost
        counts[rank] += 1
        owner.append(rank)
    return owner


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


@given(st.lists(st.integers(0, 3), max_size=30))
def test_only_samples_that_cost_anything_are_present(costs: list[int]) -> None:
    order, sorted_costs = present_descending(np.array(costs, np.int64))
    assert order.tolist() == sorted((i for i in range(len(costs)) if costs[i]), key=lambda i: (-costs[i], i))
    assert sorted_costs.tolist() == [costs[i] for i in order]


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


@given(cost_lists)
def test_common_divisor(costs: list[int]) -> None:
    assert common_divisor(descending(costs)) == gcd(*costs)


@given(cost_lists, st.integers(1, 9), st.sampled_from(["free", "equal", "capped"]))
def test_longest_first_equals_its_twin(costs: list[int], num_ranks: int, rule: str) -> None:
    limit, extras = {
        "free": (len(costs), 0),
        "equal": divmod(len(costs), num_ranks),
        "capped": (-(-len(costs) // num_ranks), 0),
    }[rule]
    loads, counts = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int32)
    owner = longest_first(descending(costs), limit, extras, loads, counts)
    assert owner.tolist() == longest_first_twin(sorted(costs, reverse=True), num_ranks, limit, extras)
    assert counts.tolist() == np.bincount(owner, minlength=num_ranks).tolist()
    assert loads.tolist() == [
        sum(c for c, r in zip(descending(costs), owner, strict=True) if r == rank) for rank in range(num_ranks)
    ]


@given(cost_lists, st.integers(1, 9), st.integers(1, 200), st.integers(1, 10))
def test_first_fit_equals_its_twin(costs: list[int], num_ranks: int, capacity: int, limit: int) -> None:
    owner = np.empty(len(costs), np.int32)
    twin = first_fit_twin(sorted(costs, reverse=True), num_ranks, capacity, limit)
    assert first_fit(descending(costs), num_ranks, capacity, limit, owner) == (twin is not None)
    if twin is not None:
        assert owner.tolist() == twin


def test_multifit_packs_what_longest_first_cannot() -> None:
    costs = descending([3, 3, 2, 2, 2])
    loads, counts = np.empty(2, np.int64), np.empty(2, np.int32)
    longest_first(costs, 5, 0, loads, counts)
    assert loads.max() == 7  # 3+2+2 and 3+2
    owner = multifit(costs, 2, 6, 7, 5, 8)
    recount(costs, owner, loads, counts)
    assert loads.tolist() == [6, 6]  # 3+3 and 2+2+2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 9))
def test_ranks_by_load_splits_and_sorts(loads: list[int], threshold: int) -> None:
    array = np.array(loads, np.int64)
    heavy, light = ranks_by_load(array, threshold, True), ranks_by_load(array, threshold, False)
    assert sorted([*heavy, *light]) == list(range(len(loads)))
    assert heavy.tolist() == sorted(
        (r for r in range(len(loads)) if loads[r] > threshold), key=lambda r: (-loads[r], r)
    )
    assert [loads[r] for r in light] == sorted(load for load in loads if load <= threshold)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=24), st.integers(1, 23), st.booleans())
def test_best_exchange_equals_all_pairs(costs: list[int], split: int, may_move: bool) -> None:
    sorted_costs = descending(costs)
    generator = np.random.default_rng(split)
    side = generator.random(len(costs)) < 0.5
    heavy, light = np.flatnonzero(side).astype(np.int32), np.flatnonzero(~side).astype(np.int32)
    gap = int(sorted_costs[heavy].sum() - sorted_costs[light].sum())
    if gap < 0:
        heavy, light, gap = light, heavy, -gap
    gain, index, other = best_exchange(sorted_costs, heavy, light, gap, may_move)
    differences = [int(sorted_costs[a] - sorted_costs[b]) for a in heavy for b in light]
    differences += [int(sorted_costs[a]) for a in heavy] if may_move else []
    assert gain == max([0, *(min(d, gap - d) for d in differences)])
    if gain > 0:
        difference = sorted_costs[heavy[index]] - (sorted_costs[light[other]] if other >= 0 else 0)
        assert gain == min(difference, gap - difference)


@given(cost_lists, st.integers(1, 9), st.booleans())
def test_refinement_keeps_the_books_and_never_makes_it_worse(
    costs: list[int], num_ranks: int, swaps_only: bool
) -> None:
    sorted_costs = descending(costs)
    owner = (np.arange(len(costs)) * 7 // 3 % num_ranks).astype(np.int32)
    loads, counts = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int32)
    recount(sorted_costs, owner, loads, counts)
    before, counts_before = loads.max(), counts.copy()
    bound, limit = strong_lower_bound(sorted_costs, num_ranks), -1 if swaps_only else 99
    assert refine(sorted_costs, owner, loads, counts, bound, limit, 2, 100) <= 100
    assert loads.max() <= before
    before = loads.max()
    lower_makespan(sorted_costs, owner, loads, counts, bound, limit, 10_000)
    true_loads, true_counts = np.empty_like(loads), np.empty_like(counts)
    recount(sorted_costs, owner, true_loads, true_counts)
    assert loads.tolist() == true_loads.tolist()
    assert counts.tolist() == true_counts.tolist()
    assert loads.max() <= before
    if swaps_only:
        assert counts.tolist() == counts_before.tolist()
