"""The padded kernels against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.padded import (
    aligned_costs,
    earliest_ends,
    fill,
    level,
    smallest_capacity,
    smallest_limit,
    solve_padded,
)

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

cost_lists = st.lists(st.integers(1, 60), min_size=1, max_size=24)
ranks = st.integers(1, 6)


def descending(costs: list[int]) -> NDArray[np.int64]:
    return np.array(sorted(costs, reverse=True), np.int64)


def fill_twin(costs: list[int], num_ranks: int, capacity: int, limit: int) -> list[int]:
    """How many of the sorted costs each rank takes."""
    counts: list[int] = []
    for _ in range(num_ranks):
        left = costs[sum(counts) :]
        counts.append(min(limit, capacity // left[0], len(left)) if left else 0)
    return counts


def capacity_twin(costs: list[int], num_ranks: int, limit: int) -> int:
    """All products of a count and a cost, from the smallest that holds the longest."""
    candidates = sorted({count * cost for count in range(1, len(costs) + 1) for cost in costs})
    return next(
        capacity
        for capacity in candidates
        if capacity >= costs[0] and sum(fill_twin(costs, num_ranks, capacity, limit)) == len(costs)
    )


def limit_twin(costs: list[int], num_ranks: int, capacity: int) -> int:
    return next(n for n in range(1, 99) if sum(fill_twin(costs, num_ranks, capacity, n)) == len(costs))


def level_twin(costs: list[int], num_ranks: int, capacity: int, limit: int) -> list[int]:
    """Counts of each rank: nearest to the mean of what is left, of those from which the others can go on."""
    counts: list[int] = []
    for rank in range(num_ranks):
        left, others = costs[sum(counts) :], num_ranks - rank - 1
        if not left:
            counts.append(0)
            continue
        most = min(limit, capacity // left[0], max(1, len(left) - others))
        possible = [
            count
            for count in range(1, most + 1)
            if sum(fill_twin(left[count:], others, capacity, limit)) == len(left) - count
        ]
        nearest = (sum(left) // (others + 1) + left[0] // 2) // left[0]
        counts.append(min(max(nearest, possible[0]), possible[-1]))
    return counts


def rules(costs: list[int], num_ranks: int, spare: int) -> tuple[list[int], int]:
    """Sorted costs and a limit on counts that can hold."""
    return sorted(costs, reverse=True), -(-len(costs) // num_ranks) + spare


@given(cost_lists, ranks, st.integers(0, 9), st.integers(60, 400))
def test_fill_equals_its_twin(costs: list[int], num_ranks: int, spare: int, capacity: int) -> None:
    costs, limit = rules(costs, num_ranks, spare)
    counts = fill_twin(costs, num_ranks, capacity, limit)
    taken, peak, following = fill(descending(costs), num_ranks, capacity, limit)
    starts = np.cumsum([0, *counts])[:-1]
    assert taken == sum(counts)
    assert peak == max(count * costs[start] for count, start in zip(counts, starts, strict=True) if count)
    if taken < len(costs):
        assert following > capacity
        assert fill_twin(costs, num_ranks, following - 1, limit) == counts
        assert fill_twin(costs, num_ranks, following, limit) != counts


@given(cost_lists, ranks, st.integers(0, 9))
def test_the_capacity_and_then_the_limit_are_the_smallest(costs: list[int], num_ranks: int, spare: int) -> None:
    costs, limit = rules(costs, num_ranks, spare)
    capacity = smallest_capacity(descending(costs), num_ranks, limit)
    assert capacity == capacity_twin(costs, num_ranks, limit)
    assert smallest_limit(descending(costs), num_ranks, capacity, limit) == limit_twin(costs, num_ranks, capacity)


@given(cost_lists, ranks, st.integers(0, 9), st.integers(0, 100))
def test_level_equals_its_twin(costs: list[int], num_ranks: int, spare: int, slack: int) -> None:
    costs, limit = rules(costs, num_ranks, spare)
    capacity = capacity_twin(costs, num_ranks, limit) + slack
    ends = level(descending(costs), num_ranks, capacity, limit)
    assert np.diff(ends).tolist() == level_twin(costs, num_ranks, capacity, limit)
    assert (ends[0], ends[-1]) == (0, len(costs))
    assert earliest_ends(descending(costs), num_ranks, capacity, limit)[0] == 0


@given(st.lists(st.integers(0, 99), max_size=24), ranks, st.sampled_from([1, 8, 64]))
def test_solve_gives_consecutive_groups_of_the_aligned_lengths(
    lengths: list[int], num_ranks: int, multiple_of: int
) -> None:
    array = np.array(lengths, np.int64)
    coefficients = (3 << 20, 1 << 18, 5 << 20, np.array([[4, 2 << 20]]))  # 3*l + l*l/4 + 5 + 2*l*min(l, 4)
    rank, loads = solve_padded(array, num_ranks, 99, multiple_of, coefficients)
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    costs = aligned_costs(array, np.array(order, np.int32), multiple_of, coefficients)
    aligned = [-(-lengths[i] // multiple_of) * multiple_of for i in order]
    assert costs.tolist() == [3 * length + length * length // 4 + 5 + 2 * length * min(length, 4) for length in aligned]
    assert [rank[i] for i in order] == sorted(rank[i] for i in order)
    assert [r == -1 for r in rank] == [length == 0 for length in lengths]
    for holder in range(num_ranks):
        held = [cost for cost, i in zip(costs, order, strict=True) if rank[i] == holder]
        assert loads[holder] == len(held) * max(held, default=0)
