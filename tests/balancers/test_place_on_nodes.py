"""Node placement: a permutation, fewest bytes between nodes, most bytes at home, ragged nodes, clear errors."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import DISTRIBUTIONS
from orchdata.balancers import balance, placement
from orchdata.balancers.placement import NodePlacement, place_on_nodes, renamed, traffic_between


@st.composite
def squares(draw: st.DrawFn, most: int = 12) -> NDArray[np.int64]:
    num_ranks = draw(st.integers(1, most))
    row = st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)
    return np.array(draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)), np.int64)


def moved(traffic: NDArray[np.int64], rank: tuple[int, ...], ranks_per_node: int) -> tuple[int, int]:
    """Bytes (between nodes, within nodes) when rank j of the assignment runs on rank[j]."""
    between = within = 0
    for i in range(len(rank)):
        for j in range(len(rank)):
            if i // ranks_per_node != rank[j] // ranks_per_node:
                between += int(traffic[i, j])
            elif i != rank[j]:
                within += int(traffic[i, j])
    return between, within


def check_books(traffic: NDArray[np.int64], ranks_per_node: int, found: NodePlacement) -> None:
    assert found.rank.dtype == np.int32
    assert sorted(found.rank.tolist()) == list(range(len(traffic)))
    assert moved(traffic, tuple(found.rank), ranks_per_node) == (found.bytes_between, found.bytes_within)
    identity = moved(traffic, tuple(range(len(traffic))), ranks_per_node)
    assert found.bytes_between_before == identity[0]
    assert (found.bytes_between, found.bytes_within) <= identity
    assert found.bytes_between <= found.bytes_between_greedy


@settings(max_examples=40)
@given(squares(most=6), st.integers(1, 4))
def test_exact_equals_brute_force(traffic: NDArray[np.int64], ranks_per_node: int) -> None:
    found = place_on_nodes(traffic, ranks_per_node)
    assert found.method == "exact"
    check_books(traffic, ranks_per_node, found)
    every = {way: moved(traffic, way, ranks_per_node) for way in permutations(range(len(traffic)))}
    assert found.bytes_between == min(between for between, _ in every.values())
    nodes = [rank // ranks_per_node for rank in found.rank]
    same_nodes = [cost for way, cost in every.items() if [rank // ranks_per_node for rank in way] == nodes]
    assert found.bytes_within == min(within for _, within in same_nodes)


@example(np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 2, 3, 0], [0, 1, 0, 3, 0], [0, 0, 0, 0, 0]]), 4)
@given(squares(), st.integers(1, 13))
def test_greedy_keeps_the_same_promises(traffic: NDArray[np.int64], ranks_per_node: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "EXACT_RANKS", 0)
        found = place_on_nodes(traffic, ranks_per_node)
    assert found.method == "greedy"
    assert found.bytes_between_greedy == found.bytes_between
    check_books(traffic, ranks_per_node, found)


def balanced_traffic(name: str, num_ranks: int) -> NDArray[np.int64]:
    """16 samples a rank, held in order, balanced over all ranks; a sample is as large as it costs."""
    costs = DISTRIBUTIONS[name](np.random.default_rng(5), num_ranks * 16)
    owner = np.arange(num_ranks * 16) // 16
    return traffic_between(owner, balance(costs, num_ranks).rank, num_ranks, costs)


@pytest.mark.parametrize("name", ["text", "long tail", "audio phase"])
@pytest.mark.parametrize("num_ranks", [64, 512])
def test_greedy_is_close_to_exact(name: str, num_ranks: int) -> None:
    found = place_on_nodes(balanced_traffic(name, num_ranks), 8)
    assert found.method == "exact"
    assert found.bytes_between <= found.bytes_between_greedy <= 1.02 * found.bytes_between
    assert found.bytes_between < 0.8 * found.bytes_between_before


def test_many_ranks_are_placed_greedily() -> None:
    traffic = balanced_traffic("text", 1100)
    found = place_on_nodes(traffic, 8)
    assert found.method == "greedy"
    assert found.bytes_between < 0.8 * found.bytes_between_before


def test_names_stay_where_renaming_gains_nothing() -> None:
    for traffic in (np.zeros((6, 6), np.int64), np.ones((6, 6), np.int64), np.eye(6, dtype=np.int64)):
        assert place_on_nodes(traffic, 2).rank.tolist() == [0, 1, 2, 3, 4, 5]
        assert place_on_nodes(traffic, 4).rank.tolist() == [0, 1, 2, 3, 4, 5]


def test_traffic_counts_samples_or_bytes() -> None:
    owner, rank = [0, 0, 1, 1], [1, 1, 0, -1]
    assert traffic_between(owner, rank, 2).tolist() == [[0, 2], [1, 0]]
    assert traffic_between(owner, rank, 2, sizes=[5, 6, 7, 8]).tolist() == [[0, 11], [7, 0]]
    assert traffic_between([], [], 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: place_on_nodes([[1, 2]], 1), r"shape \(num_ranks, num_ranks\) .* got \(1, 2\)"),
        (lambda: place_on_nodes([[0, -3], [0, 0]], 1), r"traffic\[1\] is -3; it must be at least 0"),
        (lambda: place_on_nodes([[0, 0.5], [0, 0]], 1), r"traffic\[1\] is 0.5"),
        (lambda: place_on_nodes([[2**53, 0], [0, 2**53]], 1), r"sums to 18014398509481984, above the limit of 2\*\*53"),
        (lambda: place_on_nodes([[1]], 0), "ranks_per_node must be at least 1, got 0"),
        (lambda: traffic_between([0, 2], [0, 1], 2), r"owner\[1\] is 2; it must be from 0 to 1"),
        (lambda: traffic_between([0, 1], [0, -2], 2), r"rank\[1\] is -2; it must be from -1 \(left out\) to 1"),
        (lambda: traffic_between([0], [0, 1], 2), r"rank must have one entry .* got shape \(2,\)"),
        (lambda: traffic_between([0], [0], 2, sizes=[1, 2]), "sizes must have one entry a sample, got 2 for 1"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_renaming_an_assignment_keeps_its_loads_and_what_it_can_where_it_is() -> None:
    owner, rank = np.array([0, 1, 2, 3, 0], np.int32), np.array([2, 3, 0, 1, 1], np.int32)
    assert renamed(rank, owner, np.array([9, 9, 9, 9, 1]), 4).tolist() == [0, 1, 2, 3, 3]
    # Sizes beyond what floats hold are compared in a larger unit.
    assert renamed(rank, owner, np.array([9, 9, 9, 9, 1]) << 56, 4, 2).tolist() == [0, 1, 2, 3, 3]
