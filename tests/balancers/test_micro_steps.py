"""Micro-steps: every item in one, within the caps of each rank; large items of a phase together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.balancers.bins import Packing, candidate_packings

items = st.lists(st.tuples(*[st.integers(0, 90)] * 4), min_size=1, max_size=40)


def packings(
    sizes: NDArray[np.int64], caps: NDArray[np.int64], num_bins: int, costs: NDArray[np.int64], num_ranks: int
) -> list[Packing]:
    return list(candidate_packings(sizes, caps, num_bins, costs, [(slice(None), num_ranks)], 18))


@given(items, st.integers(1, 6), st.integers(1, 4), st.integers(0, 120), st.integers(0, 200))
def test_caps_are_kept(rows: list[tuple[int, ...]], num_bins: int, num_ranks: int, spare: int, other: int) -> None:
    table = np.array(rows, np.int64)
    costs, sizes = table[:, :2].copy(), table[:, 2:].copy()
    caps = np.maximum(1, -(-sizes.sum(axis=0) // (num_bins * num_ranks)) + (spare, other))
    found = packings(sizes, caps, num_bins, costs, num_ranks)
    if (caps >= 2 * sizes.max(axis=0) + sizes.sum(axis=0) // num_bins).all():
        assert found
    for packing in found:
        assert packing.bins.dtype == packing.rank.dtype == np.int32
        loads = np.zeros((num_bins, num_ranks, 2), np.int64)
        np.add.at(loads, (packing.bins, packing.rank), sizes)
        assert (loads <= caps).all()


@pytest.mark.parametrize("seed", range(3))
def test_items_that_differ_are_packed_the_same_in_any_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = random.choice(100_000, (60, 2), replace=False)
    sizes, caps, order = random.integers(1, 1000, (60, 1)), np.array([1_500]), random.permutation(60)
    found, again = packings(sizes, caps, 8, costs, 4), packings(sizes[order], caps, 8, costs[order], 4)
    assert found
    assert [each.bins[order].tolist() for each in found] == [each.bins.tolist() for each in again]


def test_large_items_of_a_phase_share_a_micro_step() -> None:
    """Two ranks wait once for the images then, in place of twice."""
    costs = np.stack([[90, 0, 0, 0, 90, 0, 0, 0], [10] * 8], axis=1)
    best = min(packings(np.ones((8, 1), np.int64), np.array([2]), 2, costs, 2), key=lambda each: each.estimate)
    assert best.bins[0] == best.bins[4]
