"""Minimal move: balanced like the rest, but most samples stay where they are, and what moves is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS
from orchdata.balancers import balance, balance_from, balance_phases, lower_bound

held_samples = st.integers(1, 9).flatmap(
    lambda num_ranks: st.tuples(
        st.just(num_ranks),
        st.lists(st.tuples(st.integers(0, 500), st.integers(0, num_ranks - 1), st.integers(0, 99)), max_size=60),
    )
)


@given(held_samples, st.integers(1, 4))
def test_every_sample_once_and_moves_are_counted(
    held: tuple[int, list[tuple[int, int, int]]], ranks_per_node: int
) -> None:
    num_ranks, samples = held
    costs, owner, sizes = ([sample[k] for sample in samples] for k in range(3))
    found = balance_from(costs, owner, num_ranks, sizes=sizes, ranks_per_node=ranks_per_node)
    assert [r == -1 for r in found.rank] == [cost == 0 for cost in costs]
    loads = [sum(c for c, r in zip(costs, found.rank, strict=True) if r == rank) for rank in range(num_ranks)]
    assert found.loads.tolist() == loads
    assert found.makespan == max(loads) >= found.lower_bound == lower_bound(costs, num_ranks)
    moved = [i for i, cost in enumerate(costs) if cost and found.rank[i] != owner[i]]
    between = [i for i in moved if found.rank[i] // ranks_per_node != owner[i] // ranks_per_node]
    within = [i for i in moved if i not in between]
    assert found.moved_samples == len(moved)
    assert found.moved_cost_within == sum(costs[i] for i in within)
    assert found.moved_cost_between == sum(costs[i] for i in between)
    assert found.moved_size_within == sum(sizes[i] for i in within)
    assert found.moved_size_between == sum(sizes[i] for i in between)


@given(held_samples)
def test_never_worse_than_leaving_all_where_it_is(held: tuple[int, list[tuple[int, int, int]]]) -> None:
    num_ranks, samples = held
    costs, owner = [sample[0] for sample in samples], [sample[1] for sample in samples]
    stays = max(sum(c for c, r in zip(costs, owner, strict=True) if r == rank) for rank in range(num_ranks))
    assert balance_from(costs, owner, num_ranks).makespan <= stays


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("num_ranks", [8, 64, 512])
def test_reaches_the_bound_from_any_holders(name: str, num_ranks: int) -> None:
    generator = np.random.default_rng(5)
    costs = DISTRIBUTIONS[name](generator, num_ranks * 16)
    best = balance(costs, num_ranks).makespan
    for owner in (
        np.arange(len(costs)) % num_ranks,  # Dealt out in turn.
        np.zeros(len(costs), np.int64),  # All on one rank.
        np.sort(generator.integers(0, num_ranks, len(costs))),  # Uneven counts.
        np.argsort(np.argsort(costs)) // 16,  # The largest together.
    ):
        found = balance_from(costs, owner, num_ranks)
        assert found.makespan <= max(best, found.lower_bound) * 1.003


def test_moves_little_of_what_is_dealt_in_turn() -> None:
    shares = []
    for name in DISTRIBUTIONS:
        costs = DISTRIBUTIONS[name](np.random.default_rng(2), 512 * 16)
        found = balance_from(costs, np.arange(len(costs)) % 512, 512)
        shares.append(found.moved_share)
        again = balance_from(costs[costs > 0], found.rank[costs > 0], 512, tolerance=2e-3)
        assert again.moved_samples == 0  # Nothing moves once it is balanced.
    assert np.mean(shares) <= 0.2


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([20, 4_000, 10**6]),
    st.integers(0, 10**6),
    st.integers(0, 60),
    st.lists(
        st.sampled_from([0, 1e-5, 1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.9]), max_size=8
    ),
)
def test_a_wider_tolerance_never_moves_more_nor_has_a_lower_makespan(
    num_ranks: int, ranks_per_node: int, largest: int, seed: int, num_samples: int, tolerances: list[float]
) -> None:
    generator = np.random.default_rng(seed)
    costs, sizes = generator.integers(0, largest, num_samples), generator.integers(0, 99, num_samples)
    if seed % 2:
        costs = np.where(generator.random(num_samples) < 0.85, largest, costs)  # Mostly at a cap.
    owner = generator.integers(0, num_ranks, num_samples)
    narrower = None
    for tolerance in sorted(tolerances):
        found = balance_from(costs, owner, num_ranks, sizes=sizes, ranks_per_node=ranks_per_node, tolerance=tolerance)
        moved = found.moved_size_within + found.moved_size_between
        if narrower is not None:
            assert found.makespan >= narrower[0]
            assert moved <= narrower[1]
        narrower = found.makespan, moved


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_samples_mostly_at_a_cap_stay_mostly_where_they_are(num_ranks: int) -> None:
    generator = np.random.default_rng(num_ranks)
    costs = np.where(generator.random(num_ranks * 16) < 0.85, 4096, generator.integers(64, 4096, num_ranks * 16))
    found = balance_from(costs, np.arange(len(costs)) // 16, num_ranks)
    again = balance(costs, num_ranks)
    assert found.moved_share < 0.2  # Dealing again moves 80 to 90 %.
    assert found.makespan <= 1.02 * again.makespan


def test_prefers_the_same_node() -> None:
    # Rank 0 is 4 over; rank 1 shares its node, ranks 2 and 3 have as much room.
    found = balance_from([4, 4, 4, 4, 4, 4, 2, 2], [0, 0, 0, 1, 2, 2, 3, 3], 4, ranks_per_node=2, tolerance=0.2)
    assert found.makespan == 8
    assert (found.moved_cost_within, found.moved_cost_between) == (4, 0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], [0], 2), {}, r"owner must have one entry for each of the 2 costs, got shape \(1,\)"),
        (([1, 2], [0, 2], 2), {}, r"owner\[1\] is 2; it must be from 0 to 1"),
        (([1, 2], [0, -1], 2), {}, r"owner\[1\] is -1; it must be from 0 to 1"),
        (([1, 2], [0.0, 1.0], 2), {}, "owner must be integers, got dtype float64"),
        (([1, 2], [0, 1], 2), {"sizes": [1]}, "sizes must have one entry for each of the 2 costs, got 1"),
        (([1, 2], [0, 1], 2), {"tolerance": 1.5}, "tolerance must be from 0 to below 1, got 1.5"),
    ],
)
def test_errors_name_value_and_limit(arguments: tuple[object, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_from(*arguments, **options)  # type: ignore[arg-type]


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300), st.integers(0, 7), st.integers(0, 50)), max_size=40),
)
def test_by_phase_it_is_never_worse_than_staying(
    num_ranks: int, ranks_per_node: int, samples: list[tuple[int, int, int, int]]
) -> None:
    image, llm, owner, sizes = np.array(samples, np.int64).reshape(-1, 4).T
    owner = owner % num_ranks
    costs = {"image": image, "llm": llm}
    found = balance_from(costs, owner, num_ranks, sizes=sizes, ranks_per_node=ranks_per_node)
    loads = [[int(of_all[found.rank == rank].sum()) for rank in range(num_ranks)] for of_all in costs.values()]
    assert found.loads.tolist() == loads
    assert found.makespans == tuple(map(max, loads))
    stay = sum(max(int(of_all[owner == rank].sum()) for rank in range(num_ranks)) for of_all in costs.values())
    assert sum(found.lower_bounds) <= sum(found.makespans) <= stay
    # If dealing again took 2 % off, rounded, it would have been chosen, unless nothing moved.
    again = balance_phases(costs, num_ranks)
    assert sum(found.makespans) * 49 <= sum(again.makespans) * 50
    moved = found.rank != owner
    assert (found.moved_samples, found.moved_size_within + found.moved_size_between) == (
        moved.sum(),
        sizes[moved].sum(),
    )


def test_by_phase_ranks_give_up_only_what_they_have_above_the_bounds() -> None:
    # Rank 0 holds all four images, and each rank four texts: one image leaves for each other rank, and nothing else.
    image = [10, 10, 10, 10] + [0] * 12
    llm = [1, 1, 1, 1] + [100] * 12
    owner = [0, 0, 0, 0] + [rank for rank in range(4) for _ in range(3)]
    found = balance_from({"image": image, "llm": llm}, owner, 4, ranks_per_node=2)
    assert found.makespans == found.lower_bounds == (10, 301)
    assert (found.moved_samples, found.moved_cost_within, found.moved_cost_between) == (3, 11, 22)
    again = balance_from({"image": image, "llm": llm}, found.rank, 4)
    assert again.moved_samples == 0


def test_by_phase_errors() -> None:
    with pytest.raises(ValueError, match="sample 1 costs 0 in every phase"):
        balance_from({"image": [1, 0], "llm": [1, 0]}, [0, 0], 2)
    with pytest.raises(ValueError, match="needs the primary phase 'llm', got text"):
        balance_from({"text": [1, 0]}, [0, 0], 2)
    assert balance_from({"text": [1, 1]}, [0, 0], 2, primary="text").makespans == (1,)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300), st.integers(0, 4)), min_size=1, max_size=60),
    st.lists(st.floats(0, 0.5), min_size=2, max_size=5),
)
def test_a_wider_tolerance_moves_no_more_of_several_phases(
    rows: list[tuple[int, int, int]], tolerances: list[float]
) -> None:
    image, llm, owner = np.array(rows).T
    costs, sizes = {"image": image, "llm": llm}, 1 + (image + llm) % 97
    found = [balance_from(costs, owner, 5, sizes=sizes, tolerance=wide) for wide in sorted(tolerances)]
    moved = [one.moved_size_within + one.moved_size_between for one in found]
    waits = [sum(one.makespans) for one in found]
    assert moved == sorted(moved, reverse=True)
    assert waits == sorted(waits)
