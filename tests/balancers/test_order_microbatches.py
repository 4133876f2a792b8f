"""1F1B order: hand-worked schedules, near brute force, better than random, the same everywhere, clear errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers.microbatches import order_microbatches, simulate_1f1b
from orchdata.native.microbatches.pipeline import run_all

Times = NDArray[np.float64]


@st.composite
def times(draw: st.DrawFn) -> tuple[Times, Times]:
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 9)))
    time = draw(st.sampled_from([st.integers(0, 9).map(float), st.floats(0, 1e3)]))
    rows = st.lists(time, min_size=2 * shape[0] * shape[1], max_size=2 * shape[0] * shape[1])
    both = np.array(draw(rows)).reshape(2, *shape)
    return both[0], both[1]


def heterogeneous(
    kind: str, num_stages: int, num_microbatches: int, generator: np.random.Generator
) -> tuple[Times, Times]:
    """Backward takes twice the forward. The mean time of a microbatch on a stage is about 1."""
    forward = 1 + 0.02 * generator.random((num_stages, num_microbatches))
    if kind == "encoder":  # Stage 0 holds an encoder whose work is log-normal.
        encoder = generator.lognormal(0, 1, num_microbatches)
        forward[0] = encoder / encoder.mean()
    elif kind == "images":  # Or runs over few images, and none in about two of three microbatches.
        forward[0] = 0.1 + 2 * generator.poisson(1.0, num_microbatches) * (generator.random(num_microbatches) < 0.5)
    else:  # All stages differ with the tokens of the microbatch.
        tokens = generator.lognormal(0, 0.5, num_microbatches)
        forward *= tokens / tokens.mean()
    return forward, 2 * forward


@njit  # Not cached: a cached caller would keep an older run_all.
def brute_force(forward: Times, backward: Times, num_stages: int) -> float:
    """Least makespan over all orders (Heap's algorithm)."""
    count = forward.shape[0] // num_stages
    order, swaps, ends = np.arange(count), np.zeros(count, np.int64), np.empty(num_stages)
    least = run_all(forward, backward, order, ends)
    place = 1
    while place < count:
        if swaps[place] < place:
            other = 0 if place % 2 == 0 else swaps[place]
            order[place], order[other] = order[other], order[place]
            least = min(least, run_all(forward, backward, order, ends))
            swaps[place] += 1
            place = 1
        else:
            swaps[place] = 0
            place += 1
    return least


def test_two_stages_two_microbatches() -> None:
    forward, backward = [[1, 3], [2, 1]], [[2, 1], [4, 2]]
    # stage 0 | F0 0-1 | F1 1-4 |          | B0 7-9 | B1 10-11 |
    # stage 1 |        | F0 1-3 | B0 3-7 | F1 7-8 | B1 8-10 |
    assert simulate_1f1b(forward, backward) == 11
    # stage 0 | F1 0-3 | F0 3-4 | B1 6-7 |         | B0 12-14 |
    # stage 1 |        | F1 3-4 | B1 4-6 | F0 6-8 | B0 8-12 |
    assert simulate_1f1b(forward, backward, [1, 0]) == 14
    found = order_microbatches(forward, backward)
    assert found.order.tolist() == [0, 1]
    # Stage 1 works for 9, and waits for 1 before (microbatch 0 comes down) and for 1 after (1 goes up).
    assert (found.makespan, found.lower_bound) == (11, 11)


def test_three_stages_four_microbatches_alternate() -> None:
    forward, backward = np.ones((3, 4)), np.ones((3, 4))
    # Of each microbatch the last stage runs F and B, two slots each from 2 on: B3 ends at 2 + 8, and 2 more go up.
    assert simulate_1f1b(forward, backward) == 12
    forward[0, 3] = 4
    # stage 0 | F0 0-1 | F1 1-2 | F2 2-3 | B0 5-6 | F3 6-10 | B1 10-11 | B2 12-13 | B3 14-15 |
    # stage 1 | F0 1-2 | F1 2-3 | B0 4-5 | F2 5-6 | B1 6-7 | F3 10-11 | B2 11-12 | B3 13-14 |
    # stage 2 | F0 2-3 | B0 3-4 | F1 4-5 | B1 5-6 | F2 6-7 | B2 7-8 | F3 11-12 | B3 12-13 |
    # B2 could run on stage 1 from 8 on, but F3 comes before it there.
    assert simulate_1f1b(forward, backward) == 15


@given(times())
def test_the_order_is_a_permutation_and_its_makespan_true(case: tuple[Times, Times]) -> None:
    found = order_microbatches(*case)
    assert found.order.dtype == np.int32
    assert sorted(found.order.tolist()) == list(range(case[0].shape[1]))
    assert found.makespan == simulate_1f1b(*case, found.order)
    assert found.lower_bound <= found.makespan <= simulate_1f1b(*case)
    assert found.makespan <= simulate_1f1b(*case, order_after_disttrain(*case))


@pytest.mark.parametrize("num_stages", [4, 6, 8])
def test_within_a_hundredth_of_brute_force(num_stages: int) -> None:
    generator = np.random.default_rng(num_stages)
    ratios = []
    for kind in ("encoder", "images", "tokens") * 4:
        forward, backward = heterogeneous(kind, num_stages, 8, generator)
        least = brute_force(forward.T.ravel(), backward.T.ravel(), num_stages)
        found = order_microbatches(forward, backward)
        assert found.lower_bound <= least * (1 + 1e-12)
        ratios.append(found.makespan / least)
    assert min(ratios) >= 1
    assert np.mean(ratios) <= 1.002
    assert max(ratios) <= 1.01


@pytest.mark.parametrize(("kind", "gain"), [("encoder", 0.10), ("images", 0.10), ("tokens", 0.20)])
def test_beats_random_orders_on_eight_stages(kind: str, gain: float) -> None:
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(5):
        forward, backward = heterogeneous(kind, 8, 32, generator)
        random = np.mean([simulate_1f1b(forward, backward, generator.permutation(32)) for _ in range(50)])
        shares.append(order_microbatches(forward, backward).makespan / random)
    assert np.mean(shares) <= 1 - gain


def test_equal_on_repeats_and_for_other_layouts() -> None:
    forward, backward = heterogeneous("encoder", 4, 12, np.random.default_rng(1))
    first = order_microbatches(forward, backward)
    for _ in range(20):
        assert order_microbatches(forward, backward).order.tobytes() == first.order.tobytes()
    columns = order_microbatches(np.asfortranarray(forward), np.repeat(backward, 2, axis=1)[:, ::2])
    assert columns.order.tobytes() == first.order.tobytes()
    assert order_microbatches(forward.tolist(), backward.tolist()).makespan == first.makespan


def test_whole_numbers_up_to_the_limit_are_exact() -> None:
    # One stage adds all up: 2**53 - 1 is odd, so a lost last bit would show.
    assert simulate_1f1b([[2**52 - 1, 1]], [[2**51, 2**51 - 1]]) == 2**53 - 1
    found = order_microbatches([[2**52 - 1, 1]], [[2**51, 2**51 - 1]])
    assert found.makespan == found.lower_bound == 2**53 - 1


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ([[1, 2]], [[1, 2, 3]], r"must have one shape .*, got \(1, 2\) and \(1, 3\)"),
        ([1, 2], [1, 2], r"forward_times must have shape \(num_stages, num_microbatches\) .*, got \(2,\)"),
        (np.zeros((3, 0)), np.zeros((3, 0)), r"with at least one of each, got \(3, 0\)"),
        ([[1, float("nan")]], [[1, 1]], r"forward_times\[0, 1\] is nan; it must be a finite number of at least 0"),
        ([[1], [-2]], [[1], [1]], r"forward_times\[1, 0\] is -2; it must be a finite number of at least 0"),
    ],
)
def test_errors_name_value_and_limit(forward: object, backward: object, message: str) -> None:
    for function in (simulate_1f1b, order_microbatches):
        with pytest.raises(ValueError, match=message):
            function(forward, backward)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1], r"order must have 3 integers, one a microbatch, got shape \(2,\)"),
        ([0, 0, 2], r"order must be a permutation of 0..2, but has 0 2 times"),
    ],
)
def test_an_order_must_be_a_permutation(order: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_1f1b(np.ones((2, 3)), np.ones((2, 3)), order)  # type: ignore[arg-type]
