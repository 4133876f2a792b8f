"""The packing kernels: what they return is legal, and no bin more than brute force needs on small cases."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.microbatches.binpack import (
    by_fullness,
    greedy_fit,
    level,
    rename,
)
from orchdata.native.microbatches.microbatch import deal, group_by_rank, lower_peaks, step_peaks

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

item_lists = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 40), st.integers(0, 12)), max_size=24)
sizes_lists = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6)
CAPS = np.array([12, 10], np.int64)


def legal(sizes: NDArray[np.int64], bins: NDArray[np.int32], caps: NDArray[np.int64]) -> bool:
    """Within the caps, but for an oversize item that is alone."""
    return all((sizes[bins == b].sum(axis=0) <= caps).all() or (bins == b).sum() == 1 for b in set(bins.tolist()))


def fits_twin(held: list[int], sizes: NDArray[np.int64], item: int, caps: NDArray[np.int64]) -> bool:
    return not held or bool((sizes[held].sum(axis=0) + sizes[item] <= caps).all())


def greedy_twin(
    costs: list[int], sizes: NDArray[np.int64], order: list[int], num_bins: int, fullest: bool
) -> list[int] | None:
    held: list[list[int]] = [[] for _ in range(num_bins)]
    for item in order:
        room = [b for b in range(num_bins) if fits_twin(held[b], sizes, item, CAPS)]
        if not room:
            return None
        if fullest:
            chosen = max(room, key=lambda b: (float((sizes[held[b]].sum(axis=0) / CAPS).max()), -b))
        else:
            chosen = min(room, key=lambda b: (sum(costs[i] for i in held[b]), b))
        held[chosen].append(item)
    return [next(b for b in range(num_bins) if item in held[b]) for item in range(len(costs))]


def deal_twin(
    items: list[tuple[int, int, int]], cap: int, targets: list[int], num_ranks: int
) -> tuple[list[int], list[int], list[bool]]:
    """(rank, cost, size) from the most costly: microbatch of each, -1 from where a rank is stuck on; targets; stuck."""
    held: dict[tuple[int, int], list[int]] = {}
    bins, stuck, targets = [-1] * len(items), [False] * num_ranks, targets.copy()
    for item, (rank, cost, size) in enumerate(items):
        if stuck[rank]:
            continue
        best = None
        for b in range(len(targets)):
            inside = held.get((rank, b), [])
            room = targets[b] - sum(items[i][1] for i in inside)
            if (not inside or sum(items[i][2] for i in inside) + size <= cap) and (best is None or room > best[0]):
                best = (room, b)
        if best is None:
            stuck[rank] = True
            continue
        bins[item] = best[1]
        held.setdefault((rank, best[1]), []).append(item)
        targets[best[1]] += max(0, cost - best[0])
    return bins, targets, stuck


@given(sizes_lists, st.lists(st.integers(0, 50), min_size=6, max_size=6))
def test_levelling_keeps_the_caps_and_lowers_the_peak(items: list[tuple[int, int]], costs: list[int]) -> None:
    sizes, work = np.array(items, np.int64), np.array(costs[: len(items)], np.int64)
    bins = np.zeros(len(items), np.int32)
    count = len(items)
    assert greedy_fit(work, sizes, CAPS, by_fullness(sizes, CAPS), count, True, bins)
    before = np.bincount(bins, weights=work, minlength=count).max()
    level(work, sizes, CAPS, count, bins)
    assert legal(sizes, bins, CAPS)
    assert np.bincount(bins, weights=work, minlength=count).max() <= before


@given(sizes_lists, st.lists(st.integers(0, 50), min_size=6, max_size=6), st.integers(1, 4), st.booleans())
def test_greedy_fit_equals_its_twin(
    items: list[tuple[int, int]], costs: list[int], num_bins: int, fullest: bool
) -> None:
    sizes, work = np.array(items, np.int64), np.array(costs[: len(items)], np.int64)
    order = np.argsort(-work, kind="stable")
    twin = greedy_twin(work.tolist(), sizes, order.tolist(), num_bins, fullest)
    bins = np.zeros(len(items), np.int32)
    assert greedy_fit(work, sizes, CAPS, order, num_bins, fullest, bins) == (twin is not None)
    if twin is not None:
        assert bins.tolist() == twin


def test_rename_by_first_sample_or_by_cost() -> None:
    costs, samples = np.array([9, 8, 2, 1], np.int64), np.array([1, 3, 2, 0], np.int64)
    bins = np.array([1, 0, 2, 2], np.int32)
    rename(costs, samples, 4, bins, False)
    assert bins.tolist() == [1, 2, 0, 0]
    rename(costs, samples, 4, bins, True)
    assert bins.tolist() == [0, 1, 2, 2]  # 9, 8, 2+1, none


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 9)), max_size=30))
def test_grouping_is_by_rank_and_then_descending_cost(items: list[tuple[int, int]]) -> None:
    ranks = np.array([rank for rank, _ in items], np.int32)
    descending = sorted(range(len(items)), key=lambda i: (-items[i][1], i))
    offsets, samples, places = group_by_rank(np.array(descending, np.int32), ranks, 5)
    for rank in range(5):
        expected = [sample for sample in descending if ranks[sample] == rank]
        assert samples[offsets[rank] : offsets[rank + 1]].tolist() == expected
    assert samples[places].tolist() == [sample for sample in descending if ranks[sample] >= 0]


@given(item_lists, st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_deal_equals_its_twin(items: list[tuple[int, int, int]], targets: list[int]) -> None:
    kept = sorted((item for item in items if item[0] >= 0), key=lambda item: -item[1])
    bins, grown, stuck = deal_twin(kept, 12, targets, 4)
    columns = np.array(kept, np.int64).reshape(-1, 3)
    found, goal, given_up = np.full(len(kept), -1, np.int32), np.array(targets, np.int64), np.zeros(4, np.bool_)
    deal(
        columns[:, 1].copy(),
        columns[:, 2:].copy(),
        columns[:, 0].astype(np.int32),
        np.arange(len(kept)),
        np.array([12], np.int64),
        goal,
        given_up,
        found,
    )
    assert (found.tolist(), goal.tolist(), given_up.tolist()) == (bins, grown, stuck)


@given(item_lists, st.integers(2, 5), st.booleans())
def test_the_sum_of_peaks_falls_within_the_caps(
    items: list[tuple[int, int, int]], num_bins: int, fill_all: bool
) -> None:
    columns = np.array(sorted(items, key=lambda item: -item[1]), np.int64).reshape(-1, 3)
    offsets, samples, places = group_by_rank(np.arange(len(items), dtype=np.int32), columns[:, 0].astype(np.int32), 4)
    costs, sizes = columns[samples, 1].copy(), columns[samples, 2:].copy()
    bins = (np.arange(len(samples)) % num_bins).astype(np.int32)
    caps = np.array([max(12, int(sizes.sum()) // num_bins)], np.int64)
    loads = np.zeros((4, num_bins, 2), np.int64)

    def sum_of_peaks() -> int:
        loads[:] = 0
        rank = np.repeat(np.arange(4), np.diff(offsets))
        np.add.at(loads, (rank, bins), np.stack([costs, sizes[:, 0]], axis=1))
        everyone, peaks = np.ones(4, np.bool_), np.zeros(num_bins, np.int64)
        assert step_peaks(costs, offsets, everyone, bins, peaks) == loads[:, :, 0].max(axis=0).sum()
        return int(peaks.sum())

    before, size_before = sum_of_peaks(), loads[:, :, 1].max()
    lower_peaks(costs, sizes, offsets, places, caps, num_bins, fill_all, bins)
    assert sum_of_peaks() <= before
    assert loads[:, :, 1].max() <= max(int(caps[0]), size_before)
