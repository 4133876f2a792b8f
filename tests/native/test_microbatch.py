"""The packing kernels: what they return is legal, and no bin more than brute force needs on small cases."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.binpack import best_fit, bins_needed, by_fullness, level, search_fit
from orchdata.native.microbatch import pack_rank, rename, samples_by_rank

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

sizes_lists = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6)
CAPS = np.array([12, 10], np.int64)


def legal(sizes: NDArray[np.int64], bins: NDArray[np.int32], caps: NDArray[np.int64]) -> bool:
    """Within the caps, but for an oversize item that is alone."""
    return all((sizes[bins == b].sum(axis=0) <= caps).all() or (bins == b).sum() == 1 for b in set(bins.tolist()))


def fewest_bins_twin(sizes: NDArray[np.int64], caps: NDArray[np.int64]) -> int:
    """All ways, from one bin up."""
    for count in range(1, len(sizes) + 1):
        if any(legal(sizes, np.array(ways), caps) for ways in product(range(count), repeat=len(sizes))):
            return count
    raise AssertionError("unreachable: each item may be alone")


@settings(max_examples=60)
@given(sizes_lists)
def test_packing_needs_no_more_bins_than_brute_force(items: list[tuple[int, int]]) -> None:
    sizes = np.array(items, np.int64)
    bins = np.zeros(len(items), np.int32)
    count = next(n for n in range(1, 99) if pack_rank(sizes[:, 0].copy(), sizes, CAPS, n, bins))
    assert legal(sizes, bins, CAPS)
    assert bins.max() < count
    assert bins_needed(sizes, CAPS) <= count == fewest_bins_twin(sizes, CAPS)


def test_search_finds_what_best_fit_misses() -> None:
    sizes = np.array([[6], [5], [5], [4], [2], [2]], np.int64)  # 6+4+2 and 5+5+2
    caps, bins = np.array([12], np.int64), np.zeros(6, np.int32)
    order = by_fullness(sizes, caps)
    assert not best_fit(sizes, caps, order, 2, bins)  # 6+5 first leaves 1 free.
    assert search_fit(sizes, caps, order, 2, bins)
    assert legal(sizes, bins, caps)


@given(sizes_lists, st.lists(st.integers(0, 50), min_size=6, max_size=6))
def test_levelling_keeps_the_caps_and_lowers_the_peak(items: list[tuple[int, int]], costs: list[int]) -> None:
    sizes, work = np.array(items, np.int64), np.array(costs[: len(items)], np.int64)
    bins = np.zeros(len(items), np.int32)
    count = len(items)
    assert best_fit(sizes, CAPS, by_fullness(sizes, CAPS), count, bins)
    before = np.bincount(bins, weights=work, minlength=count).max()
    level(work, sizes, CAPS, count, bins)
    assert legal(sizes, bins, CAPS)
    assert np.bincount(bins, weights=work, minlength=count).max() <= before


def test_rename_by_first_sample_or_by_cost() -> None:
    costs = np.array([1, 9, 2, 8], np.int64)
    bins = np.array([2, 1, 2, 0], np.int32)
    rename(costs, 3, bins, False)
    assert bins.tolist() == [0, 1, 0, 2]
    rename(costs, 3, bins, True)
    assert bins.tolist() == [2, 0, 2, 1]  # 9, 8, 1+2


@given(st.lists(st.integers(-1, 4), max_size=30))
def test_samples_by_rank_keeps_their_order(ranks: list[int]) -> None:
    offsets, samples = samples_by_rank(np.array(ranks, np.int32), 5)
    for rank in range(5):
        expected = [sample for sample, owner in enumerate(ranks) if owner == rank]
        assert samples[offsets[rank] : offsets[rank + 1]].tolist() == expected
