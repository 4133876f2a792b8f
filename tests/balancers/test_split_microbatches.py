"""Microbatches: equal counts, caps hold, as few as brute force, clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import omni_lengths, quadratic
from orchdata.balancers import balance, split_microbatches
from orchdata.balancers.bins import Packing, candidate_packings

size_lists = st.lists(st.integers(1, 40), max_size=40)
small_samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 12), st.integers(0, 12)), max_size=8
)


def legal(sizes: NDArray[np.int64], ways: tuple[int, ...], caps: list[int]) -> bool:
    """Within the caps, but for a sample that is alone."""
    bins = np.array(ways)
    return all((sizes[bins == b].sum(axis=0) <= caps).all() or (bins == b).sum() == 1 for b in set(ways))


def fewest_twin(sizes: NDArray[np.int64], caps: list[int]) -> int:
    """Of all ways to part the samples, the fewest microbatches; which of these comes first makes no difference."""
    return min(max(ways, default=0) + 1 for ways in partitions(len(sizes)) if legal(sizes, ways, caps))


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Each way to part `count` samples, once: the next sample is in a microbatch of before, or in the next one."""
    if count == 0:
        yield ()
        return
    for ways in partitions(count - 1):
        for number in range(max(ways, default=-1) + 2):
            yield (*ways, number)


def sum_of_peaks(costs: NDArray[np.int64], rank: NDArray[np.int64], microbatch: NDArray[np.int32], count: int) -> int:
    loads = np.zeros((int(rank.max(initial=0)) + 1, count), np.int64)
    np.add.at(loads, (rank, microbatch), costs)
    return int(loads.max(axis=0).sum())


@given(size_lists, st.integers(1, 5), st.booleans())
def test_caps_hold_and_every_sample_has_a_microbatch(sizes: list[int], num_ranks: int, in_step: bool) -> None:
    rank = balance(sizes, num_ranks).rank
    microbatch, count = split_microbatches(sizes, rank, num_ranks, max_size=40, in_step=in_step)
    assert microbatch.dtype == np.int32
    assert count >= 1
    assert ((microbatch >= 0) & (microbatch < count)).all()
    loads = np.zeros((num_ranks, count), np.int64)
    np.add.at(loads, (rank, microbatch), sizes)
    assert loads.max(initial=0) <= 40
    assert count >= -(-loads.sum(axis=1).max(initial=0) // 40)
    if in_step:
        assert (np.diff(loads, axis=1) <= 0).all()


def test_costs_are_levelled_within_the_caps_on_sizes() -> None:
    costs, sizes = [9, 9, 1, 1], [2, 2, 2, 2]
    microbatch, count = split_microbatches(costs, [0] * 4, 1, sizes=sizes, max_size=4)
    assert count == 2
    assert microbatch[0] != microbatch[1]


def test_a_sample_above_the_cap_has_its_own_or_is_an_error() -> None:
    microbatch, count = split_microbatches([50, 3, 4], [0, 0, 0], 1, max_size=10, oversize="own")
    assert count == 2
    assert microbatch[1] == microbatch[2] != microbatch[0]
    with pytest.raises(ValueError, match="sample 0 has size 50, above the cap of 10"):
        split_microbatches([50, 3, 4], [0, 0, 0], 1, max_size=10)


def test_a_given_number_is_used_or_refused() -> None:
    microbatch, count = split_microbatches([3, 3, 3, 3], [0, 0, 1, 1], 2, max_size=6, num_microbatches=2)
    assert count == 2
    assert microbatch.tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"num_microbatches=1 are too few .* max_size=\[3\]: 2 are enough"):
        split_microbatches([3, 3, 3, 3], [0, 0, 1, 1], 2, max_size=3, num_microbatches=1)


def test_left_out_samples_and_empty_input() -> None:
    microbatch, count = split_microbatches([99, 3], [-1, 0], 2, max_size=6)
    assert (microbatch.tolist(), count) == ([-1, 0], 1)
    microbatch, count = split_microbatches([], [], 3, max_size=6)
    assert (microbatch.tolist(), count) == ([], 1)


@given(small_samples, st.integers(1, 3), st.booleans())
def test_the_count_equals_brute_force_with_several_caps(
    samples: list[tuple[int, int, int, int]], num_caps: int, in_step: bool
) -> None:
    columns = np.array(samples, np.int64).reshape(-1, 4)
    rank, sizes, caps = columns[:, 0], columns[:, 1 : 1 + num_caps], [20, 10, 9][:num_caps]
    microbatch, count = split_microbatches(
        columns[:, 1], rank, 3, sizes=sizes, max_size=caps, oversize="own", in_step=in_step
    )
    assert count == max(fewest_twin(sizes[rank == r], caps) for r in range(3))
    assert all(legal(sizes[rank == r], tuple(microbatch[rank == r]), caps) for r in range(3))


@given(small_samples, st.integers(0, 3), st.booleans())
def test_in_step_is_never_worse_and_sorted(
    samples: list[tuple[int, int, int, int]], spare: int, given_number: bool
) -> None:
    costs, rank, sizes = np.array([(s[1], s[0], s[2]) for s in samples], np.int64).reshape(-1, 3).T
    options = {"sizes": sizes, "max_size": 12 + spare}
    plain, count = split_microbatches(costs, rank, 3, **options)  # type: ignore[arg-type]
    if given_number:
        count += spare
        plain, _ = split_microbatches(costs, rank, 3, **options, num_microbatches=count)  # type: ignore[arg-type]
    in_step, same = split_microbatches(
        costs,
        rank,
        3,
        **options,
        num_microbatches=count if given_number else None,
        in_step=True,  # type: ignore[arg-type]
    )
    assert same == count
    loads = np.zeros((3, count), np.int64)
    np.add.at(loads, (rank, in_step), costs)
    assert (np.diff(loads, axis=1) <= 0).all()
    assert (
        loads.sum(axis=1).max() <= sum_of_peaks(costs, rank, in_step, count) <= sum_of_peaks(costs, rank, plain, count)
    )
    held = np.zeros((3, count), np.int64)
    np.add.at(held, (rank, in_step), sizes)
    assert held.max() <= 12 + spare


def test_in_step_fills_up_the_peak_that_a_large_sample_forces() -> None:
    costs, rank = np.array([8, 1, 1, 4, 3, 2, 1]), np.array([0, 0, 0, 1, 1, 1, 1])
    plain, count = split_microbatches(costs, rank, 2, max_size=9)
    assert (count, sum_of_peaks(costs, rank, plain, count)) == (2, 13)  # 8 + 2 and 5 + 5
    in_step, _ = split_microbatches(costs, rank, 2, max_size=9, in_step=True)
    assert sum_of_peaks(costs, rank, in_step, count) == 10  # 8 + 2 on both ranks


@pytest.mark.parametrize("num_microbatches", [4, 8])
def test_in_step_comes_near_the_largest_load_on_a_mixture(num_microbatches: int) -> None:
    lengths = omni_lengths(np.random.default_rng(5), 64 * 16)
    costs, options = quadratic(lengths), {"sizes": lengths, "max_size": int(lengths.max())}
    rank = balance(costs, 64).rank
    peaks = [
        sum_of_peaks(
            costs,
            rank,
            split_microbatches(
                costs,
                rank,
                64,
                **options,
                num_microbatches=num_microbatches,
                in_step=in_step,  # type: ignore[arg-type]
            )[0],
            num_microbatches,
        )
        for in_step in (False, True)
    ]
    largest = np.bincount(rank, weights=costs).max()
    assert peaks[1] < 1.2 * largest
    assert peaks[0] > 1.5 * largest


def test_more_microbatches_than_samples() -> None:
    for in_step in (False, True):
        microbatch, count = split_microbatches(
            [5, 4, 3], [0, 0, 1], 2, max_size=9, num_microbatches=10**9, in_step=in_step
        )
        assert (microbatch.tolist(), count) == ([0, 1, 0], 10**9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": [0]}, r"rank must have one entry for each of the 2 costs, got shape \(1,\)"),
        ({"rank": [0, 2]}, r"rank\[1\] is 2; it must be from -1 \(left out\) to 1"),
        ({"rank": [0.0, 1.0]}, "rank must be integers, got dtype float64: pass Assignment.rank"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"sizes": [[], []]}, r"got shape \(2, 0\)"),
        ({"sizes": [1.0, np.nan]}, r"sizes\[1\] is nan; it must be a whole number"),
        (
            {"sizes": [[1, 1], [1, 9]], "max_size": [5, 6]},
            r"sample 1 has size 9, above the cap of 6 of a microbatch \(column 1 of sizes\): raise the cap",
        ),
        ({"costs": [2**62, 1], "sizes": [1, 1]}, r"costs sum to more than 2\*\*62 at sample 1"),
        ({"max_size": [5, 5]}, r"max_size must be 1 integer\(s\), one for each column of sizes, got \[5, 5\]"),
        ({"oversize": "drop"}, "oversize must be 'error' or 'own', got 'drop'"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    given_arguments = {"costs": [1, 1], "rank": [0, 1], "num_ranks": 2, "max_size": 5} | arguments
    with pytest.raises(ValueError, match=message):
        split_microbatches(**given_arguments)  # type: ignore[arg-type]


# Micro-steps: every item in one, within the caps of each rank; large items of a phase together.


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
