"""Balancing with partial information: in each group of ranks, or in rows and then columns of a grid of ranks.

A row of the grid is the ranks of a node; a column is the ranks with the same number in every node. In the first round
the ranks of a row share out the samples of the row; in the second, those of a column. Each rank receives the costs of
its row, then of its column after the first round, and no others: at 2,560 ranks of 16 samples 23 KiB instead of 160,
and most of what moves stays inside a node. With costs by phase it receives one cost for each phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import (
    MovedAssignment,
    checked_costs,
    checked_count,
    checked_ranks,
    checked_ranks_count,
    loads_of,
    lower_bound,
)
from orchdata.balancers.moves import (
    REDEAL_GAIN,
    MovedPhases,
    checked_weights,
    move_phases,
    moved_fields,
    moved_phases_fields,
)
from orchdata.balancers.phases import checked_phases
from orchdata.native.jit import Ints, Ints32
from orchdata.native.minimal_move import solve_groups

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
