"""The 1F1B kernels against plain-Python twins."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchdata.native.microbatches.pipeline import lower_bound, run_all

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
