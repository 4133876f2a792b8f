"""Peers: each is the published method, whole, whether in plain Python or in numba."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.balance import peers
from orchdata.balancers import lower_bound
from orchdata.balancers.assignment import loads_of

METHODS = {
    "dealt": peers.dealt,
    "longest first": peers.longest_first,
    "first fit": peers.first_fit_decreasing,
    "differencing": peers.karmarkar_karp,
    "differencing in Python": peers.karmarkar_karp_python,
}
costs_lists = st.lists(st.integers(0, 60), max_size=40)


def makespan(costs: list[int] | NDArray[np.int64], rank: NDArray[np.int32], num_ranks: int) -> int:
    return int(loads_of(costs, rank, num_ranks).max())


@pytest.mark.parametrize("name", METHODS)
@settings(deadline=None, max_examples=40)
@given(costs=costs_lists, num_ranks=st.integers(1, 9))
def test_every_sample_that_costs_is_on_one_rank(name: str, costs: list[int], num_ranks: int) -> None:
    rank = METHODS[name](np.array(costs, np.int64), num_ranks)
    assert (rank.dtype, rank.shape) == (np.int32, (len(costs),))
    assert ((rank == -1) == (np.array(costs, np.int64) == 0)).all()
    assert rank.size == 0 or -1 <= rank.min() <= rank.max() < num_ranks
    assert makespan(costs, rank, num_ranks) >= lower_bound(np.array(costs, np.int64), num_ranks)


@given(costs=costs_lists, num_ranks=st.integers(1, 9))
def test_differencing_is_the_same_in_python_and_numba(costs: list[int], num_ranks: int) -> None:
    array = np.array(costs, np.int64)
    assert (peers.karmarkar_karp(array, num_ranks) == peers.karmarkar_karp_python(array, num_ranks)).all()


@given(rows=st.integers(1, 6), num_ranks=st.integers(1, 7), seed=st.integers(0, 99))
def test_balanced_differencing_holds_equal_counts(rows: int, num_ranks: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 30, rows * num_ranks)
    rank = peers.karmarkar_karp(costs, num_ranks, equal_count=True)
    assert (rank == peers.karmarkar_karp_python(costs, num_ranks, equal_count=True)).all()
    assert (np.bincount(rank, minlength=num_ranks) == rows).all()


def test_differencing_by_hand() -> None:
    # The textbook case: 8, 7, 6, 5, 4 on two ranks. 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: sums 16 and 14,
    # though 8 + 7 = 6 + 5 + 4 = 15 would be the best.
    costs = [8, 7, 6, 5, 4]
    rank = peers.karmarkar_karp(costs, 2)
    assert sorted(loads_of(costs, rank, 2)) == [14, 16]
    # Longest first: 8 | 7, 7+6 | 8+5, then 4 on either: 13 and 17.
    assert sorted(loads_of(costs, peers.longest_first(costs, 2), 2)) == [13, 17]


def test_first_fit_raises_its_capacity_until_all_fit() -> None:
    # The bound of 30 on two ranks is 15, and at 15 all fit: 8 + 7, and 6 + 5 + 4.
    assert makespan([8, 7, 6, 5, 4], peers.first_fit_decreasing([8, 7, 6, 5, 4], 2), 2) == 15
    # The bound of 22 is 11; there 7 + 3 and 6 + 3 leave no room for the last 3. At 12 it goes to the second.
    assert makespan([7, 6, 3, 3, 3], peers.first_fit_decreasing([7, 6, 3, 3, 3], 2), 2) == 12
