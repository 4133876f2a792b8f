"""The 1F1B kernels against plain-Python twins."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.microbatches.pipeline import fill_intervals, largest_others, lower_bound, run_all
from orchdata.native.microbatches.pipeline_search import draw, insert, write_start

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

Rows = list[list[float]]


@st.composite
def times(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 12, floats: bool = True) -> tuple[Rows, Rows]:
    """Forward and backward times, a list of microbatches for each stage; zeros included."""
    stages, count = draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches))
    whole = st.integers(0, 9).map(float)
    time = st.one_of(whole, st.floats(0, 100)) if floats else whole
    rows = st.lists(st.lists(time, min_size=count, max_size=count), min_size=stages, max_size=stages)
    return draw(rows), draw(rows)


def flat(rows: Rows) -> NDArray[np.float64]:
    return np.array(rows, np.float64).T.ravel()


def makespan(forward: Rows, backward: Rows, order: list[int]) -> float:
    return float(run_all(flat(forward), flat(backward), np.array(order), np.empty(len(forward))))


def operations(stage: int, num_stages: int, count: int) -> list[tuple[str, int]]:
    """What a stage runs, in order: warm-up forwards, one forward and one backward in turn, the other backwards."""
    warm_up = min(num_stages - stage - 1, count)
    listed = [("forward", position) for position in range(warm_up)]
    for position in range(warm_up, count):
        listed += [("forward", position), ("backward", position - warm_up)]
    return listed + [("backward", position) for position in range(count - warm_up, count)]


def makespan_twin(forward: Rows, backward: Rows, order: list[int]) -> float:
    """Run all that is ready, stage by stage, until all is done; without slots."""
    num_stages, count = len(forward), len(order)
    queues = [operations(stage, num_stages, count) for stage in range(num_stages)]
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, position = queue[0]
                needs: tuple[str, int, int] | None = (kind, stage + (1 if kind == "backward" else -1), position)
                if needs == ("forward", -1, position):
                    needs = None
                elif needs == ("backward", num_stages, position):
                    needs = ("forward", stage, position)
                if needs is not None and needs not in ends:
                    break
                time = (forward if kind == "forward" else backward)[stage][order[position]]
                free[stage] = max(free[stage], ends[needs] if needs else 0.0) + time
                ends[kind, stage, position] = free[stage]
                queue.pop(0)
    return max(free)


@given(times(max_stages=9), st.randoms(use_true_random=False))
def test_makespan_equals_its_twin(case: tuple[Rows, Rows], random: Random) -> None:
    order = list(range(len(case[0][0])))
    random.shuffle(order)
    assert makespan(*case, order) == makespan_twin(*case, order)


@given(times(max_stages=5, max_microbatches=5, floats=False))
def test_no_order_is_below_the_bound(case: tuple[Rows, Rows]) -> None:
    forward, backward = case
    bound = lower_bound(flat(forward), flat(backward), len(forward))
    least = min(makespan(forward, backward, list(order)) for order in permutations(range(len(forward[0]))))
    assert bound <= least
    # And it is not weaker than the simple one: a stage's work, the least way down to it and the least way up from it.
    down, up = np.zeros(len(forward[0])), np.zeros(len(forward[0]))
    for forwards, backwards in zip(forward, backward, strict=True):
        assert bound >= down.min() + sum(forwards) + sum(backwards) + up.min()
        down += forwards
        up += backwards


@pytest.mark.parametrize("count", [1, 4])
def test_the_bound_is_met_where_microbatches_are_equal(count: int) -> None:
    # One microbatch passes 3 stages down and up: 3 + 3 * 2. Each further one costs the last stage 1 + 2.
    forward, backward = [[1.0] * count] * 3, [[2.0] * count] * 3
    assert lower_bound(flat(forward), flat(backward), 3) == 9 + 3 * (count - 1)
    assert makespan(forward, backward, list(range(count))) == 9 + 3 * (count - 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 9))
def test_largest_others_leaves_out_itself(values: list[int], count: int) -> None:
    sums = largest_others(np.array(values, np.float64), count)
    for index, found in enumerate(sums):
        others = sorted(values[:index] + values[index + 1 :], reverse=True)
        assert found == sum(others[:count])


def fill_intervals_twin(forward: Rows, backward: Rows, ascending: list[int]) -> list[int]:
    """After DistTrain, each interval from a new simulation of the schedule."""
    num_stages, count = len(forward), len(ascending)
    tail = min(num_stages - 1, count - 1)
    order, left = ascending[:1], ascending[tail + 1 :]
    room = 0.0
    for stage in range(1, num_stages):
        room += forward[stage][order[0]] + backward[stage][order[0]]
    while left:
        position = len(order)
        warm = position < num_stages
        interval = room / (num_stages - position) if warm else interval_twin(forward, backward, order)
        best = min(left, key=lambda m: (abs(forward[0][m] - interval), left.index(m)))
        left.remove(best)
        order.append(best)
        room -= forward[0][best]
    return order + ascending[1 : tail + 1][::-1]


def interval_twin(forward: Rows, backward: Rows, order: list[int]) -> float:
    """How long stage 0, once it has returned what precedes the next forward, waits for stage 1's next backward."""
    num_stages, position = len(forward), len(order)
    if num_stages == 1:
        return 0.0
    # The recurrence itself, operation by operation.
    seen: dict[tuple[str, int, int], float] = {}

    def end(kind: str, stage: int, place: int) -> float:
        if (kind, stage, place) not in seen:
            warm_up = num_stages - stage - 1
            starts = [0.0]
            if kind == "forward":
                starts += [end("forward", stage - 1, place)] if stage else []
                if place > warm_up:
                    starts.append(end("backward", stage, place - warm_up - 1))
                elif place:
                    starts.append(end("forward", stage, place - 1))
            else:
                starts.append(end("backward", stage + 1, place) if warm_up else end("forward", stage, place))
                starts.append(end("forward", stage, place + warm_up))
            rows = forward if kind == "forward" else backward
            seen[kind, stage, place] = max(starts) + rows[stage][order[place]]
        return seen[kind, stage, place]

    return end("backward", 1, position - num_stages + 1) - end("backward", 0, position - num_stages)


@given(times())
def test_fill_intervals_equals_its_twin(case: tuple[Rows, Rows]) -> None:
    forward, backward = case
    count = len(forward[0])
    sizes = [sum(row[m] for row in forward + backward) for m in range(count)]
    ascending = sorted(range(count), key=lambda m: (sizes[m], m))
    found = fill_intervals(flat(forward), flat(backward), np.array(ascending), len(forward))
    assert found.tolist() == fill_intervals_twin(forward, backward, ascending)


@given(st.integers(0, 15), st.integers(1, 12), st.integers(1, 9))
def test_every_start_is_a_permutation(index: int, count: int, num_stages: int) -> None:
    out = np.arange(count)
    write_start(index, np.arange(count)[::-1].copy(), num_stages, np.array([7]), out)
    assert sorted(out.tolist()) == list(range(count))


def test_starts_have_their_shapes() -> None:
    out, state = np.arange(6), np.array([7])
    shapes = []
    for index in range(6):
        write_start(index, np.arange(6), 4, state, out)
        shapes.append(out.tolist())
    assert shapes == [
        [0, 1, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
        [0, 2, 4, 5, 3, 1],  # Pyramid.
        [5, 3, 1, 0, 2, 4],  # Valley.
        [0, 5, 4, 3, 2, 1],  # One kept for the tail.
        [0, 5, 4, 3, 2, 1],  # Two kept for the tail.
    ]


@given(st.integers(1, 9), st.data())
def test_insert_is_undone_by_its_reverse(count: int, data: st.DataObject) -> None:
    source, target = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    order = np.arange(count)
    insert(order, source, target)
    expected = [m for m in range(count) if m != source]
    expected.insert(target, source)
    assert order.tolist() == expected
    insert(order, target, source)
    assert order.tolist() == list(range(count))


def test_draws_are_xorshift32_and_even() -> None:
    state = np.array([1])
    assert draw(state, 2) == 270369 * 2 >> 32
    assert state[0] == 270369  # Marsaglia's first number from 1, with shifts 13, 17, 5.
    counts = np.bincount([draw(state, 10) for _ in range(10_000)])
    assert counts.min() > 900
    assert counts.max() < 1100
