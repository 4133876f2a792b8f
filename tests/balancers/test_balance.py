"""Packed balancing: every sample once, caps hold, near the bound, the same everywhere, clear errors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS
from orchdata.balancers import Assignment, balance, balance_from, lower_bound

cost_lists = st.lists(st.integers(0, 1000), max_size=60)


def check_books(costs: list[int], num_ranks: int, found: Assignment) -> None:
    """Each sample that costs anything is on one rank, and the loads are what they say."""
    assert found.rank.dtype == np.int32
    assert found.loads.dtype == np.int64
    assert [r == -1 for r in found.rank] == [c == 0 for c in costs]
    loads = [sum(c for c, r in zip(costs, found.rank, strict=True) if r == rank) for rank in range(num_ranks)]
    assert found.loads.tolist() == loads
    assert found.makespan == max(loads)
    assert found.makespan >= found.lower_bound
    assert found.imbalance == pytest.approx(max(loads) * num_ranks / sum(loads) if sum(loads) else 1.0)


@given(cost_lists, st.integers(1, 12))
def test_every_sample_once_and_not_below_the_bound(costs: list[int], num_ranks: int) -> None:
    found = balance(costs, num_ranks)
    check_books(costs, num_ranks, found)
    assert found.lower_bound == lower_bound(costs, num_ranks)


def lower_bound_twin(costs: list[int], num_ranks: int) -> int:
    """The mean, and what some rank has of the k * num_ranks + 1 largest."""
    falling = sorted(costs, reverse=True)
    cut = range(0, len(falling), num_ranks)
    several = [sum(falling[at - at // num_ranks : at + 1]) for at in cut]
    return max([-(-sum(costs) // num_ranks), *several])


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 9))
def test_lower_bound_equals_its_twin(costs: list[int], num_ranks: int) -> None:
    assert lower_bound(costs, num_ranks) == lower_bound_twin(costs, num_ranks)


@given(cost_lists, st.integers(1, 12), st.integers(0, 5))
def test_counts_are_equal_or_within_their_limit(costs: list[int], num_ranks: int, spare: int) -> None:
    cap = max(1, -(-sum(cost > 0 for cost in costs) // num_ranks) + spare)
    for options in ({"equal_count": True}, {"max_samples": cap}):
        found = balance(costs, num_ranks, **options)
        check_books(costs, num_ranks, found)
        counts = np.bincount(found.rank[found.rank >= 0], minlength=num_ranks)
        assert counts.max() <= cap if "max_samples" in options else np.ptp(counts) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_small_cases_are_close_to_the_optimum(costs: list[int], num_ranks: int) -> None:
    best = min(
        max(sum(c for c, w in zip(costs, ways, strict=True) if w == rank) for rank in range(num_ranks))
        for ways in product(range(num_ranks), repeat=len(costs))
    )
    found = balance(costs, num_ranks, tolerance=0)
    assert found.lower_bound <= best <= found.makespan
    assert found.makespan <= best * 1.15 + 1  # MULTIFIT alone promises 13/11.


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8), st.randoms(use_true_random=False))
def test_permuting_the_samples_leaves_the_makespan(costs: list[int], num_ranks: int, random: object) -> None:
    shuffled = costs.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert balance(costs, num_ranks).makespan == balance(shuffled, num_ranks).makespan
    once, again = balance(costs, num_ranks, equal_count=True), balance(shuffled, num_ranks, equal_count=True)
    assert once.makespan == again.makespan


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("num_ranks", "limit"), [(256, 1.003), (64, 1.008), (8, 1.015)])
def test_reaches_the_bound_on_every_distribution(name: str, num_ranks: int, limit: float) -> None:
    costs = DISTRIBUTIONS[name](np.random.default_rng(7), num_ranks * 16)
    found = balance(costs, num_ranks)
    assert found.makespan <= found.lower_bound * limit
    rank = np.where(costs > 0, np.arange(len(costs)) % num_ranks, -1)
    assert found.makespan <= np.bincount(rank[rank >= 0], weights=costs[rank >= 0]).max()


def test_ties_go_to_the_lowest_load_then_count_then_rank() -> None:
    assert balance([5, 5, 5, 5], 2).rank.tolist() == [0, 1, 0, 1]
    # 4 and 2+2 tie in load; rank 0 holds fewer samples, so the last one is its.
    assert balance([4, 2, 2, 1], 2).rank.tolist() == [0, 1, 1, 0]


def test_limits_beyond_any_load_do_not_bind() -> None:
    free = balance([3, 2, 2], 2).rank.tolist()
    assert balance([3, 2, 2], 2, max_samples=2**70, max_cost=2**70).rank.tolist() == free
    assert balance_from([3, 2, 2], [0, 0, 0], 2, ranks_per_node=2**40).loads.tolist() == [4, 3]


def test_other_integer_inputs_give_the_same() -> None:
    costs = np.arange(1, 40, dtype=np.int64)
    expected = balance(costs, 4).rank.tolist()
    assert balance(costs.astype(np.int32), 4).rank.tolist() == expected
    assert balance(costs.astype(np.uint64), 4).rank.tolist() == expected
    assert balance(costs.astype(np.float32), 4).rank.tolist() == expected
    assert balance(np.repeat(costs, 2)[::2], 4).rank.tolist() == expected  # Not contiguous.
    assert balance(costs.tolist(), 4).rank.tolist() == expected


def test_one_rank_and_many_ranks_are_bounded_quickly() -> None:
    # One group of all samples for every k: with sums computed again this would be 20 billion additions.
    costs = np.arange(1, 200_001)
    assert lower_bound(costs, 1) == costs.sum()
    coarse = 10**6 * np.random.default_rng(0).integers(1, 50, 20_000) + 1
    found = balance(coarse, 5_000)
    assert found.makespan >= found.lower_bound


def test_costs_up_to_the_limit_do_not_overflow() -> None:
    found = balance([2**61, 2**60, 2**60], 2)
    assert found.loads.tolist() == [2**61, 2**61]


@pytest.mark.parametrize(
    ("costs", "num_ranks", "options", "message"),
    [
        ([1, -2], 2, {}, r"costs\[1\] is -2; it must be at least 0"),
        ([1.0, float("nan")], 2, {}, r"costs\[1\] is nan; it must be a whole number"),
        ([1.0, 1e300], 2, {}, r"costs\[1\] is 1e\+300"),
        ([2**62, 1], 2, {}, r"sum to more than 2\*\*62 at sample 1"),
        (["a"], 2, {}, "costs must be integers, got dtype"),
        ([1], 0, {}, "num_ranks must be at least 1, got 0"),
        ([1, 1, 1], 2, {"max_samples": 1}, "2 ranks allows 2 samples, but there are 3: raise it to at least 2"),
        (
            [3, 3, 3],
            2,
            {"max_cost": 4},
            "no assignment within max_cost=4 was found: the best has 6, and none is below 6",
        ),
    ],
)
def test_errors_name_value_and_limit(costs: object, num_ranks: object, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(costs, num_ranks, **options)  # type: ignore[arg-type]


def test_max_cost_is_met_where_the_tolerance_alone_would_stop_early() -> None:
    costs = DISTRIBUTIONS["speech"](np.random.default_rng(0), 128)
    bound = lower_bound(costs, 8)
    assert balance(costs, 8, tolerance=0.1).makespan > bound * 1.001
    assert balance(costs, 8, tolerance=0.1, max_cost=bound + bound // 1000).makespan <= bound + bound // 1000
