"""Padded balancing: exact, every sample once, caps hold, clear errors."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.balancers import Assignment, CostModel, PhaseCost, TransformerCost
from orchdata.balancers.packed import balance_padded

TOKENS = PhaseCost(1.0)
length_lists = st.lists(st.integers(0, 500), max_size=40)
WINDOWS = PhaseCost(0.5, 0.01, windows=((4, 1.0), (32, 0.25)))
phase_costs = st.sampled_from(
    [TOKENS, PhaseCost(2.0, 0.01), PhaseCost(0.0, 1.0), PhaseCost(1.0, constant=300.0), WINDOWS]
)


@cache
def all_ways(num_samples: int, num_ranks: int) -> NDArray[np.int64]:
    ways = np.array(list(product(range(num_ranks), repeat=num_samples)), np.int64)
    return ways.reshape(num_ranks**num_samples, num_samples)


def best_makespan(costs: NDArray[np.int64], num_ranks: int, max_samples: int | None) -> int:
    """Of all assignments, where a rank costs its count times its largest."""
    ways = all_ways(len(costs), num_ranks)
    held = ways[:, :, None] == np.arange(num_ranks)
    counts = held.sum(axis=1)
    makespans = (counts * (held * costs[:, None]).max(axis=1, initial=0)).max(axis=1)
    if max_samples is not None:
        makespans = makespans[counts.max(axis=1) <= max_samples]
    return int(makespans.min())


def row_costs(lengths: list[int], cost: PhaseCost, multiple_of: int) -> NDArray[np.int64]:
    aligned = [-(-length // multiple_of) * multiple_of for length in lengths]
    return CostModel(llm=cost).sequence_costs("llm", np.array(aligned, np.int64))


def check_books(lengths: list[int], costs: NDArray[np.int64], num_ranks: int, found: Assignment) -> None:
    """Each sample with a length is on one rank, and the loads are counts times the longest."""
    assert found.rank.dtype == np.int32
    assert found.loads.dtype == np.int64
    assert [r == -1 for r in found.rank] == [length == 0 for length in lengths]
    held = [costs[found.rank == rank] for rank in range(num_ranks)]
    assert found.loads.tolist() == [len(c) * int(c.max(initial=0)) for c in held]
    assert found.makespan == found.lower_bound == found.loads.max()


def test_equal_to_brute_force_on_1000_small_cases() -> None:
    generator = np.random.default_rng(20)
    for _ in range(1000):
        num_ranks = int(generator.integers(1, 4))
        lengths = generator.integers(1, generator.choice([4, 20, 300]), generator.integers(0, 8)).tolist()
        least = max(1, -(-len(lengths) // num_ranks))
        max_samples = int(generator.integers(least, least + 3)) if generator.random() < 0.5 else None
        multiple_of = int(generator.choice([1, 1, 3, 8, 64]))
        linear, quadratic, constant = generator.choice([0.0, 0.5, 1.0, 7.0], 3).tolist()
        cost = PhaseCost(linear + 0.25, quadratic, constant * 10, windows=((5, quadratic),))
        costs = row_costs(lengths, cost, multiple_of)
        found = balance_padded(lengths, num_ranks, cost, max_samples=max_samples, multiple_of=multiple_of)
        check_books(lengths, costs, num_ranks, found)
        assert found.makespan == (best_makespan(costs, num_ranks, max_samples) if lengths else 0)
        if max_samples is not None and lengths:
            assert np.bincount(found.rank).max() <= max_samples


@given(length_lists, st.integers(1, 12), phase_costs, st.integers(1, 70))
def test_the_books_are_right_and_no_rank_is_empty_without_need(
    lengths: list[int], num_ranks: int, cost: PhaseCost, multiple_of: int
) -> None:
    found = balance_padded(lengths, num_ranks, cost, multiple_of=multiple_of)
    check_books(lengths, row_costs(lengths, cost, multiple_of), num_ranks, found)
    present = sum(length > 0 for length in lengths)
    assert (found.loads > 0).sum() == min(present, num_ranks)


def test_empty_input_more_ranks_than_samples_and_samples_without_length() -> None:
    assert balance_padded([], 3, TOKENS).loads.tolist() == [0, 0, 0]
    assert balance_padded([0, 0], 2, TOKENS, max_samples=1, multiple_of=8).rank.tolist() == [-1, -1]
    found = balance_padded([5, 0, 7], 4, TOKENS, max_samples=1)
    assert (found.rank.tolist(), found.loads.tolist()) == ([1, -1, 0], [7, 5, 0, 0])


def test_a_transformer_is_a_cost_and_any_integers_will_do() -> None:
    lengths = np.arange(1, 41, dtype=np.int32)
    transformer = TransformerCost(hidden=64, layers=2, ffn=256)
    found = balance_padded(lengths, 4, transformer)
    same = balance_padded(lengths.astype(np.int64).repeat(2)[::2], 4, transformer.phase_cost())
    assert found.loads.tolist() == same.loads.tolist()
    assert found.rank.tolist() == balance_padded(lengths.astype(np.float32), 4, transformer).rank.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, -1]}, r"lengths\[1\] is -1; it must be at least 0"),
        ({"lengths": [3.0, np.nan]}, r"lengths\[1\] is nan; it must be a whole number"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        ({"cost": 3}, "cost must be a PhaseCost or a TransformerCost, got 3"),
        (
            {"lengths": [1] * 7, "max_samples": 3},
            "max_samples=3 on 2 ranks allows 6 samples, but there are 7: raise it to at least 4",
        ),
        ({"lengths": [1, 2**40]}, "a sequence is too long for its cost to fit into int64"),
        (
            {"lengths": [1, 2**21 + 1], "cost": PhaseCost(0.0, 1.0)},
            "a sequence is too long for its cost to fit into int64",
        ),
        (
            {"lengths": np.r_[1 << 21, np.ones(1 << 20, np.int64)], "cost": PhaseCost(0.0, 1.0)},
            r"1048577 samples padded to lengths\[0\] = 2097152 cost \d+ together, above the limit of 2\*\*62",
        ),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    given_arguments = {"lengths": [1, 1], "num_ranks": 2, "cost": TOKENS} | arguments
    with pytest.raises(ValueError, match=message):
        balance_padded(**given_arguments)  # type: ignore[arg-type]
