"""The minimal-move kernels against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.tournament import tournament, winner
from orchdata.native.move.minimal_move import relabel, solve_from, solve_groups
from orchdata.native.move.nodes import stay_on_nodes
from orchdata.native.move.refine_moves import NOTHING, cheapest_exchange, extra_move, refine_with_few_moves
from orchdata.native.move.release import FAR_ABOVE, place_released, release

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


def release_twin(costs: list[int], keep: int, largest: int) -> list[int]:
    """Places that one rank gives up: the largest that fit, then the smallest."""
    excess, given_up = sum(costs) - keep, []
    for place, cost in enumerate(costs):
        if 0 < cost <= min(excess, largest):
            given_up.append(place)
            excess -= cost
    for place in reversed(range(len(costs))):
        if excess > 0 and place not in given_up:
            given_up.append(place)
            excess -= costs[place]
    return sorted(given_up)


@given(held_samples, st.integers(0, 200))
def test_release_gives_up_the_excess(held: tuple[int, list[tuple[int, int]]], keep: int) -> None:
    num_ranks, samples = held
    costs, owner = arrays(samples)
    loads = loads_of(costs, owner, num_ranks)
    rooms = [keep - load for load in loads.tolist() if load < keep]
    largest = sum(rooms) // max(1, len(rooms))
    expected = owner.copy()
    for rank in range(num_ranks):
        mine = np.flatnonzero(owner == rank)
        expected[mine[release_twin(costs[mine].tolist(), keep, largest)]] = -1
    release(costs, owner, loads, keep)
    assert owner.tolist() == expected.tolist()
    assert loads.tolist() == loads_of(costs, owner, num_ranks).tolist()
    assert loads.max() <= keep


def place_twin(costs: list[int], start: list[int], owner: list[int], num_ranks: int, node: int, target: int) -> None:
    """Where released samples go, by plain scans; `owner` is changed in place."""

    def load(rank: int, at_least: int = 0) -> int:
        return sum(c for p, c in enumerate(costs) if owner[p] == rank and not (at_least < p and start[p] == rank))

    def loads(rank: int) -> int:
        return load(rank, len(costs))

    for place, cost in enumerate(costs):
        if owner[place] >= 0:
            continue
        near = [r for r in range(num_ranks) if r // node == start[place] // node]
        rank = min(near, key=lambda r: (loads(r), r))
        if loads(rank) + cost > target:
            rank = min(range(num_ranks), key=lambda r: (loads(r), r))
        far_above = loads(rank) + cost - target > target >> FAR_ABOVE
        if far_above:
            able = [r for r in range(num_ranks) if load(r, place) + cost <= target]
            rank = min(able, key=lambda r: (loads(r), r), default=rank)
        owner[place] = rank
        for other in reversed(range(place + 1, len(costs))) if far_above else ():
            if loads(rank) > target and owner[other] == rank == start[other]:
                owner[other] = -1


@given(held_samples, st.integers(1, 4), st.integers(0, 300), st.integers(0, 2**8 - 1))
def test_released_samples_go_where_there_is_room_or_can_be(
    held: tuple[int, list[tuple[int, int]]], ranks_per_node: int, target: int, free: int
) -> None:
    num_ranks, samples = held
    costs, start = arrays(samples)
    owner = np.where((free >> (np.arange(len(start)) % 8)) & 1, np.int32(-1), start)
    loads = loads_of(costs, owner, num_ranks)
    expected = owner.tolist()
    place_twin(costs.tolist(), start.tolist(), expected, num_ranks, ranks_per_node, target)
    place_released(costs, start, owner, loads, ranks_per_node, target)
    assert owner.tolist() == expected
    assert loads.tolist() == loads_of(costs, owner, num_ranks).tolist()


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 20))
def test_the_winner_of_a_range_is_its_smallest(keys: list[int], first: int, width: int) -> None:
    first = min(first, len(keys) - 1)
    tree = np.empty(64, np.int64)
    tournament(np.array(keys, np.int64), tree)
    assert winner(tree, first, min(first + width, len(keys))) == min(keys[first : first + width])
    assert tree[1] == min(keys)


def test_a_large_sample_gets_a_rank_that_can_release_enough() -> None:
    # 60 fits nowhere; rank 2 can release 30 and 9, rank 1 nothing that is smaller than 60.
    costs, start = np.array([70, 60, 45, 30, 9], np.int64), np.array([1, 0, 0, 2, 2], np.int32)
    owner = np.array([1, -1, 0, 2, 2], np.int32)
    place_released(costs, start, owner, loads_of(costs, owner, 3), 1, 70)
    assert owner.tolist() == [1, 2, 0, 0, 2]
    assert loads_of(costs, owner, 3).tolist() == [75, 70, 69]


@given(held_samples, st.integers(0, 10_000), st.integers(0, 200))
def test_cheapest_exchange_equals_all_pairs(held: tuple[int, list[tuple[int, int]]], seed: int, target: int) -> None:
    _, samples = held
    costs, home = arrays(samples)
    sizes = np.random.default_rng(seed).integers(0, 99, len(costs))
    side = np.random.default_rng(seed).integers(0, 2, len(costs))
    given, taken = (np.flatnonzero(side == rank).astype(np.int32) for rank in (0, 1))
    loads = costs[given].sum(), costs[taken].sum()
    least, most = int(loads[0] - target), int(target - loads[1])
    if not 0 < least <= most:
        return
    expected = NOTHING
    for may_move in (False, True):
        for place in given:
            for other in [*taken.tolist(), *([-1] if may_move else [])]:
                if least <= costs[place] - (costs[other] if other >= 0 else 0) <= most:
                    extra = extra_move(sizes[place], home[place], 0, 1)
                    extra += extra_move(sizes[other], home[other], 1, 0) if other >= 0 else 0
                    expected = min(expected, int(extra))
        found, index, other = cheapest_exchange(costs, sizes, home, 0, given, 1, taken, least, most, may_move)
        assert found == expected
        if found < NOTHING:
            difference = costs[given[index]] - (costs[taken[other]] if other >= 0 else 0)
            assert least <= difference <= most


def test_moving_again_is_free_and_coming_home_is_gained() -> None:
    assert [extra_move(5, home, 0, 1) for home in (0, 1, 2)] == [5, -5, 0]


@given(held_samples, st.integers(0, 10_000))
def test_thrifty_refinement_keeps_the_books_and_raises_no_load_above_the_target(
    held: tuple[int, list[tuple[int, int]]], seed: int
) -> None:
    num_ranks, samples = held
    costs, home = arrays(samples)
    owner = np.random.default_rng(seed).integers(0, num_ranks, len(costs)).astype(np.int32)
    before = loads_of(costs, owner, num_ranks)
    loads, counts = before.copy(), np.bincount(owner, minlength=num_ranks).astype(np.int32)
    target = int(-(-costs.sum() // num_ranks) * 11 // 10)
    assert refine_with_few_moves(costs, costs, home, owner, loads, counts, target, 10_000) <= 10_000
    assert loads.tolist() == loads_of(costs, owner, num_ranks).tolist()
    assert counts.tolist() == np.bincount(owner, minlength=num_ranks).tolist()
    assert all(after <= max(target, first) for after, first in zip(loads, before, strict=True))


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
