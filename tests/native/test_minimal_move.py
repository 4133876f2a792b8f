"""The minimal-move kernels against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.minimal_move import relabel, solve_from, solve_groups, stay_on_nodes

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

held_samples = st.integers(1, 8).flatmap(
    lambda num_ranks: st.tuples(
        st.just(num_ranks),
        st.lists(st.tuples(st.integers(1, 60), st.integers(0, num_ranks - 1)), max_size=40),
    )
)


def arrays(samples: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Costs from the largest, and who holds each."""
    ordered = sorted(samples, key=lambda sample: -sample[0])
    return np.array([cost for cost, _ in ordered], np.int64), np.array([rank for _, rank in ordered], np.int32)


def loads_of(costs: NDArray[np.int64], owner: NDArray[np.int32], num_ranks: int) -> NDArray[np.int64]:
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, owner[owner >= 0], costs[owner >= 0])
    return loads


@given(held_samples, st.integers(0, 10_000))
def test_relabelling_renames_ranks_and_keeps_what_it_can(held: tuple[int, list[tuple[int, int]]], seed: int) -> None:
    num_ranks, samples = held
    costs, start = arrays(samples)
    owner = np.random.default_rng(seed).integers(0, num_ranks, len(costs)).astype(np.int32)
    renamed = owner.copy()
    relabel(costs, start, renamed, num_ranks)
    assert sorted(loads_of(costs, renamed, num_ranks)) == sorted(loads_of(costs, owner, num_ranks))
    assert len(set(zip(owner.tolist(), renamed.tolist(), strict=True))) == len(set(owner.tolist()))
    kept = {(r, h): int(costs[(owner == r) & (start == h)].sum()) for r in range(num_ranks) for h in range(num_ranks)}
    if any(kept.values()):
        # The pair that keeps most is always among those kept.
        assert costs[renamed == start].sum() >= max(kept.values())


def test_relabelling_finds_a_renamed_assignment_again() -> None:
    costs = np.array([9, 8, 7, 3, 2, 1], np.int64)
    start = np.array([0, 1, 2, 0, 1, 2], np.int32)
    renamed = np.array([2, 0, 1, 2, 0, 1], np.int32)
    relabel(costs, start, renamed, 3)
    assert renamed.tolist() == start.tolist()


@given(held_samples)
def test_groups_are_solved_as_if_alone(held: tuple[int, list[tuple[int, int]]]) -> None:
    num_ranks, samples = held
    costs = np.array([cost for cost, _ in samples], np.int64)
    owner = np.array([rank for _, rank in samples], np.int32)
    alone, _, bound = solve_from(costs, costs, owner, num_ranks, 1, 1e-3, 50)
    both, largest = solve_groups(
        np.concatenate([costs, 2 * costs]),
        np.concatenate([costs, costs]),
        np.concatenate([owner, owner]),
        np.array([0, len(costs), 2 * len(costs)]),
        np.array([num_ranks, num_ranks]),
        1e-3,
        50,
    )
    doubled, _, double_bound = solve_from(2 * costs, costs, owner, num_ranks, 1, 1e-3, 50)
    assert both.tolist() == [*alone.tolist(), *doubled.tolist()]
    assert largest == max(bound, double_bound)


@settings(max_examples=200)
@given(held_samples, st.integers(2, 4), st.integers(0, 10_000), st.integers(0, 40))
def test_moved_samples_come_back_to_their_node_and_nothing_else_changes(
    held: tuple[int, list[tuple[int, int]]], ranks_per_node: int, seed: int, room: int
) -> None:
    num_ranks, samples = held
    costs, start = arrays(samples)
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 99, len(costs))
    before = np.where(generator.random(len(costs)) < 0.5, start, generator.integers(0, num_ranks, len(costs)))
    before = before.astype(np.int32)
    owner, loads = before.copy(), loads_of(costs, before, num_ranks)
    ceiling = int(loads.max()) + room
    stay_on_nodes(costs, sizes, start, owner, loads, ranks_per_node, ceiling)
    assert loads.tolist() == loads_of(costs, owner, num_ranks).tolist()
    assert loads.max() <= ceiling
    assert (owner == start)[before == start].all()  # What stayed stays.

    def crossing(rank: NDArray[np.int32]) -> int:
        return int(sizes[rank // ranks_per_node != start // ranks_per_node].sum())

    assert crossing(owner) <= crossing(before)
    # No sample away from its node would fit on the rank that holds it.
    away = np.flatnonzero(owner // ranks_per_node != start // ranks_per_node)
    assert crossing(owner) < crossing(before) or (loads[start[away]] + costs[away] > ceiling).all()


def test_two_samples_on_each_others_node_change_places() -> None:
    costs, start = np.array([5, 5, 4, 4], np.int64), np.array([0, 2, 1, 3], np.int32)
    owner = np.array([2, 0, 1, 3], np.int32)  # Of ranks 0 and 1 on one node, 2 and 3 on the other.
    stay_on_nodes(costs, costs, start, owner, loads_of(costs, owner, 4), 2, 5)
    assert owner.tolist() == start.tolist()
