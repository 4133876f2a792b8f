"""Balancing without a view of everything: each group of ranks by itself, or rows and then columns of a grid of ranks.

A grid has the ranks of a node as a row, and the ranks of the same place in every node as a column. In the first round
the ranks of a row share out what the row holds; in the second, those of a column. Each rank hears the costs of its row,
then of its column as they are after the first round, and no others: at 2,560 ranks of 16 samples 23 KiB instead of
160, and most of what moves stays inside a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import MovedAssignment, loads_of, lower_bound
from orchdata.balancers.checks import checked_costs, checked_count, checked_ranks, checked_ranks_count
from orchdata.balancers.moves import moved_fields
from orchdata.native.move.minimal_move import solve_from, solve_groups

TOLERANCE = 1e-3
BYTES_PER_COST = 4
BYTES_PER_COUNT = 4


@dataclass(frozen=True, slots=True, eq=False)
class GridAssignment(MovedAssignment):
    """What `balance_grid` found.

    Attributes:
        metadata_bytes: the most that one rank hears over both rounds: 4 bytes for each cost of its row, then of its
            column, and 4 for each member's count.
    """

    metadata_bytes: int


def balance_grouped(costs: ArrayLike, owner: ArrayLike, num_ranks: int, group_size: int) -> MovedAssignment:
    """Balance inside groups of consecutive ranks; nothing moves between groups.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1.
        owner: integers (num_samples,), the rank that holds each sample.
        num_ranks: at least 1.
        group_size: ranks in a group, as the ranks of a node; the last group may be smaller.

    Returns:
        The assignment; its lower bound is that of the group with the largest.

    Raises:
        ValueError: costs that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    checked, held, num_ranks = _checked(costs, owner, num_ranks)
    group_size = min(num_ranks, checked_count(group_size, "group_size"))
    group = held // group_size
    member, bound = _share_out(checked, group, held % group_size, _group_sizes(num_ranks, group_size))
    rank = np.where(member >= 0, group * group_size + member, -1).astype(np.int32)
    return MovedAssignment(
        **moved_fields(checked, checked, held, rank, loads_of(checked, rank, num_ranks), bound, group_size)
    )


def balance_grid(costs: ArrayLike, owner: ArrayLike, num_ranks: int, ranks_per_node: int) -> GridAssignment:
    """Balance in two rounds, inside nodes and then across them; each is `grid_round` among the ranks it concerns.

    Costs are sent, and so balanced, as 4-byte floats: exact up to 2**24, else within 6e-8. The loads reported are of
    the costs given.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1.
        owner: integers (num_samples,), the rank that holds each sample.
        num_ranks: at least 1.
        ranks_per_node: ranks of a row; the last row may be shorter.

    Returns:
        The assignment; its lower bound is that of all ranks together.

    Raises:
        ValueError: costs that are not non-negative integers, mismatched lengths, an owner out of range.
    """
    checked, held, num_ranks = _checked(costs, owner, num_ranks)
    ranks_per_node = min(num_ranks, checked_count(ranks_per_node, "ranks_per_node"))
    sent = checked.astype(np.float32).astype(np.int64)
    node = held // ranks_per_node
    column, _ = _share_out(sent, node, held % ranks_per_node, _group_sizes(num_ranks, ranks_per_node))
    # After the first round a rank lists what it holds by who held it before.
    listed = np.argsort(held, kind="stable")
    listed = listed[column[listed] >= 0]
    found, _ = _share_out(sent[listed], column[listed], node[listed], _column_sizes(num_ranks, ranks_per_node))
    rank = np.full(len(checked), -1, np.int32)
    rank[listed] = found * ranks_per_node + column[listed]
    loads, bound = loads_of(checked, rank, num_ranks), lower_bound(checked, num_ranks)
    return GridAssignment(
        **moved_fields(checked, checked, held, rank, loads, bound, ranks_per_node),
        metadata_bytes=_metadata_bytes(node[listed], column[listed], num_ranks, ranks_per_node),
    )


def grid_round(held: Sequence[ArrayLike]) -> list[NDArray[np.int32]]:
    """One round of `balance_grid` among the ranks of a row, or of a column, from what these have told each other.

    Args:
        held: for each member, the costs of what it holds: float32 (num_samples_of_member,), whole numbers. In the
            second round a member lists what it got from the first member of its row first, and so on.

    Returns:
        For each member int32 (num_samples_of_member,): the member that each of its samples goes to, -1 for a cost of 0.

    Raises:
        ValueError: no member, or costs that are not whole numbers of at least 0.
    """
    if len(held) == 0:
        raise ValueError("held must have the costs of at least one member, got none")
    costs = [checked_costs(own, f"costs held by member {member}") for member, own in enumerate(held)]
    counts = [len(own) for own in costs]
    owner = np.repeat(np.arange(len(costs), dtype=np.int32), counts)
    member, _, _ = solve_from(checked_costs(np.concatenate(costs)), owner, len(costs), 1, TOLERANCE)
    return np.split(member, np.cumsum(counts)[:-1])


def _checked(costs: ArrayLike, owner: ArrayLike, num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    return checked, checked_ranks(owner, num_ranks, len(checked), "owner"), num_ranks


def _share_out(
    costs: NDArray[np.int64], group: NDArray[np.int32], member: NDArray[np.int32], group_sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int32], int]:
    """Balance each group by itself: the member each sample goes to, -1 for a cost of 0; the largest lower bound."""
    order = np.lexsort((member, group))
    offsets = np.searchsorted(group[order], np.arange(len(group_sizes) + 1))
    found, bound = solve_groups(costs[order], member[order], offsets, group_sizes, TOLERANCE)
    goes_to = np.empty(len(costs), np.int32)
    goes_to[order] = found
    return goes_to, int(bound)


def _group_sizes(num_ranks: int, group_size: int) -> NDArray[np.int64]:
    """Ranks in each group of consecutive ranks."""
    return np.diff(np.append(np.arange(0, num_ranks, group_size), num_ranks))


def _column_sizes(num_ranks: int, ranks_per_node: int) -> NDArray[np.int64]:
    """Nodes that have a rank in each column."""
    return np.bincount(np.arange(num_ranks) % ranks_per_node)


def _metadata_bytes(node: NDArray[np.int32], column: NDArray[np.int32], num_ranks: int, ranks_per_node: int) -> int:
    """The most that one rank hears: its row before the first round, its column after it."""
    row_sizes, column_sizes = _group_sizes(num_ranks, ranks_per_node), _column_sizes(num_ranks, ranks_per_node)
    rows = np.bincount(node, minlength=len(row_sizes)) * BYTES_PER_COST + row_sizes * BYTES_PER_COUNT
    columns = np.bincount(column, minlength=len(column_sizes)) * BYTES_PER_COST + column_sizes * BYTES_PER_COUNT
    ranks = np.arange(num_ranks)
    return int((rows[ranks // ranks_per_node] + columns[ranks % ranks_per_node]).max())
