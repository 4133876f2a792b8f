"""Packed balancing: costs (num_samples,) -> rank of each sample.

For batches without padding the load of a rank is the sum of its samples' costs. Quadratic costs also add up, as
packed attention never crosses samples. Longest-first greedy alone is within a few per cent of the best. Moves and swaps
with the lightest ranks then help the ranks above the tolerance; where ranks have only two to four large samples each,
the capacity is bisected instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import Assignment, loads_of
from orchdata.balancers.checks import (
    MAX_TOTAL,
    checked_costs,
    checked_count,
    checked_flag,
    checked_max_samples,
    checked_pins,
    checked_ranks_count,
    checked_tolerance,
)
from orchdata.native.assign.few import search_few
from orchdata.native.assign.packed import solve


def balance(
    costs: ArrayLike,
    num_ranks: int,
    *,
    equal_count: bool = False,
    max_samples: int | None = None,
    max_cost: int | None = None,
    tolerance: float = 1e-3,
    pinned: ArrayLike | None = None,
) -> Assignment:
    """Assign samples to ranks so that the largest sum of costs is as small as can be found quickly.

    Deterministic to the bit: samples are taken by (cost descending, position), ties go to the lowest load, then count,
    then rank. Permuting the samples does not change the makespan.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1,
            unless it is pinned.
        num_ranks: at least 1; may exceed the number of samples.
        equal_count: all ranks get the same number of samples (of those that cost anything), give or take one.
        max_samples: largest number of samples on a rank.
        max_cost: largest load of a rank.
        tolerance: stop once makespan <= lower_bound * (1 + tolerance).
        pinned: integers (num_samples,), the rank of a sample that may not move, or -1. Counts, loads and the bound
            include pinned samples.

    Raises:
        ValueError: costs that are not non-negative integers, pinned ranks out of range, or a cap that no assignment
            can respect.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    equal_count = checked_flag(equal_count, "equal_count")
    tolerance = checked_tolerance(tolerance)
    if max_samples is not None:
        max_samples = checked_max_samples(max_samples, int(np.count_nonzero(checked)), num_ranks)
    if max_cost is not None:
        max_cost = min(checked_count(max_cost, "max_cost"), MAX_TOTAL)
    pins = None
    if pinned is not None:
        pins = checked_pins(pinned, num_ranks, checked > 0, max_samples, equal_count)
    rank, loads, bound = solve(
        checked, num_ranks, max_samples or max(1, len(checked)), max_cost or 0, equal_count, tolerance, pins
    )
    if pins is not None and loads.max() > bound:
        present = np.flatnonzero(checked)
        costs_here, own, here = checked[present][:, None], rank[present], pins[present]
        limit, extras = divmod(len(present), num_ranks) if equal_count else (max_samples or max(1, len(present)), 0)
        nothing, least = np.empty((len(present), 0), np.int64), np.array([bound])
        search_few(costs_here, nothing, nothing[0], own, here, num_ranks, least, limit, extras)
        rank[present], loads = own, loads_of(costs_here[:, 0], own, num_ranks)
    makespan = int(loads.max())
    if max_cost is not None and makespan > max_cost:
        raise ValueError(_cap_message(checked, num_ranks, max_cost, makespan, int(bound)))
    return Assignment(rank, loads, makespan, int(bound))


def _cap_message(costs: NDArray[np.int64], num_ranks: int, max_cost: int, makespan: int, bound: int) -> str:
    largest = int(costs.argmax())
    if costs[largest] > max_cost:
        return f"sample {largest} costs {costs[largest]}, above max_cost={max_cost}: raise it or leave the sample out"
    total = int(costs.sum())
    if total > num_ranks * max_cost:
        return (
            f"the samples cost {total} together, but {num_ranks} ranks of max_cost={max_cost} hold"
            f" {num_ranks * max_cost}: raise it to at least {bound} or take fewer samples"
        )
    return (
        f"no assignment within max_cost={max_cost} was found: the best has {makespan}, and none is below {bound}:"
        f" raise it to {makespan} or take fewer samples"
    )
