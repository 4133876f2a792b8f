"""Minimal move: costs and who holds each sample -> an assignment that moves little.

For samples that are already loaded somewhere. Longest-first greedy would move nearly all of them; here a rank above the
target gives up its excess only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import MovedAssignment
from orchdata.balancers.checks import (
    checked_costs,
    checked_count,
    checked_ranks,
    checked_ranks_count,
    checked_tolerance,
)
from orchdata.native.move.minimal_move import solve_from


def balance_from(
    costs: ArrayLike,
    owner: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 1e-3,
) -> MovedAssignment:
    """Assign samples to ranks, starting from who holds them.

    Ranks above the target release their excess, which goes to the least loaded rank, of the same node where one has
    room; moves and swaps do the rest. Where that stalls, ranks release more, and at last all samples are dealt anew,
    longest first, and the ranks renamed so that much stays where it is. What moves more has to be better by the
    tolerance, so that a makespan just above the target may be left for the sake of what stays.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1.
        owner: integers (num_samples,), the rank that holds each sample.
        num_ranks: at least 1.
        sizes: integers (num_samples,), what moving a sample takes, as bytes; by default the costs.
        ranks_per_node: consecutive ranks that share a node; by default every rank is a node of its own.
        tolerance: stop once makespan <= lower_bound * (1 + tolerance).

    Raises:
        ValueError: costs or sizes that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    held = checked_ranks(owner, num_ranks, len(checked), "owner")
    node = 1 if ranks_per_node is None else min(num_ranks, checked_count(ranks_per_node, "ranks_per_node"))
    weights = checked if sizes is None else checked_sizes(sizes, len(checked))
    rank, loads, bound = solve_from(checked, held, num_ranks, node, checked_tolerance(tolerance))
    return MovedAssignment(**moved_fields(checked, weights, held, rank, loads, int(bound), node))


def checked_sizes(sizes: ArrayLike, num_samples: int) -> NDArray[np.int64]:
    """One size for each sample."""
    checked = checked_costs(sizes, "sizes")
    if len(checked) != num_samples:
        raise ValueError(f"sizes must have one entry for each of the {num_samples} costs, got {len(checked)}")
    return checked


def moved_fields(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int32],
    rank: NDArray[np.int32],
    loads: NDArray[np.int64],
    bound: int,
    ranks_per_node: int,
) -> dict[str, Any]:
    """The fields of a MovedAssignment, with what moves counted."""
    moved = (rank >= 0) & (rank != held)
    between = moved & (rank // ranks_per_node != held // ranks_per_node)
    within = moved & ~between
    return {
        "rank": rank,
        "loads": loads,
        "makespan": int(loads.max()),
        "lower_bound": bound,
        "moved_samples": int(np.count_nonzero(moved)),
        "moved_cost_within": int(costs[within].sum()),
        "moved_cost_between": int(costs[between].sum()),
        "moved_size_within": int(sizes[within].sum()),
        "moved_size_between": int(sizes[between].sum()),
    }
