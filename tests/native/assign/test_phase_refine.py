"""The refinement kernels of several phases: against plain-Python twins, and what no exchange may break."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.assign.phase_refine import (
    best_joint_exchange,
    excess,
    joint_exchange,
    peaks_above,
    phase_loads,
    raise_targets,
    rank_lightest,
    refine_phases,
)
from orchdata.native.assign.phases import above_caps, refine_within
from orchdata.native.assign.ranking import SLACK, list_members

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


def exchange_twin(
    columns: Ints, above: Ints, heavy: int, held: list[int], light: int, offered: list[int], column: int, moves: bool
) -> tuple[int, int, int]:
    """Of all moves (-1) and swaps the first with the least larger excess of both, below that of `heavy`."""
    best = (int(np.maximum(0, above[heavy]).sum()), -1, -1)
    for index, given_ in enumerate(held):
        for other in range(-1 if moves else 0, len(offered)):
            change = columns[given_] - (columns[offered[other]] if other >= 0 else 0)
            left, added = np.maximum(0, above[heavy] - change), np.maximum(0, above[light] + change)
            kept = (left[PHASES:] <= np.maximum(0, above[heavy, PHASES:])).all()
            kept &= (added[PHASES:] <= np.maximum(0, above[light, PHASES:])).all()
            reached = int(max(left.sum(), added.sum()))
            if change[column] > 0 and kept and reached < best[0]:
                best = (reached, index, other)
    return best


@settings(max_examples=300)
@given(shared, st.lists(st.one_of(st.integers(0, 20), st.integers(0, 120)), min_size=4, max_size=4), st.booleans())
def test_the_best_exchange_equals_its_twin(held: Shared, targets: list[int], moves: bool) -> None:
    _, rows = held
    columns, owner = arrays(rows)
    above = phase_loads(columns, owner, 5) - np.array(targets)
    mine, theirs = np.flatnonzero(owner == 0).astype(np.int32), np.flatnonzero(owner == 1).astype(np.int32)
    for column in range(PHASES + CAPS):
        twin = exchange_twin(columns, above, 0, mine.tolist(), 1, theirs.tolist(), column, moves)
        ceiling, offers = int(excess(above, 0)), np.empty(max(1, len(theirs)), np.int64)
        found = best_joint_exchange(columns, PHASES, above, 0, mine, 1, theirs, column, moves, ceiling, -1, offers)
        assert found[:3] == twin
        # The first that is good enough is taken: at most as good.
        enough = best_joint_exchange(
            columns, PHASES, above, 0, mine, 1, theirs, column, moves, ceiling, twin[0] + 9, offers
        )
        assert twin[0] <= enough[0] <= max(ceiling, twin[0] + 9) and enough[3] <= found[3]


def test_an_exchange_that_wins_little_is_found_too() -> None:
    """All of two samples against one, where a single unit may be all there is to win."""
    mine, theirs, offers = np.array([0, 1], np.int32), np.array([2], np.int32), np.empty(1, np.int64)
    for *costs, target in product(range(1, 5), range(1, 5), range(5), range(9)):
        columns = np.array([[cost, 0, 0, 0] for cost in costs])
        above = phase_loads(columns, np.array([0, 0, 1], np.int32), 2) - target
        ceiling = int(excess(above, 0))
        twin = exchange_twin(columns, above, 0, [0, 1], 1, [2], 0, True)
        found = best_joint_exchange(columns, PHASES, above, 0, mine, 1, theirs, 0, True, ceiling, -1, offers)
        assert found[:3] == twin


@given(shared, st.integers(0, 80))
def test_excess_and_peaks_are_of_what_is_above_the_targets(held: Shared, target: int) -> None:
    num_ranks, rows = held
    columns, owner = arrays(rows)
    above = phase_loads(columns, owner, num_ranks) - target
    loads = [[sum(row[c] for row in rows if row[-1] == rank) - target for c in range(4)] for rank in range(num_ranks)]
    assert [excess(above, rank) for rank in range(num_ranks)] == [sum(max(0, x) for x in row) for row in loads]
    peaks = [max(row[c] for row in loads) for c in range(4)]
    assert peaks_above(above, PHASES) == sum(peaks[:PHASES]) + sum(max(0, peak) for peak in peaks[PHASES:])
    first = np.full(4, -1)
    lightest = np.empty((4, num_ranks), np.int64)
    assert rank_lightest(above, 1, lightest, first).tolist() == sorted(range(num_ranks), key=lambda r: loads[r][1])
    before = above.copy()
    raised = [max(0, load) for load in loads[0][:PHASES]]
    assert raise_targets(above, PHASES, 0) == sum(raised)
    assert (before - above).tolist() == [[*raised, 0, 0]] * num_ranks


@given(shared, st.data())
def test_an_exchange_is_in_all_books(held: Shared, data: st.DataObject) -> None:
    num_ranks, rows = held
    columns, owner = arrays(rows)
    counts = np.bincount(owner, minlength=num_ranks).astype(np.int32)
    offsets, places = list_members(owner, counts, SLACK)
    above = phase_loads(columns, owner, num_ranks)
    for _ in range(SLACK):
        heavy = data.draw(st.sampled_from(sorted(set(owner.tolist()))))
        light = data.draw(st.integers(0, num_ranks - 1).filter(lambda rank, heavy=heavy: rank != heavy))
        index, other = data.draw(st.integers(0, counts[heavy] - 1)), data.draw(st.integers(-1, counts[light] - 1))
        joint_exchange(columns, owner, above, counts, offsets, places, heavy, index, light, other)
        assert above.tolist() == phase_loads(columns, owner, num_ranks).tolist()
        assert counts.tolist() == np.bincount(owner, minlength=num_ranks).tolist()
        for rank in range(num_ranks):
            mine = places[offsets[rank] : offsets[rank] + counts[rank]]
            assert sorted(mine.tolist()) == np.flatnonzero(owner == rank).tolist()


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


@given(shared, st.lists(st.integers(1, 200), min_size=2, max_size=2), st.integers(-1, 8), st.integers(0, 99))
def test_refining_within_caps_keeps_them(held: Shared, caps: list[int], limit: int, target: int) -> None:
    num_ranks, rows = held
    columns, owner = arrays(rows)
    costs, sizes = np.ascontiguousarray(columns[:, :PHASES]), np.ascontiguousarray(columns[:, PHASES:])
    start, limits = owner.copy(), np.array(caps)
    above = above_caps(sizes, limits, owner, num_ranks)
    before = phase_loads(sizes, owner, num_ranks)
    assert above == sum(
        1 + int((load - cap) / cap * (1 << 20))
        for load, cap in zip(before.T, caps, strict=True)
        for load in load
        if load > cap
    )
    refine_within(costs, sizes, limits, owner, num_ranks, np.full(PHASES, target), limit, 100_000)
    after = phase_loads(sizes, owner, num_ranks)
    assert (after <= np.maximum(limits, before)).all()
    assert above_caps(sizes, limits, owner, num_ranks) <= above
    if limit < 0:
        assert np.bincount(owner, minlength=num_ranks).tolist() == np.bincount(start, minlength=num_ranks).tolist()


@pytest.mark.parametrize("spare", [1, 2**20, 2**42, 2**44 - 1, 2**44, 2**60])
def test_what_is_above_a_cap_is_never_nothing(spare: int) -> None:
    """Costs in operations are as large."""
    for cap in (1, 2**20, 2**30):
        sizes = np.array([[cap + spare]])
        assert above_caps(sizes, np.array([cap]), np.zeros(1, np.int32), 1) > 0
