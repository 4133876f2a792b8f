"""Bins: every item in one, within the capacities, or an error that says what to do; large items of a phase together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.balancers import pack_micro_steps

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

items = st.lists(st.tuples(*[st.one_of(st.just(0), st.integers(0, 90))] * 4), max_size=40)


def loads_of(sizes: NDArray[np.int64], bins: NDArray[np.int32], num_bins: int) -> NDArray[np.int64]:
    loads = np.zeros((num_bins, sizes.shape[1]), np.int64)
    np.add.at(loads, bins, sizes)
    return loads


@given(items, st.integers(1, 6), st.integers(1, 4), st.integers(0, 120), st.integers(0, 200))
def test_capacities_are_kept_or_an_error_says_what_to_do(
    rows: list[tuple[int, ...]], num_bins: int, num_ranks: int, spare: int, other: int
) -> None:
    table = np.array(rows, np.int64).reshape(-1, 4)
    costs, sizes = table[:, :2], table[:, 2:]
    capacities = np.maximum(1, -(-sizes.sum(axis=0) // num_bins) + (spare, other))
    try:
        bins = pack_micro_steps(sizes, capacities, num_bins, costs, num_ranks=num_ranks)
    except ValueError as error:
        assert num_bins > 1
        assert str(error).endswith("raise num_micro_steps or the capacities")
        return
    assert bins.dtype == np.int32 and bins.shape == (len(rows),)
    assert ((bins >= 0) & (bins < num_bins)).all()
    assert (loads_of(sizes, bins, num_bins) <= capacities).all()
    again = pack_micro_steps(sizes, capacities, num_bins, costs, num_ranks=num_ranks)
    assert again.tolist() == bins.tolist()


@given(items, st.integers(1, 6))
def test_room_for_one_more_of_the_largest_is_enough(rows: list[tuple[int, ...]], num_bins: int) -> None:
    """An item that fits nowhere would leave all bins above an even share."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    capacity = max(1, -(-int(table[:, 2].sum()) // num_bins) + int(table[:, 2].max(initial=0)))
    bins = pack_micro_steps(table[:, 2], capacity, num_bins, table[:, :2])
    assert loads_of(table[:, 2:3], bins, num_bins).max() <= capacity


@given(items)
def test_one_bin_holds_all_that_fits_into_it(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 4)
    total = np.maximum(1, table[:, 2:].sum(axis=0))
    assert pack_micro_steps(table[:, 2:], total, 1, table[:, :2]).tolist() == [0] * len(rows)
    if (total > 1).any():
        with pytest.raises(
            ValueError, match=r"no packing into num_micro_steps=1 of capacities=.*raise num_micro_steps"
        ):
            pack_micro_steps(table[:, 2:], np.maximum(1, total - 1), 1, table[:, :2])


@pytest.mark.parametrize("seed", range(6))
def test_items_that_differ_are_packed_the_same_in_any_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = random.choice(100_000, (60, 2), replace=False)
    sizes = random.integers(1, 1000, 60)
    bins = pack_micro_steps(sizes, 5_000, 8, costs, num_ranks=4)
    order = random.permutation(60)
    assert pack_micro_steps(sizes[order], 5_000, 8, costs[order], num_ranks=4).tolist() == bins[order].tolist()


def test_equal_items_are_taken_by_position() -> None:
    assert pack_micro_steps([3] * 6, 6, 3, [5] * 6).tolist() == [0, 0, 1, 1, 2, 2]


def test_large_items_of_a_phase_share_a_bin() -> None:
    """Two ranks wait once for the images then, in place of twice."""
    image, llm = [90, 0, 0, 0, 90, 0, 0, 0], [10] * 8
    bins = pack_micro_steps([1] * 8, 4, 2, np.stack([image, llm], axis=1), num_ranks=2)
    assert bins[0] == bins[4]


def test_caps_that_bind_nothing_are_as_good_as_none() -> None:
    for capacity in (12, 1_000, 2**62, 2**63 - 1):
        assert pack_micro_steps([3, 3, 3, 3], capacity, 1, [1] * 4).tolist() == [0] * 4
    sizes, costs = np.arange(1, 9), np.arange(8, 0, -1)
    assert pack_micro_steps(sizes, 2**62, 2, costs).tolist() == pack_micro_steps(sizes, sizes.sum(), 2, costs).tolist()


def test_nothing_is_packed_of_nothing() -> None:
    assert pack_micro_steps([], 1, 3, []).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (([1, 2], 5, 1, [1]), "sizes must have one row for each of the 1 costs"),
        (([1], [5, 5], 1, [1]), r"capacities must be 1 integer\(s\), one for each column of sizes, got \[5, 5\]"),
        (([1], 0, 1, [1]), "capacities must be at least 1, got 0"),
        (([1], 1.5, 1, [1]), "capacities must be 1 integer"),
        (([1], 5, 0, [1]), "num_micro_steps must be at least 1, got 0"),
        (([-1], 5, 1, [1]), r"sizes\[0\] is -1; it must be at least 0"),
        (([1], 5, 1, [[[1]]]), r"costs must be \(num_items,\) or \(num_items, num_phases\), got shape \(1, 1, 1\)"),
        (([1], 5, 1, np.zeros((1, 0))), r"costs must be \(num_items,\)"),
        (([1], 5, 1, [[3, -4]]), r"costs\[:, 1\]\[0\] is -4; it must be at least 0"),
        (([1], 5, 1, [[2**62, 1]]), r"costs of all phases sum to 4611686018427387905, above the limit of 2\*\*62"),
        (([9], 5, 1, [1]), r"capacities=\[5\] was found for sizes that sum to \[9\], of which the largest are \[9\]"),
    ],
)
def test_errors(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pack_micro_steps(*arguments)


def test_a_bin_has_a_rank() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        pack_micro_steps([1], 5, 1, [1], num_ranks=0)
