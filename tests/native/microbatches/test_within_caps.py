"""The kernels that balance a micro-step within caps, against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.microbatches.within_caps import (
    fits_alone,
    looked_peaks,
    solve_within,
)

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Rows = list[tuple[int, int, int]]
rows = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=24)


def arrays(given_rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Costs (num_items, 2) and sizes (num_items, 1)."""
    table = np.array(given_rows, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(table[:, :2]), np.ascontiguousarray(table[:, 2:])


GIVEN_IS_BEST: Rows = [(0, 19, 7), (0, 21, 9), (7, 8, 5), (9, 9, 7), (9, 9, 7), (9, 9, 2), (2, 1, 6)]


@given(rows, st.integers(1, 6), st.integers(0, 20))
def test_what_keeps_the_caps_is_never_given_up_nor_made_worse(given_rows: Rows, num_ranks: int, more: int) -> None:
    costs, sizes = arrays(given_rows)
    within = np.zeros(len(costs), np.int32)
    held = np.zeros(num_ranks, np.int64)
    for item in np.argsort(-sizes[:, 0], kind="stable"):
        within[item] = held.argmin()
        held[within[item]] += sizes[item, 0]
    caps, span = np.array([int(held.max()) + more]), np.array([0, len(costs)])
    rank = solve_within(costs, sizes, caps, within, within, span, np.array([num_ranks]), 1, 1000, 64.0)
    assert above_caps(sizes, caps, rank, num_ranks) == 0
    assert sum_of_peaks(costs, rank, num_ranks) <= sum_of_peaks(costs, within, num_ranks)


def full_ranks(seed: int, num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], int]:
    """Costs, sizes and ranks of samples that fill all ranks to 95 %, large and small ones; and the cap."""
    random, cap = np.random.default_rng(seed), 4096
    sizes: list[int] = []
    within: list[int] = []
    for rank in range(num_ranks):
        left = cap * 95 // 100
        while left > 0:
            sizes.append(min(left, int(random.pareto(1.2) * 200) + 100))
            within.append(rank)
            left -= sizes[-1]
    size = np.array(sizes, np.int64)
    image = np.where(random.random(len(size)) < 0.4, random.integers(100, 3000, len(size)), 0)
    costs = np.stack([image, 4 * size + size * size // 4000], axis=1).astype(np.int64)
    return costs, size[:, None].copy(), np.array(within, np.int32), cap


def test_ranks_that_are_nearly_full_come_close_to_the_bounds() -> None:
    """Brought within the caps afterwards they do not: then only what was given keeps them."""
    for seed in range(3):
        costs, sizes, within, cap = full_ranks(seed, 64)
        caps, span = np.array([cap]), np.array([0, len(costs)])
        rank = solve_within(costs, sizes, caps, within, within, span, np.array([64]), 1, 1000, 96.0)
        bound = int(phase_bounds(costs, 64).sum())
        assert above_caps(sizes, caps, rank, 64) == 0
        assert sum_of_peaks(costs, rank, 64) <= 1.25 * bound < 1.3 * bound < sum_of_peaks(costs, within, 64)


@given(rows, st.integers(1, 3), st.integers(2, 5))
@example(GIVEN_IS_BEST, 1, 5)
def test_a_look_at_bins_is_between_their_bounds_and_what_they_are(
    given_rows: Rows, num_bins: int, num_ranks: int
) -> None:
    costs, sizes = arrays(given_rows)
    bins = (np.arange(len(costs)) % num_bins).astype(np.int32)
    rank, most = np.zeros(len(costs), np.int32), 0
    for number in range(num_bins):
        held = np.zeros(num_ranks, np.int64)
        for item in np.flatnonzero(bins == number):
            rank[item] = held.argmin()
            held[rank[item]] += sizes[item, 0]
        most = max(most, int(held.max()))
    caps = np.array([most])
    low, high, some_alone = 0, 0, False
    for number in range(num_bins):
        mine = costs[bins == number]
        alone = fits_alone(sizes[bins == number], caps)
        for p in range(2):
            low += max(int(mine[:, p].max(initial=0)), -(-int(mine[:, p].sum()) // num_ranks))
            high += int(np.bincount(rank[bins == number], mine[:, p], num_ranks).max())
        some_alone |= bool(alone.any())
    looked = looked_peaks(costs, costs, sizes, caps, bins, rank, num_bins, num_ranks, 64.0)
    assert low <= looked
    assert looked <= high or some_alone  # The peaks of others may then count or not.
