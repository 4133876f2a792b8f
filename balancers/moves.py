"""Minimal move: costs and the current rank of each sample -> an assignment that moves little.

For samples that are already loaded. Longest-first greedy would move nearly all of them; here a rank above the target
gives up only its excess. With costs by phase, ranks wait for each other after each phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from orchdata.balancers.assignment import (
    MovedAssignment,
    checked_costs,
    checked_count,
    checked_ranks,
    checked_ranks_count,
    checked_tolerance,
    lower_bound,
    moved_counts,
    search_pairs,
)
from orchdata.balancers.phases import PhaseAssignment, balance_phases, checked_phases
from orchdata.balancers.placement import renamed
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import sum_of_peaks
from orchdata.native.jit import Ints, Ints32
from orchdata.native.minimal_move import TOLERANCES, pays, solve_from
from orchdata.native.move_phases import move_by_phase

REDEAL_GAIN = 50  # Everything is dealt again if that takes 1/50 off the result of moving little.


@dataclass(frozen=True, slots=True, eq=False)
class MovedPhases(PhaseAssignment):
    """An assignment, joint over all phases, of samples that ranks have already, and what it moves between them.

    Attributes:
        moved_samples: the number of samples that change their rank.
        moved_cost_within, moved_cost_between: their costs over all phases, inside nodes and between nodes.
        moved_size_within, moved_size_between: their sizes, in the unit of `sizes`.
    """

    moved_samples: int
    moved_cost_within: int
    moved_cost_between: int
    moved_size_within: int
    moved_size_between: int


@overload
def balance_from(
    costs: Mapping[str, ArrayLike],
    owner: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 1e-3,
    primary: str = "llm",
) -> MovedPhases: ...


@overload
def balance_from(
    costs: ArrayLike,
    owner: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 1e-3,
) -> MovedAssignment: ...


def balance_from(
    costs: ArrayLike | Mapping[str, ArrayLike],
    owner: ArrayLike,
    num_ranks: int,
    *,
    sizes: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 1e-3,
    primary: str = "llm",
) -> MovedAssignment | MovedPhases:
    """Assign samples to ranks, starting from their current ranks.

    Ranks above the target release their excess, which goes to the least loaded rank, in the same node if one has room;
    moves and swaps do the rest. Where that stalls, ranks release more, and wider targets are tried too. Finally, all
    samples are dealt again, longest first, with ranks renamed so that much stays, but only if that takes 2 % off the
    makespan. A wider tolerance never moves more, by `sizes`, and never has a lower makespan.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1. Or
            such costs of each phase: then the sum over phases of the largest load is lowered, as ranks wait after each;
            every sample must cost something in some phase, and gets a rank.
        owner: integers (num_samples,), the rank that has each sample.
        num_ranks: at least 1.
        sizes: integers (num_samples,), the price of moving each sample, such as bytes; by default the costs.
        ranks_per_node: consecutive ranks that share a node; by default every rank counts as a node.
        tolerance: makespan <= lower_bound * (1 + tolerance) is good enough, in each phase. Below 0.1 % the search is
            not repeated if it did not reach 0.1 %.
        primary: of costs by phase, the one that all samples take part in.

    Raises:
        ValueError: costs or sizes that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    num_ranks = checked_ranks_count(num_ranks)
    node = 1 if ranks_per_node is None else min(num_ranks, checked_count(ranks_per_node, "ranks_per_node"))
    tolerance = checked_tolerance(tolerance)
    if isinstance(costs, Mapping):
        names, by_phase = checked_phases(costs, primary)
        together = by_phase.sum(axis=0)
        owners = checked_ranks(owner, num_ranks, len(together), "owner")
        weights = together if sizes is None else checked_weights(sizes, len(together))
        rank = move_phases(by_phase, owners, num_ranks, names.index(primary), weights, node, TOLERANCES, tolerance)
        return MovedPhases(**moved_phases_fields(names, by_phase, weights, owners, rank, num_ranks, node))
    checked = checked_costs(costs)
    owners = checked_ranks(owner, num_ranks, len(checked), "owner")
    weights = checked if sizes is None else checked_weights(sizes, len(checked))
    rank, loads, bound = solve_from(checked, weights, owners, num_ranks, node, tolerance, REDEAL_GAIN)
    return MovedAssignment(**moved_fields(checked, weights, owners, rank, loads, int(bound), node))


def move_phases(
    costs: Ints,
    owner: Ints32,
    num_ranks: int,
    primary: int,
    sizes: Ints,
    ranks_per_node: int = 1,
    tolerances: Sequence[float] = (1e-3,),
    tolerance: float = 1e-3,
) -> Ints32:
    """Lower the sum over phases of the largest load of costs (num_phases, num_samples), moving little. The candidates
    are staying, moving little at each of `tolerances`, and dealing again if that takes 2 % off all of these. The result
    moves least within `tolerance` of the bounds, else ranks wait for it least.
    """
    if not (present := costs.any(axis=0)).all():
        raise ValueError(f"sample {int(present.argmin())} costs 0 in every phase: leave it out, or give it a cost of 1")
    bounds = np.array([lower_bound(row, num_ranks) for row in costs], np.int64)
    by_sample, pairs = np.ascontiguousarray(costs.T), search_pairs(len(owner), num_ranks)
    candidates = [owner]
    for wanted in tolerances:
        targets = bounds + (bounds * wanted).astype(np.int64)
        candidates.append(move_by_phase(by_sample, owner, num_ranks, ranks_per_node, primary, targets, pairs))
    waits = [int(sum_of_peaks(by_sample, rank, num_ranks)) for rank in candidates]
    if pays(min(waits), int(bounds.sum()), REDEAL_GAIN):
        again = balance_phases({str(phase): row for phase, row in enumerate(costs)}, num_ranks, primary=str(primary))
        if pays(min(waits), sum(again.makespans), REDEAL_GAIN):
            candidates.append(renamed(again.rank, owner, sizes, num_ranks, ranks_per_node))
            waits.append(sum(again.makespans))
    moved = [int(sizes[rank != owner].sum()) for rank in candidates]
    enough = int(bounds.sum()) + int(int(bounds.sum()) * tolerance)
    # Candidates within the tolerance count as equal, so a wider tolerance chooses among more.
    return candidates[
        min(range(len(candidates)), key=lambda number: (max(enough, waits[number]), moved[number], number))
    ]


def checked_weights(sizes: ArrayLike, num_samples: int) -> Ints:
    """Return one size for each sample."""
    checked = checked_costs(sizes, "sizes")
    if len(checked) != num_samples:
        raise ValueError(f"sizes must have one entry for each of the {num_samples} costs, got {len(checked)}")
    return checked


def moved_fields(
    costs: Ints, sizes: Ints, owner: Ints32, rank: Ints32, loads: Ints, bound: int, ranks_per_node: int
) -> dict[str, Any]:
    """Return the fields of a MovedAssignment, with what moves counted."""
    fields = {"rank": rank, "loads": loads, "makespan": int(loads.max()), "lower_bound": bound}
    return fields | moved_counts(costs, sizes, owner, rank, ranks_per_node)


def moved_phases_fields(
    names: tuple[str, ...], costs: Ints, sizes: Ints, owner: Ints32, rank: Ints32, num_ranks: int, ranks_per_node: int
) -> dict[str, Any]:
    """Return the fields of a MovedPhases for costs int64 (num_phases, num_samples)."""
    loads = np.ascontiguousarray(phase_loads(np.ascontiguousarray(costs.T), rank, num_ranks).T)
    return {
        "phases": names,
        "rank": rank,
        "loads": loads,
        "makespans": tuple(int(peak) for peak in loads.max(axis=1)),
        "lower_bounds": tuple(lower_bound(row, num_ranks) for row in costs),
    } | moved_counts(costs.sum(axis=0), sizes, owner, rank, ranks_per_node)
