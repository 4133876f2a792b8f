"""Several phases: never worse than the backbone alone, no sample lost, and better where it can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.distributions import omni_phases
from orchdata.balancers import balance, balance_phases

samples = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30), st.integers(1, 200)), max_size=50)


def phases(rows: list[tuple[int, int, int]]) -> dict[str, NDArray[np.int64]]:
    array = np.array(rows, np.int64).reshape(-1, 3)
    return {"image": array[:, 0], "audio": array[:, 1], "llm": array[:, 2]}


def sum_of_peaks(costs: dict[str, NDArray[np.int64]], rank: NDArray[np.int32], num_ranks: int) -> int:
    return sum(int(np.bincount(rank, weights=cost, minlength=num_ranks).max()) for cost in costs.values())


@pytest.mark.parametrize("equal_count", [False, True])
@given(rows=samples, num_ranks=st.integers(1, 9))
def test_barrier_is_never_worse_than_the_backbone_alone(
    rows: list[tuple[int, int, int]], num_ranks: int, equal_count: bool
) -> None:
    costs = phases(rows)
    found = balance_phases(costs, num_ranks, equal_count=equal_count)
    assert found.phases == ("image", "audio", "llm")
    assert found.rank.shape == (len(rows),)
    assert ((found.rank >= 0) & (found.rank < num_ranks)).all()
    assert found.loads.sum(axis=1).tolist() == [int(cost.sum()) for cost in costs.values()]
    assert sum(found.makespans) == sum_of_peaks(costs, found.rank, num_ranks)
    alone = balance(costs["llm"], num_ranks, equal_count=equal_count)
    assert sum(found.makespans) <= sum_of_peaks(costs, alone.rank, num_ranks)
    assert all(peak >= bound for peak, bound in zip(found.makespans, found.lower_bounds, strict=True))
    if equal_count:
        counts = np.bincount(found.rank, minlength=num_ranks)
        assert counts.max() - counts.min() <= 1


@given(samples, st.integers(1, 9), st.integers(0, 3))
def test_max_samples_holds(rows: list[tuple[int, int, int]], num_ranks: int, spare: int) -> None:
    cap = max(1, -(-len(rows) // num_ranks)) + spare
    rank = balance_phases(phases(rows), num_ranks, max_samples=cap).rank
    assert np.bincount(rank, minlength=num_ranks).max() <= cap


@given(
    rows=samples,
    num_ranks=st.integers(1, 6),
    spare=st.integers(0, 60),
    other=st.integers(0, 300),
    counted=st.sampled_from(["", "equal", "most"]),
    effort=st.sampled_from([0, 0.25, 1, 3.5, 1e12, 1e300]),
)
def test_caps_are_kept_or_an_error_says_what_to_do(
    rows: list[tuple[int, int, int]], num_ranks: int, spare: int, other: int, counted: str, effort: float
) -> None:
    costs = phases(rows)
    sizes = np.stack([costs["llm"] % 41, costs["image"]], axis=1)
    caps = np.maximum(1, -(-sizes.sum(axis=0) // num_ranks) + (spare, other))
    most = max(1, -(-len(rows) // num_ranks)) + 1
    options: dict[str, Any] = {"equal": {"equal_count": True}, "most": {"max_samples": most}}.get(counted, {})
    try:
        found = balance_phases(costs, num_ranks, sizes=sizes, max_size=caps, effort=effort, **options)
    except ValueError as error:
        assert num_ranks > 1
        assert f"within max_size={caps.tolist()} was found: raise it, or take fewer samples" in str(error)
        return
    loads = np.zeros((num_ranks, 2), np.int64)
    np.add.at(loads, found.rank, sizes)
    assert (loads <= caps).all()
    counts = np.bincount(found.rank, minlength=num_ranks)
    assert counted != "equal" or np.ptp(counts) <= 1
    assert counted != "most" or counts.max() <= most
    assert found.loads.sum(axis=1).tolist() == [int(cost.sum()) for cost in costs.values()]
    again = balance_phases(costs, num_ranks, sizes=sizes, max_size=caps, effort=effort, **options)
    assert again.rank.tolist() == found.rank.tolist()


@pytest.mark.parametrize("unit", [1, 2**20, 2**50])
def test_caps_move_samples_that_costs_alone_would_not(unit: int) -> None:
    """Longest first: ranks of 30 have sizes of 6 and 2. Sizes may be operations as well as positions."""
    costs, sizes = {"image": [0] * 6, "llm": [10] * 6}, np.array([3, 1, 1, 1, 1, 1]) * unit
    free = balance_phases(costs, 2).rank
    assert np.bincount(free, weights=sizes).max() > 4 * unit
    found = balance_phases(costs, 2, sizes=sizes, max_size=4 * unit)
    assert np.bincount(found.rank, weights=sizes).tolist() == [4 * unit, 4 * unit]
    with pytest.raises(ValueError, match=r"no assignment to 2 ranks within max_size=\[\d+\] was found: raise it"):
        balance_phases(costs, 2, sizes=sizes, max_size=3 * unit)


@given(samples, st.integers(1, 9), st.sampled_from([0, 0.1, 1, 10.0, 1e12, 1e300]))
def test_every_effort_is_no_worse_than_the_backbone_alone(
    rows: list[tuple[int, int, int]], num_ranks: int, effort: float
) -> None:
    costs = phases(rows)
    found = balance_phases(costs, num_ranks, effort=effort)
    alone = balance(costs["llm"], num_ranks)
    assert sum(found.makespans) <= sum_of_peaks(costs, alone.rank, num_ranks)
    assert balance_phases(costs, num_ranks, effort=effort).rank.tolist() == found.rank.tolist()


def test_effort_is_what_lowers_the_peaks_of_a_crowded_batch() -> None:
    costs = omni_phases(np.random.default_rng(5), 64 * 8)
    peaks = [sum(balance_phases(costs, 64, effort=effort).makespans) for effort in (0, 1)]
    assert peaks[1] < 0.98 * peaks[0]


def test_ranks_that_are_nearly_full_come_close_to_the_bounds() -> None:
    """All ranks are filled to 95 % by large and small samples."""
    random, cap, num_ranks = np.random.default_rng(0), 4096, 64
    sizes: list[int] = []
    for _ in range(num_ranks):
        left = cap * 95 // 100
        while left > 0:
            sizes.append(min(left, int(random.pareto(1.2) * 200) + 100))
            left -= sizes[-1]
    size = np.array(sizes)
    image = np.where(random.random(len(size)) < 0.4, random.integers(100, 3000, len(size)), 0)
    costs = {"image": image, "llm": 4 * size + size * size // 4000}
    found = balance_phases(costs, num_ranks, sizes=size, max_size=cap)
    assert np.bincount(found.rank, weights=size).max() <= cap
    assert sum(found.makespans) <= 1.25 * sum(found.lower_bounds)


@given(samples, st.integers(1, 9))
def test_sum_balances_what_phases_cost_together(rows: list[tuple[int, int, int]], num_ranks: int) -> None:
    costs = phases(rows)
    found = balance_phases(costs, num_ranks, objective="sum")
    together = sum(costs.values())
    assert found.rank.tolist() == balance(together, num_ranks).rank.tolist()
    assert found.loads.sum(axis=0).max(initial=0) == balance(together, num_ranks).makespan


@given(samples, st.integers(1, 9))
def test_per_phase_balances_each_alone(rows: list[tuple[int, int, int]], num_ranks: int) -> None:
    costs = phases(rows)
    found = balance_phases(costs, num_ranks, assignment="per_phase")
    for index, cost in enumerate(costs.values()):
        alone = balance(cost, num_ranks)
        assert found.rank[index].tolist() == alone.rank.tolist()
        assert found.loads[index].tolist() == alone.loads.tolist()


@pytest.mark.parametrize(("num_ranks", "limit"), [(8, 1.02), (64, 1.02), (512, 1.03)])
def test_mixture_comes_close_to_the_bound_of_every_phase(num_ranks: int, limit: float) -> None:
    costs = omni_phases(np.random.default_rng(5), num_ranks * 16)
    found = balance_phases(costs, num_ranks)
    alone = sum_of_peaks(costs, balance(costs["llm"], num_ranks).rank, num_ranks)
    assert sum(found.makespans) <= limit * sum(found.lower_bounds) < alone


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ({"image": [1]}, {}, "needs the primary phase 'llm', got image"),
        ({"image": [1, 2], "llm": [1]}, {}, "one cost for each sample, got {'image': 2, 'llm': 1}"),
        ({"image": [-1], "llm": [1]}, {}, r"costs of image\[0\] is -1"),
        ({"image": [0, 0], "llm": [1, 0]}, {}, "sample 1 costs 0 in every phase"),
        ({"image": [2**62], "llm": [1]}, {}, r"above the limit of 2\*\*62"),
        ({"llm": [1]}, {"assignment": "both"}, "assignment must be 'joint' or 'per_phase', got 'both'"),
        ({"llm": [1]}, {"objective": "max"}, "objective must be 'barrier' or 'sum', got 'max'"),
        ({"llm": [1]}, {"sizes": [1]}, "sizes and max_size go together: give both, or neither"),
        ({"llm": [1]}, {"sizes": [1], "max_size": 1, "objective": "sum"}, "got 'joint' under 'sum': use split_micro"),
        ({"llm": [1]}, {"sizes": [1], "max_size": 1, "assignment": "per_phase"}, "got 'per_phase' under 'barrier'"),
        ({"llm": [1]}, {"sizes": [1], "max_size": 0}, "max_size must be at least 1, got 0"),
        ({"llm": [1]}, {"sizes": [2], "max_size": 1}, r"within max_size=\[1\] was found"),
        *(
            ({"llm": [1]}, {"effort": effort}, f"effort must be a finite number of at least 0, got {effort!r}")
            for effort in (-1, -0.5, float("inf"), float("nan"), True, "1")
        ),
    ],
)
def test_errors(costs: dict[str, list[int]], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_phases(costs, 2, **options)  # type: ignore[arg-type]
