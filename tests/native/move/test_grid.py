"""The kernels that move little in a grid, against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps
from orchdata.native.move.grid import move_in_grid, place_in_grid

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Samples = list[tuple[int, int, int]]
samples_of_ranks = st.integers(1, 7).flatmap(
    lambda num_ranks: st.tuples(
        st.just(num_ranks),
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(0, num_ranks - 1)), max_size=30),
    )
)


def arrays(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Columns (num_samples, 2) and who holds each."""
    table = np.array(samples, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(table[:, :2]), table[:, 2].astype(np.int32)


@given(samples_of_ranks, st.integers(1, 4), st.integers(0, 90), st.integers(0, 2**8 - 1))
def test_a_released_sample_goes_to_its_node_without_excess_else_to_its_column_or_node_with_the_least(
    held: tuple[int, Samples], ranks_per_node: int, target: int, free: int
) -> None:
    num_ranks, samples = held
    columns, home = arrays(samples)
    owner = np.where((free >> (np.arange(len(home)) % 8)) & 1, np.int32(-1), home).astype(np.int32)
    loads, expected = phase_loads(columns, owner, num_ranks), owner.copy()
    books = loads.copy()
    for sample in range(len(home)):
        if expected[sample] >= 0:
            continue

        def key(rank: int, sample: int = sample) -> tuple[int, int, int]:
            above = int(np.maximum(0, books[rank] + columns[sample] - target).sum())
            return above, int(books[rank, 1]), rank

        node, place = divmod(int(home[sample]), ranks_per_node)
        near = min(key(rank) for rank in range(num_ranks) if rank // ranks_per_node == node)
        far = min(key(rank) for rank in range(num_ranks) if rank % ranks_per_node == place)
        rank = far[2] if near[0] > 0 and far[0] < near[0] else near[2]
        expected[sample] = rank
        books[rank] += columns[sample]
    order, phase = np.arange(len(home), dtype=np.int32), np.ones(len(home), np.int32)
    place_in_grid(columns, order, phase, home, owner, loads, np.full(2, target), ranks_per_node)
    assert owner.tolist() == expected.tolist()
    assert loads.tolist() == books.tolist()


def test_ranks_within_targets_and_caps_keep_what_they_hold_and_others_give_up_their_excess() -> None:
    random = np.random.default_rng(3)
    costs = random.integers(1, 100, (512, 2)).astype(np.int64)
    sizes, home = np.ascontiguousarray(costs[:, 1:]), (np.arange(512) // 16).astype(np.int32)
    loads = phase_loads(costs, home, 32)
    wide = loads.max(axis=0)
    stays = move_in_grid(costs, sizes, wide[1:], home, 32, 8, 1, wide, 10**6)
    assert stays.tolist() == home.tolist()
    targets, caps = loads.sum(axis=0) * 103 // 3200, loads[:, 1:].sum(axis=0) * 105 // 3200
    near = move_in_grid(costs, sizes, caps, home, 32, 8, 1, targets, 10**6)
    assert above_caps(sizes, caps, home, 32) > 0 == above_caps(sizes, caps, near, 32)
    assert (phase_loads(costs, near, 32).max(axis=0) <= targets).all()
    assert 0 < (near != home).mean() < 0.4  # Dealt again, 31 of 32 would move.
