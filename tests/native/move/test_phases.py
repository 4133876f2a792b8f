"""The minimal-move kernels of several phases against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import dominant_phases, order_by_phase
from orchdata.native.move.phases import move_by_phase, place_by_phase, release_by_phase

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

held_samples = st.integers(1, 6).flatmap(
    lambda num_ranks: st.tuples(
        st.just(num_ranks),
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(1, 30), st.integers(0, num_ranks - 1)),
            max_size=30,
        ),
    )
)
Held = tuple[int, list[tuple[int, int, int, int]]]


def arrays(samples: list[tuple[int, int, int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Costs (num_samples, 3) and who holds each."""
    table = np.array(samples, np.int64).reshape(-1, 4)
    return np.ascontiguousarray(table[:, :3]), table[:, 3].astype(np.int32)


@given(held_samples, st.integers(0, 2), st.integers(0, 60))
def test_a_rank_releases_the_largest_that_fit_into_its_excess_then_the_smallest(
    held: Held, phase: int, target: int
) -> None:
    num_ranks, samples = held
    costs, owner = arrays(samples)
    expected = owner.copy()
    for rank in range(num_ranks):
        mine = sorted(np.flatnonzero((owner == rank) & (costs[:, phase] > 0)), key=lambda s: (-costs[s, phase], s))
        excess = int(costs[mine, phase].sum()) - target
        for sample in mine:
            if costs[sample, phase] <= excess:
                expected[sample] = -1
                excess -= int(costs[sample, phase])
        for sample in reversed(mine):
            if excess > 0 and expected[sample] >= 0:
                expected[sample] = -1
                excess -= int(costs[sample, phase])
    loads = phase_loads(costs, owner, num_ranks)
    release_by_phase(costs, owner, loads, np.full(3, target), phase)
    assert owner.tolist() == expected.tolist()
    assert loads.tolist() == phase_loads(costs, owner, num_ranks).tolist()


@given(held_samples, st.integers(1, 4), st.integers(0, 80), st.integers(0, 2**8 - 1))
def test_a_released_sample_goes_where_it_causes_the_least_excess(
    held: Held, ranks_per_node: int, target: int, free: int
) -> None:
    num_ranks, samples = held
    costs, start = arrays(samples)
    owner = np.where((free >> (np.arange(len(start)) % 8)) & 1, np.int32(-1), start).astype(np.int32)
    loads, expected = phase_loads(costs, owner, num_ranks), owner.copy()
    books = loads.copy()
    phase = dominant_phases(costs, 2)
    for sample in order_by_phase(costs, phase, 2):
        if expected[sample] >= 0:
            continue

        def key(rank: int, sample: int = sample) -> tuple[int, int, int]:
            above = int(np.maximum(0, books[rank] + costs[sample] - target).sum())
            return above, int(books[rank, phase[sample]]), rank

        near = min(key(rank) for rank in range(num_ranks) if rank // ranks_per_node == start[sample] // ranks_per_node)
        _, _, rank = near if near[0] == 0 else min(map(key, range(num_ranks)))
        expected[sample] = rank
        books[rank] += costs[sample]
    place_by_phase(costs, start, owner, loads, np.full(3, target), ranks_per_node, 2)
    assert owner.tolist() == expected.tolist()
    assert loads.tolist() == books.tolist()


@given(held_samples, st.integers(1, 4))
def test_what_is_within_the_targets_stays(held: Held, ranks_per_node: int) -> None:
    num_ranks, samples = held
    costs, owner = arrays(samples)
    targets = phase_loads(costs, owner, num_ranks).max(axis=0)
    assert move_by_phase(costs, owner, num_ranks, ranks_per_node, 2, targets, 10_000).tolist() == owner.tolist()
