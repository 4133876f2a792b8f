"""Pinned samples stay, the others are balanced next to them, within the caps: against all assignments of 8 samples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from orchdata.balancers import balance, balance_phases, lower_bound, split_microbatches

Ints = NDArray[np.int64]
SAMPLES = 8
CASES = 40


class Case(NamedTuple):
    """Samples with costs (SAMPLES, phases) and sizes, pins, and the most that a rank or microbatch may hold."""

    num_ranks: int
    costs: Ints
    sizes: Ints
    pinned: NDArray[np.int32]
    cap: int

    @property
    def by_phase(self) -> dict[str, Ints]:
        return {"encoder": self.costs[:, 0], "llm": self.costs[:, 1]}


def a_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 5))
    costs, sizes = rng.lognormal(4, 1, (SAMPLES, 2)).astype(np.int64) + 1, rng.integers(1, 50, SAMPLES)
    pinned = np.where(rng.random(SAMPLES) < 0.4, rng.integers(0, num_ranks, SAMPLES), -1).astype(np.int32)
    pinned[0] = rng.integers(0, num_ranks)
    smallest = min(sums(sizes, rank, num_ranks).max() for rank in all_ways(pinned, num_ranks))
    return Case(num_ranks, costs, sizes, pinned, int(smallest + rng.integers(0, 8)))


def all_ways(pinned: NDArray[np.int32], number: int) -> list[NDArray[np.int32]]:
    """All ranks, or microbatches, that samples could have."""
    return [np.array(way) for way in product(*(range(number) if pin < 0 else [pin] for pin in pinned.tolist()))]


def sums(values: Ints, place: NDArray[np.int32], number: int) -> Ints:
    return np.bincount(place, values, number).astype(np.int64)


def peaks(case: Case, rank: NDArray[np.int32]) -> list[int]:
    return [int(sums(column, rank, case.num_ranks).max()) for column in case.costs.T]


def check_kept(case: Case, rank: NDArray[np.int32], cap: int) -> None:
    stays = case.pinned >= 0
    assert rank[stays].tolist() == case.pinned[stays].tolist(), "a pinned sample moved"
    assert sums(case.sizes, rank, case.num_ranks).max() <= cap, "a rank is above the cap"


def counts(case: Case, rank: NDArray[np.int32]) -> Ints:
    return np.bincount(rank, minlength=case.num_ranks)


def one_phase(case: Case, **limits: Any) -> tuple[NDArray[np.int32], int, int]:
    found = balance(case.costs[:, 1], case.num_ranks, pinned=case.pinned, **limits)
    return found.rank, found.makespan, found.lower_bound


def two_phases(case: Case, **limits: Any) -> tuple[NDArray[np.int32], int, int]:
    found = balance_phases(case.by_phase, case.num_ranks, pinned=case.pinned, **limits)
    return found.rank, sum(found.makespans), sum(found.lower_bounds)


def in_sum(case: Case) -> tuple[NDArray[np.int32], int, int]:
    found = balance_phases(case.by_phase, case.num_ranks, pinned=case.pinned, objective="sum")
    return found.rank, int(found.loads.sum(axis=0).max()), 0


def waits(case: Case, rank: NDArray[np.int32]) -> int:
    return sum(peaks(case, rank))


def largest_sum(case: Case, rank: NDArray[np.int32]) -> int:
    return int(sums(case.costs.sum(axis=1), rank, case.num_ranks).max())


def is_within(case: Case, rank: NDArray[np.int32]) -> bool:
    return bool(sums(case.sizes, rank, case.num_ranks).max() <= case.cap)


WAYS: dict[str, tuple[Callable[[Case], Any], Callable[[Case, Any], int], Callable[[Case, Any], bool]]] = {
    "balance": (one_phase, lambda case, rank: peaks(case, rank)[1], lambda case, rank: True),
    "phases": (two_phases, waits, lambda case, rank: True),
    "sum": (in_sum, largest_sum, lambda case, rank: True),
    "caps": (lambda case: two_phases(case, sizes=case.sizes, max_size=case.cap), waits, is_within),
    "max_samples": (lambda case: two_phases(case, max_samples=5), waits, lambda *way: bool(counts(*way).max() <= 5)),
    "equal_count": (
        lambda case: one_phase(case, equal_count=True),
        lambda case, rank: peaks(case, rank)[1],
        lambda *way: bool(np.ptp(counts(*way)) <= 1),
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_no_assignment_of_few_samples_costs_less_and_none_is_below_the_bound(name: str) -> None:
    way, price, is_allowed = WAYS[name]
    tried = 0
    for case in map(a_case, range(CASES)):
        prices = [price(case, rank) for rank in all_ways(case.pinned, case.num_ranks) if is_allowed(case, rank)]
        if not prices:
            with pytest.raises(ValueError, match="pinned"):
                way(case)
            continue
        rank, found, bound = way(case)
        check_kept(case, rank, case.cap if name == "caps" else int(case.sizes.sum()))
        assert is_allowed(case, rank)
        assert bound <= min(prices) == found == price(case, rank)
        tried += 1
    assert tried > CASES // 2


@pytest.mark.parametrize("in_step", [False, True])
def test_microbatches_keep_pins_and_caps_and_are_near_the_best(in_step: bool) -> None:
    ratios = []
    for case in map(a_case, range(CASES)):
        rank, work, number = (np.arange(SAMPLES) % 2).astype(np.int32), case.costs[:, 1], case.num_ranks

        options: dict[str, Any] = {"num_microbatches": number, "in_step": in_step, "pinned": case.pinned}
        options |= {"sizes": case.sizes, "max_size": 70}

        def cells(values: Ints, way: Any, rank: Any = rank, number: int = number) -> Ints:
            return sums(values, rank * number + way, 2 * number).reshape(2, number)

        ways = [way for way in all_ways(case.pinned, number) if cells(case.sizes, way).max() <= 70]
        if not ways:
            with pytest.raises(ValueError, match=r"above|too few"):
                split_microbatches(work, rank, 2, **options)
            continue
        found, _ = split_microbatches(work, rank, 2, **options)
        assert any((found == way).all() for way in ways)
        prices = [cells(work, way).max(axis=0).sum() if in_step else cells(work, way).max() for way in [found, *ways]]
        ratios.append(prices[0] / min(prices))
    assert len(ratios) > CASES // 3
    assert np.mean(ratios) <= 1.02


def test_many_samples_are_balanced_next_to_pinned_ones() -> None:
    rng = np.random.default_rng(0)
    costs = rng.lognormal(7, 1, 64 * 16).astype(np.int64) + 1
    pinned = np.full(len(costs), -1, np.int32)
    pinned[:90] = np.sort(rng.integers(0, 20, 90))
    for found in (balance(costs, 64, pinned=pinned), balance(costs, 64, pinned=pinned, equal_count=True)):
        assert found.rank[:90].tolist() == pinned[:90].tolist()
        assert found.loads.tolist() == sums(costs, found.rank, 64).tolist()
        assert found.makespan <= found.lower_bound * 1.01
    pinned[:90] = 0
    assert (
        lower_bound(costs, 64)
        < sums(costs[:90], pinned[:90], 64).max()
        == balance(costs, 64, pinned=pinned).lower_bound
    )


def test_pins_that_pin_nothing_change_nothing() -> None:
    case = a_case(3)
    nothing = np.full(SAMPLES, -1)
    free = balance_phases(case.by_phase, 3), balance_phases(case.by_phase, 3, pinned=nothing)
    assert free[0].rank.tolist() == free[1].rank.tolist()
    assert free[0].lower_bounds == free[1].lower_bounds


def test_a_pin_that_cannot_be_kept_is_an_error() -> None:
    costs, pinned = np.full(4, 10), np.array([0, 0, 0, -1])
    with pytest.raises(ValueError, match=r"pinned\[3\] is 2; it must be from -1 \(left out\) to 1"):
        balance(costs, 2, pinned=[0, 0, 0, 2])
    with pytest.raises(ValueError, match="pinned holds 3 samples on rank 0, above max_samples=2"):
        balance(costs, 2, max_samples=2, pinned=pinned)
    with pytest.raises(ValueError, match="no assignment within max_cost=20 was found"):
        balance(costs, 2, max_cost=20, pinned=pinned)
    with pytest.raises(ValueError, match="no assignment to 2 ranks within max_size"):
        balance_phases({"llm": costs}, 2, sizes=costs, max_size=20, pinned=pinned)
    with pytest.raises(ValueError, match=r"have sizes \[30\] in microbatch 0 of rank 1, above max_size=\[20\]"):
        split_microbatches(costs, [1, 1, 1, 1], 2, max_size=20, pinned=pinned)


def test_the_check_notices_a_sample_that_moved() -> None:
    case = a_case(0)
    ignoring = (case.pinned + 1) % case.num_ranks
    with pytest.raises(AssertionError, match="a pinned sample moved"):
        check_kept(case, ignoring.astype(np.int32), int(case.sizes.sum()))
