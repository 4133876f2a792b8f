"""The resplitting kernels against plain-Python twins."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.native.assign.packed import recount
from orchdata.native.assign.resplit import best_split, merged, resplit

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.integers(0, 4), st.integers(0, 9))
def test_best_split_equals_all_splits(costs: list[int], fewest: int, spare: int) -> None:
    descending = np.array(sorted(costs, reverse=True), np.int64)
    fewest = min(fewest, len(costs))
    most = min(len(costs), fewest + spare)
    peak, bits = best_split(descending, np.arange(len(costs), dtype=np.int32), fewest, most)
    sizes = range(fewest, most + 1)
    halves = [sum(half) for size in sizes for half in combinations(costs, size)]
    assert peak == min(max(half, sum(costs) - half) for half in halves)
    chosen = [index for index in range(len(costs)) if bits >> index & 1]
    assert fewest <= len(chosen) <= most
    half = int(descending[chosen].sum())
    assert peak == max(half, sum(costs) - half)


@given(st.sets(st.integers(0, 50)), st.sets(st.integers(51, 99)), st.sampled_from([1, 7, 13]))
def test_merged_is_sorted(first: set[int], second: set[int], step: int) -> None:
    together = [(place * step) % 101 for place in sorted(first | second)]
    half = len(first)
    one, other = sorted(together[:half]), sorted(together[half:])
    assert merged(np.array(one, np.int32), np.array(other, np.int32)).tolist() == sorted(together)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=24),
    st.integers(2, 6),
    st.sampled_from(["free", "capped", "as they are"]),
)
def test_resplitting_keeps_the_books_and_never_makes_it_worse(costs: list[int], num_ranks: int, counted: str) -> None:
    descending = np.array(sorted(costs, reverse=True), np.int64)
    owner = (np.arange(len(costs)) % num_ranks).astype(np.int32)
    loads, counts = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int32)
    recount(descending, owner, loads, counts)
    before, counts_before = loads.max(), counts.copy()
    limit = {"free": len(costs), "capped": int(counts.max()), "as they are": -1}[counted]
    target = -(-sum(costs) // num_ranks)
    resplit(descending, owner, loads, counts, target, limit, 100_000)
    true_loads, true_counts = np.empty_like(loads), np.empty_like(counts)
    recount(descending, owner, true_loads, true_counts)
    assert (loads.tolist(), counts.tolist()) == (true_loads.tolist(), true_counts.tolist())
    assert loads.max() <= before
    assert counts.max() <= (limit if limit >= 0 else counts_before.max())
    if limit < 0:
        assert counts.tolist() == counts_before.tolist()


def test_two_for_two_where_no_single_exchange_helps() -> None:
    # 51+42+11 = 104 and 52+27+19 = 98: no sample, and no pair, differs by 1 to 5; 52+51 = 103 is better.
    descending = np.array([52, 51, 42, 27, 19, 11], np.int64)
    owner = np.array([1, 0, 0, 1, 1, 0], np.int32)
    loads, counts = np.empty(2, np.int64), np.empty(2, np.int32)
    recount(descending, owner, loads, counts)
    resplit(descending, owner, loads, counts, 101, 6, 100_000)
    assert sorted(loads.tolist()) == [99, 103]
