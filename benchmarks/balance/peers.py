"""Peers: other ways to balance, to measure against. Costs (num_samples,) -> int32 rank of each sample.

Written from the published methods; as in `orchdata.balancers`, a sample that costs 0 takes no part and gets rank -1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.balance.peer_kernels import largest_differencing
from orchdata.balancers import lower_bound
from orchdata.balancers.assignment import checked_costs, checked_count
from orchdata.native.assign.packed import first_fit
from orchdata.native.sorting import descending_order

Ranks = NDArray[np.int32]


def dealt(costs: ArrayLike, num_ranks: int) -> Ranks:
    """No balancing: samples in turn, as a distributed sampler deals them."""
    checked, num_ranks = checked_costs(costs), checked_count(num_ranks, "num_ranks")
    rank = (np.arange(len(checked)) % num_ranks).astype(np.int32)
    return np.where(checked > 0, rank, np.int32(-1))


def longest_first(costs: ArrayLike, num_ranks: int) -> Ranks:
    """Each sample, from the largest, to the least loaded rank (LPT; Graham 1969), with a heap, in plain Python."""
    heap = [(0, rank) for rank in range(checked_count(num_ranks, "num_ranks"))]

    def assign(descending: NDArray[np.int64]) -> Ranks:
        owner = []
        for cost in descending.tolist():
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + cost, rank))
            owner.append(rank)
        return np.array(owner, np.int32)

    return _by_place(costs, assign)


def first_fit_decreasing(costs: ArrayLike, num_ranks: int) -> Ranks:
    """First-fit decreasing (Johnson 1973), with a capacity from the lower bound, raised by 1 % of it until all fit."""
    bound = lower_bound(costs, num_ranks)

    def assign(descending: NDArray[np.int64]) -> Ranks:
        owner = np.empty(len(descending), np.int32)
        capacity, step = bound, max(1, bound // 100)
        nothing = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int32)
        while not first_fit(descending, num_ranks, capacity, len(descending), owner, *nothing):
            capacity += step
        return owner

    return _by_place(costs, assign)


def karmarkar_karp(costs: ArrayLike, num_ranks: int, *, equal_count: bool = False) -> Ranks:
    """Largest differencing (Karmarkar and Karp 1982) in numba; the same result as `karmarkar_karp_python`."""
    num_ranks = checked_count(num_ranks, "num_ranks")

    def assign(descending: NDArray[np.int64]) -> Ranks:
        _check_equal(len(descending), num_ranks, equal_count)
        owner: Ranks = largest_differencing(descending, num_ranks, num_ranks if equal_count else 1)
        return owner

    return _by_place(costs, assign)


def karmarkar_karp_python(costs: ArrayLike, num_ranks: int, *, equal_count: bool = False) -> Ranks:
    """Largest differencing for many subsets, in plain Python with a heap of states, as post-training libraries run it.

    A state divides some samples into `num_ranks` subsets. The two states of largest spread (largest minus smallest
    sum) are merged, the largest subset of one with the smallest of the other, until one state is left. With equal
    counts the first states hold `num_ranks` samples each, neighbours in order of cost (balanced largest differencing,
    BLDM; Michiels et al. 2003).

    Raises:
        ValueError: with equal counts, where the samples do not divide by the ranks.
    """
    num_ranks = checked_count(num_ranks, "num_ranks")

    def assign(descending: NDArray[np.int64]) -> Ranks:
        _check_equal(len(descending), num_ranks, equal_count)
        return _largest_differencing(descending, num_ranks, num_ranks if equal_count else 1)

    return _by_place(costs, assign)


def _largest_differencing(descending: NDArray[np.int64], num_ranks: int, group: int) -> Ranks:
    # A subset is (sum, places); states come off the heap by spread, then by age.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for place in range(0, len(descending), group):
        held = [(cost, [place + i]) for i, cost in enumerate(descending[place : place + group].tolist())]
        subsets: list[tuple[int, list[int]]] = [*held, *((0, []) for _ in range(num_ranks - group))]
        heap.append((subsets[-1][0] - subsets[0][0], len(heap), subsets))
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=_sum, reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
        age += 1
    owner = np.empty(len(descending), np.int32)
    for rank, (_, places) in enumerate(heap[0][2]):
        owner[places] = rank
    return owner


def _sum(subset: tuple[int, list[int]]) -> int:
    return subset[0]


def _check_equal(num_samples: int, num_ranks: int, equal_count: bool) -> None:
    if equal_count and num_samples % num_ranks:
        raise ValueError(f"{num_samples} samples do not divide by {num_ranks} ranks: balanced differencing needs that")


def _by_place(costs: ArrayLike, assign: Callable[[NDArray[np.int64]], Ranks]) -> Ranks:
    """Sort, leave out samples of cost 0, assign the others, and put the ranks back in the order of the samples."""
    checked = checked_costs(costs)
    order = descending_order(checked)[: np.count_nonzero(checked)]
    rank = np.full(len(checked), -1, np.int32)
    if len(order):
        rank[order] = assign(checked[order])
    return rank


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the oracle found.

    Attributes:
        makespan: the largest load of its best assignment.
        lower_bound: none is below this; equal to the makespan where that is proved to be the optimum.
    """

    makespan: int
    lower_bound: int

    @property
    def proved(self) -> bool:
        return self.makespan == self.lower_bound


def optimum(costs: ArrayLike, num_ranks: int, *, seconds: float = 5.0) -> Optimum:
    """Smallest makespan by constraint programming (OR-tools CP-SAT), one thread; for small cases.

    Raises:
        ImportError: without ortools: `make peers-ortools`, and run `.venv-peers/ortools/bin/python`.
    """
    from ortools.sat.python import cp_model

    present = sorted((cost for cost in checked_costs(costs).tolist() if cost), reverse=True)
    if not present:
        return Optimum(0, 0)
    model = cp_model.CpModel()
    makespan = model.new_int_var(lower_bound(present, num_ranks), sum(present), "makespan")
    # Ranks are alike: the largest sample is on rank 0, the second on 0 or 1, and so on.
    held = [[model.new_bool_var("") for _ in range(min(place + 1, num_ranks))] for place in range(len(present))]
    for choices in held:
        model.add_exactly_one(choices)
    for rank in range(num_ranks):
        load = [cost * choices[rank] for cost, choices in zip(present, held, strict=True) if rank < len(choices)]
        model.add(sum(load) <= makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT found no assignment of {len(present)} samples in {seconds} s")
    # The solver's bound is a float of an integer; rounding up loses nothing.
    return Optimum(int(solver.objective_value), int(np.ceil(solver.best_objective_bound - 1e-6)))
