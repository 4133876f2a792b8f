"""Minimal move: costs and the current rank of each sample -> an assignment that moves little; over all ranks, in each
group of ranks, or in rows and then columns of a grid of ranks.

For samples that are already loaded. Longest-first greedy would move nearly all of them; here a rank above the target
gives up only its excess. With costs by phase, ranks wait for each other after each phase.

A row of the grid is the ranks of a node; a column is the ranks with the same number in every node. In the first round
the ranks of a row share out the samples of the row; in the second, those of a column. Each rank receives the costs of
its row, then of its column after the first round, and no others: at 2,560 ranks of 16 samples 23 KiB instead of 160,
and most of what moves stays inside a node. With costs by phase it receives one cost for each phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import (
    MovedAssignment,
    checked_costs,
    checked_count,
    checked_ranks,
    checked_ranks_count,
    checked_tolerance,
    loads_of,
    lower_bound,
    moved_counts,
    search_pairs,
)
from orchdata.balancers.phases import PhaseAssignment, balance_phases, checked_phases
from orchdata.balancers.placement import renamed
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import sum_of_peaks
from orchdata.native.jit import Ints, Ints32
from orchdata.native.minimal_move import TOLERANCES, pays, solve_from, solve_groups
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


TOLERANCE = 1e-3
GRID_REDEAL_GAIN = 1000  # The same in a round of a grid by plain costs: the excess that a few members leave adds up.
BYTES_PER_COST = 4
BYTES_PER_COUNT = 4


@dataclass(frozen=True, slots=True, eq=False)
class GridAssignment(MovedAssignment):
    """The result of `balance_grid`.

    Attributes:
        metadata_bytes: the most that one rank receives over both rounds: 4 bytes for each cost of its row, then of its
            column, and 4 for each member's count.
    """

    metadata_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GridPhases(MovedPhases):
    """The result of `balance_grid` for costs by phase.

    Attributes:
        metadata_bytes: as in GridAssignment; a sample has a cost in each phase.
    """

    metadata_bytes: int


@overload
def balance_grouped(
    costs: Mapping[str, ArrayLike],
    owner: ArrayLike,
    num_ranks: int,
    group_size: int,
    *,
    sizes: ArrayLike | None = None,
    primary: str = "llm",
) -> MovedPhases: ...


@overload
def balance_grouped(
    costs: ArrayLike, owner: ArrayLike, num_ranks: int, group_size: int, *, sizes: ArrayLike | None = None
) -> MovedAssignment: ...


def balance_grouped(
    costs: ArrayLike | Mapping[str, ArrayLike],
    owner: ArrayLike,
    num_ranks: int,
    group_size: int,
    *,
    sizes: ArrayLike | None = None,
    primary: str = "llm",
) -> MovedAssignment | MovedPhases:
    """Balance inside groups of consecutive ranks; nothing moves between groups.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1. Or
            such costs of each phase, as `balance_from` takes them.
        owner: integers (num_samples,), the rank that has each sample.
        num_ranks: at least 1.
        group_size: ranks in a group, as the ranks of a node; the last group may be smaller.
        sizes: integers (num_samples,), the price of moving each sample, such as bytes; by default the costs.
        primary: of costs by phase, the one that all samples take part in.

    Returns:
        The assignment. Its lower bound is the largest of all groups; with costs by phase, bounds are of all ranks.

    Raises:
        ValueError: costs that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    num_ranks = checked_ranks_count(num_ranks)
    names, checked, owners = _checked(costs, owner, num_ranks, primary)
    group_size = min(num_ranks, checked_count(group_size, "group_size"))
    group = owners // group_size
    weights = _together(checked) if sizes is None else checked_weights(sizes, len(owners))
    index = names.index(primary) if names else 0
    groups = _group_sizes(num_ranks, group_size)
    member, bound = _share_out(checked, weights, group, owners % group_size, groups, index, REDEAL_GAIN)
    rank = np.where(member >= 0, group * group_size + member, -1).astype(np.int32)
    if names:
        return MovedPhases(**moved_phases_fields(names, checked, weights, owners, rank, num_ranks, group_size))
    return MovedAssignment(
        **moved_fields(checked, weights, owners, rank, loads_of(checked, rank, num_ranks), bound, group_size)
    )


@overload
def balance_grid(
    costs: Mapping[str, ArrayLike], owner: ArrayLike, num_ranks: int, ranks_per_node: int, *, primary: str = "llm"
) -> GridPhases: ...


@overload
def balance_grid(costs: ArrayLike, owner: ArrayLike, num_ranks: int, ranks_per_node: int) -> GridAssignment: ...


def balance_grid(
    costs: ArrayLike | Mapping[str, ArrayLike],
    owner: ArrayLike,
    num_ranks: int,
    ranks_per_node: int,
    *,
    primary: str = "llm",
) -> GridAssignment | GridPhases:
    """Balance in two rounds, inside nodes and then across them; each round is a `grid_round` of a row or column.

    Costs are sent, and therefore balanced, as 4-byte floats: exact up to 2**24, else within 6e-8. The reported loads
    are of the given costs.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1. Or
            such costs of each phase, as `balance_from` takes them.
        owner: integers (num_samples,), the rank that has each sample.
        num_ranks: at least 1.
        ranks_per_node: ranks of a row; the last row may be shorter.
        primary: of costs by phase, the one that all samples take part in.

    Returns:
        The assignment; lower bounds are those of all ranks together.

    Raises:
        ValueError: costs that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    num_ranks = checked_ranks_count(num_ranks)
    names, checked, owners = _checked(costs, owner, num_ranks, primary)
    ranks_per_node = min(num_ranks, checked_count(ranks_per_node, "ranks_per_node"))
    sent, index = checked.astype(np.float32).astype(np.int64), names.index(primary) if names else 0
    node = owners // ranks_per_node
    weights = _together(sent)
    column, _ = _share_out(sent, weights, node, owners % ranks_per_node, _group_sizes(num_ranks, ranks_per_node), index)
    # After the first round a rank lists its samples by their previous rank.
    listed = np.argsort(owners, kind="stable")
    listed = listed[column[listed] >= 0]
    columns = _column_sizes(num_ranks, ranks_per_node)
    row, _ = _share_out(sent[..., listed], weights[listed], column[listed], node[listed], columns, index)
    rank = np.full(len(owners), -1, np.int32)
    rank[listed] = row * ranks_per_node + column[listed]
    num_bytes = _metadata_bytes(node[listed], column[listed], num_ranks, ranks_per_node, max(1, len(names)))
    if names:
        fields = moved_phases_fields(names, checked, _together(checked), owners, rank, num_ranks, ranks_per_node)
        return GridPhases(**fields, metadata_bytes=num_bytes)
    loads, bound = loads_of(checked, rank, num_ranks), lower_bound(checked, num_ranks)
    return GridAssignment(
        **moved_fields(checked, checked, owners, rank, loads, bound, ranks_per_node), metadata_bytes=num_bytes
    )


def grid_round(held: Sequence[ArrayLike], *, primary: int = -1) -> list[NDArray[np.int32]]:
    """Run one round of `balance_grid` among the ranks of a row, or of a column, from the costs that they exchanged.

    Args:
        held: for each member, the costs of its samples: float32 (num_samples_of_member,), whole numbers, or of each
            phase (num_samples_of_member, num_phases). In the second round a member lists the samples from the first
            member of its row first, and so on.
        primary: of costs by phase, the index of the phase that all samples take part in.

    Returns:
        For each member int32 (num_samples_of_member,): the member that each of its samples goes to, -1 for a cost of 0.

    Raises:
        ValueError: no member, or costs that are not whole numbers of at least 0.
    """
    if len(held) == 0:
        raise ValueError("held must have the costs of at least one member, got none")
    members = [np.asarray(own) for own in held]
    costs = []
    for member, own in enumerate(members):
        rows = [checked_costs(row, f"costs held by member {member}") for row in (own.T if own.ndim == 2 else own[None])]
        costs.append(np.stack(rows) if own.ndim == 2 else rows[0])
    if len({own.shape[:-1] for own in costs}) > 1:
        raise ValueError(f"all members must have costs of the same phases, got {[own.shape for own in members]}")
    counts = [len(own) for own in members]
    owner = np.repeat(np.arange(len(members), dtype=np.int32), counts)
    together = np.concatenate(costs, axis=-1)
    index = primary % len(together) if together.ndim == 2 else 0
    goes_to, _ = _share_out(together, _together(together), np.zeros_like(owner), owner, np.array([len(members)]), index)
    return np.split(goes_to, np.cumsum(counts)[:-1])


def _checked(
    costs: ArrayLike | Mapping[str, ArrayLike], owner: ArrayLike, num_ranks: int, primary: str
) -> tuple[tuple[str, ...], Ints, Ints32]:
    """Return names of phases, none for plain costs; costs (num_samples,) or (num_phases, num_samples); owners."""
    names, checked = checked_phases(costs, primary) if isinstance(costs, Mapping) else ((), checked_costs(costs))
    return names, checked, checked_ranks(owner, num_ranks, checked.shape[-1], "owner")


def _together(costs: Ints) -> Ints:
    """Return costs of samples over all phases, int64 (num_samples,)."""
    return costs.sum(axis=0) if costs.ndim == 2 else costs


def _share_out(
    costs: Ints,
    sizes: Ints,
    group: Ints32,
    member: Ints32,
    group_sizes: Ints,
    primary: int,
    redeal_gain: int = GRID_REDEAL_GAIN,
) -> tuple[Ints32, int]:
    """Balance each group. Return the member that each sample goes to, -1 for a cost of 0, and the largest lower bound;
    none of costs (num_phases, num_samples), where ranks wait after each phase.
    """
    order = np.lexsort((member, group))
    offsets = np.searchsorted(group[order], np.arange(len(group_sizes) + 1))
    goes_to = np.empty(len(member), np.int32)
    if costs.ndim == 1:
        goes_to[order], bound = solve_groups(
            costs[order], sizes[order], member[order], offsets, group_sizes, TOLERANCE, redeal_gain
        )
        return goes_to, int(bound)
    for start, stop, size in zip(offsets[:-1], offsets[1:], group_sizes, strict=True):
        mine = order[start:stop]
        goes_to[mine] = move_phases(np.ascontiguousarray(costs[:, mine]), member[mine], int(size), primary, sizes[mine])
    return goes_to, 0


def _group_sizes(num_ranks: int, group_size: int) -> Ints:
    """Return the number of ranks in each group of consecutive ranks."""
    return np.diff(np.append(np.arange(0, num_ranks, group_size), num_ranks))


def _column_sizes(num_ranks: int, ranks_per_node: int) -> Ints:
    """Return the number of nodes with a rank in each column."""
    return np.bincount(np.arange(num_ranks) % ranks_per_node)


def _metadata_bytes(node: Ints32, column: Ints32, num_ranks: int, ranks_per_node: int, num_phases: int) -> int:
    """Return the most bytes that one rank receives: its row before the first round, its column after it."""
    sample = BYTES_PER_COST * num_phases
    row_sizes, column_sizes = _group_sizes(num_ranks, ranks_per_node), _column_sizes(num_ranks, ranks_per_node)
    rows = np.bincount(node, minlength=len(row_sizes)) * sample + row_sizes * BYTES_PER_COUNT
    columns = np.bincount(column, minlength=len(column_sizes)) * sample + column_sizes * BYTES_PER_COUNT
    ranks = np.arange(num_ranks)
    return int((rows[ranks // ranks_per_node] + columns[ranks % ranks_per_node]).max())
