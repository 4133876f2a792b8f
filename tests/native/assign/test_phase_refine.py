"""The refinement kernels of several phases: against plain-Python twins, and what no exchange may break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import (
    phase_loads,
    refine_phases,
)
from orchdata.native.assign.phases import above_caps

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

PHASES, CAPS = 2, 2
cells = st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 50))
shared = st.integers(2, 5).flatmap(
    lambda num_ranks: st.tuples(
        st.just(num_ranks),
        st.lists(
            st.tuples(*[cells] * (PHASES + CAPS), st.integers(0, num_ranks - 1)),
            min_size=1,
            max_size=30,
        ),
    )
)
Shared = tuple[int, list[tuple[int, ...]]]


def arrays(rows: list[tuple[int, ...]]) -> tuple[Ints, Ranks]:
    """Costs and sizes (num_samples, 4), and who holds each."""
    table = np.array(rows, np.int64)
    return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int32)


@given(
    held=shared,
    targets=st.lists(st.integers(0, 150), min_size=4, max_size=4),
    limit=st.integers(-1, 8),
    window=st.sampled_from([1, 4, 16]),
    raising=st.booleans(),
    budget=st.sampled_from([0, 500, 100_000]),
)
def test_no_exchange_breaks_a_cap_or_a_limit(
    held: Shared, targets: list[int], limit: int, window: int, raising: bool, budget: int
) -> None:
    num_ranks, rows = held
    columns, owner = arrays(rows)
    start, goals = owner.copy(), np.array(targets)
    before = phase_loads(columns, owner, num_ranks)
    left = refine_phases(columns, PHASES, owner, num_ranks, goals.copy(), limit, window, raising, budget)
    assert left <= budget
    after = phase_loads(columns, owner, num_ranks)
    assert after.sum(axis=0).tolist() == before.sum(axis=0).tolist()
    assert (after[:, PHASES:] <= np.maximum(goals, before)[:, PHASES:]).all()  # Kept once kept, and else no worse.
    counts, held_before = (np.bincount(ranks, minlength=num_ranks) for ranks in (owner, start))
    assert (counts == held_before if limit < 0 else counts <= np.maximum(limit, held_before)).all()
    if budget == 0:
        assert owner.tolist() == start.tolist()
    if not raising:
        worst = [int(np.maximum(0, loads - goals).sum(axis=1).max()) for loads in (after, before)]
        assert worst[0] <= worst[1]


@pytest.mark.parametrize("spare", [1, 2**20, 2**42, 2**44 - 1, 2**44, 2**60])
def test_what_is_above_a_cap_is_never_nothing(spare: int) -> None:
    """Costs in operations are as large."""
    for cap in (1, 2**20, 2**30):
        sizes = np.array([[cap + spare]])
        assert above_caps(sizes, np.array([cap]), np.zeros(1, np.int32), 1) > 0
