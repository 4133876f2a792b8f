"""Bins of a step: every item in one, within the capacities, as full and as alike as is asked; pinned to the bit."""

from __future__ import annotations

import hashlib
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import DISTRIBUTIONS, LLM_CROSSOVER
from orchdata.balancers import bin_bound, deal_bins, pack_bins

Ints = NDArray[np.int64]
items = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 60), st.integers(0, 999), st.integers(0, 999)), max_size=40
)


def sums(values: Ints, bins: NDArray[np.int32], num_bins: int) -> Ints:
    found = np.zeros((num_bins, *values.shape[1:]), np.int64)
    np.add.at(found, bins, values)
    return found


@given(items, st.integers(1, 12), st.integers(1, 4))
def test_capacities_are_kept_or_an_error_says_what_to_do(
    rows: list[tuple[int, ...]], num_bins: int, num_ranks: int
) -> None:
    table = np.array(rows, np.int64).reshape(-1, 4)
    sizes, costs, caps = table[:, :2], table[:, 2:], np.array([100, 80])
    try:
        bins = pack_bins(sizes, caps, num_bins, costs, num_ranks=num_ranks)
    except ValueError as error:
        assert "no packing of" in str(error) and str(error).endswith("raise num_bins or the capacities")
    else:
        assert bins.dtype == np.int32 and bins.shape == (len(rows),)
        assert (sums(sizes, bins, num_bins) <= caps).all()
        assert pack_bins(sizes, caps, num_bins, costs, num_ranks=num_ranks).tolist() == bins.tolist()
    fewest = pack_bins(sizes, caps, None, costs)
    opened = int(fewest.max(initial=0)) + 1
    assert (sums(sizes, fewest, opened) <= caps).all()
    assert opened >= bin_bound(sizes, caps) or not rows
    steps = pack_bins(sizes, caps, None, costs, num_ranks=num_ranks).max(initial=0) // num_ranks + 1
    assert steps <= -(-opened // num_ranks) + 1  # one more in 1 of 65,000 random lists: it tries fewer numbers of bins


def fewest(sizes: list[int], capacity: int, loads: tuple[int, ...] = ()) -> int:
    """The optimum, by trying everything."""
    if not sizes:
        return len(loads)
    item, rest = sizes[0], sizes[1:]
    found = [fewest(rest, capacity, (*loads, item))]
    for at, load in enumerate(loads):
        if load + item <= capacity:
            found.append(fewest(rest, capacity, (*loads[:at], load + item, *loads[at + 1 :])))
    return min(found)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(20, 40))
def test_no_packing_needs_fewer_than_the_bound(sizes: list[int], capacity: int) -> None:
    assert bin_bound(sizes, capacity) <= fewest(sizes, capacity)


@pytest.mark.parametrize(("phases", "over"), [(1, 1.0), (2, 1.2)])
def test_dealing_waits_what_the_best_order_does(phases: int, over: float) -> None:
    def waits(order: Any) -> int:
        return int(costs[np.array(order)].reshape(3, 2, phases).max(axis=1).sum())

    for seed in range(20):
        costs = np.random.default_rng(seed).integers(0, 50, (6, phases))
        assert waits(np.argsort(deal_bins(costs, 2))) <= over * min(waits(order) for order in permutations(range(6)))


def test_bins_are_numbered_from_the_most_costly() -> None:
    costs = np.random.default_rng(0).integers(1, 1000, 300)
    bins = pack_bins(costs, 4000, 60, costs, num_ranks=12)
    loads = sums(costs, bins, 60)
    assert (np.diff(loads) <= 0).all()
    assert deal_bins(loads, 12).tolist() == list(range(60))


def test_large_items_of_a_phase_meet_in_one_micro_step() -> None:
    """Two bins at a time: those with an image run together, and the others without waiting for one."""
    image, llm = np.array([9, 0, 9, 0]), np.array([1, 8, 1, 8])
    bins = pack_bins([5] * 4, 5, 4, np.stack([image, llm], axis=1), num_ranks=2)
    assert sorted(bins[[0, 2]] // 2) in ([0, 0], [1, 1])


def lists(name: str, count: int, length: int) -> Ints:
    """Lengths of a distribution, none above `length`."""
    drawn = DISTRIBUTIONS[name](np.random.default_rng(7), 4 * count)
    return drawn[drawn <= length][:count]


@pytest.mark.parametrize("length", [8192, 16_384])
@pytest.mark.parametrize("name", ["text", "image", "speech", "omni", "long tail"])
def test_bins_are_full_and_micro_steps_even(name: str, length: int) -> None:
    """What is asked of steps: fill, micro-steps, and the sum over these of the largest cost, of 64 ranks."""
    sizes, num_ranks = lists(name, 4096, length), 64
    costs = sizes * sizes * 16 // LLM_CROSSOVER
    bound = bin_bound(sizes, length)
    opened = int(pack_bins(sizes, length, None, costs).max()) + 1
    assert opened <= 1.01 * bound + 1
    if sizes.sum() / (bound * length) >= 0.985:
        assert sizes.sum() / (opened * length) >= 0.985
    bins = pack_bins(sizes, length, None, costs, num_ranks=num_ranks)
    micro_steps = int(bins.max()) // num_ranks + 1
    assert micro_steps <= -(-bound // num_ranks) + 1
    loads = sums(costs, bins, micro_steps * num_ranks).reshape(micro_steps, num_ranks) + 16 * length
    largest = np.zeros(micro_steps * num_ranks, np.int64)
    np.maximum.at(largest, bins, costs)
    least = np.maximum(loads.mean(axis=1), largest.reshape(loads.shape).max(axis=1) + 16 * length)
    assert loads.max(axis=1).sum() <= 1.02 * least.sum()


GOLDEN = {
    "text": "2806c04bac62ac01",
    "image": "1ff41347ecefef10",
    "speech": "37e4233e311be1ea",
    "omni": "b33b91ab505dda20",
    "long tail": "9a601af7d4a60fc4",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_packings_are_pinned(name: str) -> None:
    sizes = lists(name, 1500, 16_384)
    table = np.stack([sizes[::-1] % 97, sizes * sizes // 1000], axis=1)
    bins = [
        pack_bins(sizes, 16_384, None, sizes * sizes),
        pack_bins(sizes, 16_384, None, sizes * sizes, num_ranks=8),
        pack_bins(np.stack([sizes, sizes[::-1]], axis=1), [16_384, 40_000], None, table, num_ranks=8),
    ]
    digest = hashlib.blake2b(b"".join(each.astype("<i4").tobytes() for each in bins), digest_size=8)
    assert digest.hexdigest() == GOLDEN[name]


def test_nothing_is_packed_into_empty_bins() -> None:
    assert pack_bins([], 5, 3, []).tolist() == []
    assert pack_bins([], 5, None, []).tolist() == []
    assert bin_bound([], 5) == 1


def test_huge_numbers_are_packed() -> None:
    sizes = np.array([1 << 59, 1 << 58, 1 << 58, 1 << 57, 3])
    bins = pack_bins(sizes, 1 << 59, 3, sizes)
    assert (sums(sizes, bins, 3) <= 1 << 59).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([7], 5, 1, [1]), "item 0 has size 7, above the capacity of 5: raise the capacity, or leave the item out"),
        (([[1, 9]], [5, 5], 1, [1]), r"item 0 has size 9, above the capacity of 5 \(column 1 of sizes\)"),
        (([5, 5, 5], 5, 2, [1, 1, 1]), r"no packing of 3 items into num_bins=2 .*none needs fewer than 3"),
        (([1], 5, 0, [1]), "num_bins must be at least 1, got 0"),
        (([1, 2], 5, 1, [1]), "sizes must have one row for each of the 1 costs"),
        (([1], [5, 5], 1, [1]), r"capacities must be 1 integer\(s\)"),
    ],
)
def test_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_bins(*arguments)  # type: ignore[arg-type]
