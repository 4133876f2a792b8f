"""The kernels that price micro-steps roughly, against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phases import dominant_phases, longest_first_by_phase, order_by_phase
from orchdata.native.microbatches.within_caps import bin_bound, rough_peaks

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Rows = list[tuple[int, int, int]]
rows = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 12)), max_size=24)


def arrays(given_rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Costs (num_items, 2) and sizes (num_items, 1)."""
    table = np.array(given_rows, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(table[:, :2]), np.ascontiguousarray(table[:, 2:])


def bound_twin(costs: list[int], num_ranks: int) -> int:
    """The mean, and what some rank has of the k * num_ranks + 1 largest."""
    falling = sorted(costs, reverse=True)
    several = [
        sum(falling[k * num_ranks - k : k * num_ranks + 1]) for k in range(len(falling)) if k * num_ranks < len(falling)
    ]
    return max([-(-sum(falling) // num_ranks), *several])


@given(rows, st.integers(1, 5))
def test_bounds_of_phases_equal_their_twin(given_rows: Rows, num_ranks: int) -> None:
    costs, _ = arrays(given_rows)
    assert phase_bounds(costs, num_ranks).tolist() == [bound_twin(column.tolist(), num_ranks) for column in costs.T]


@given(rows, st.integers(1, 5), st.integers(1, 4), st.integers(1, 12))
def test_rough_peaks_equal_their_twin(given_rows: Rows, num_ranks: int, num_bins: int, cap: int) -> None:
    costs, sizes = arrays(given_rows)
    bins = (np.arange(len(costs)) * 7 % num_bins).astype(np.int32)
    low = high = 0
    for number in range(num_bins):
        mine = costs[bins == number]
        alone = sizes[bins == number, 0] >= cap
        others = np.ascontiguousarray(mine[~alone])
        free = max(1, num_ranks - int(alone.sum()))
        phase = dominant_phases(others, 1)
        order = order_by_phase(others, phase, 1)
        owner = longest_first_by_phase(others, order, phase, free, max(1, len(others)), 0)
        bound = 0
        for p in range(2):
            largest = int(mine[alone, p].max(initial=0))
            bound += max(largest, bound_twin(others[:, p].tolist(), free))
            high += max(largest, int(np.bincount(owner, others[:, p], free).max()))
        assert bin_bound(mine, alone, num_ranks) == bound
        low += bound
    assert rough_peaks(costs, sizes, np.array([cap]), bins, num_bins, num_ranks, 1) == (low, high)
    assert low <= high
