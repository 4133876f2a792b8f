"""Node placement: bytes that each rank has for each rank of an assignment -> the same assignment with renamed ranks.

The ranks of an assignment are interchangeable: renaming them does not change the loads. Names are chosen so that the
fewest bytes cross nodes and, inside each node, the most stay on their rank. Both are assignment problems: solved
exactly (scipy's modified Jonker-Volgenant algorithm, Crouse 2016) while that takes some tens of milliseconds, greedily
with exchanges above that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import checked_costs, checked_count, checked_ranks, checked_ranks_count
from orchdata.native.assign.placement import place_greedily, swap_bins
from orchdata.native.jit import Ints, Ints32

# 1,024 ranks take about 40 ms, 2,560 about 400 ms and 50 MB; the greedy there takes 60 ms.
EXACT_RANKS = 1024
# scipy solves in float64, which holds whole numbers up to here.
MAX_BYTES = 1 << 53
SWAP_PASSES = 20


@dataclass(frozen=True, slots=True, eq=False)
class NodePlacement:
    """Ranks of an assignment, placed on the ranks of nodes.

    Attributes:
        rank: int32 (num_ranks,): rank j of the assignment runs on rank `rank[j]`, a permutation.
            `placement.rank[assignment.rank]` renames an assignment without samples of rank -1.
        bytes_between: bytes that cross nodes.
        bytes_between_before: bytes that would cross nodes without renaming.
        bytes_between_greedy: bytes that would cross nodes with the greedy method; `bytes_between` if it is the method.
        bytes_within: bytes that move between the ranks of a node. The rest stays on its rank.
        method: how nodes were chosen: no placement crosses fewer bytes than an exact one.
    """

    rank: NDArray[np.int32]
    bytes_between: int
    bytes_between_before: int
    bytes_between_greedy: int
    bytes_within: int
    method: Literal["exact", "greedy"]


def traffic_between(
    owner: ArrayLike, rank: ArrayLike, num_ranks: int, sizes: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Return the bytes that each rank has for each rank of an assignment.

    Args:
        owner: integers (num_samples,), the rank that has each sample.
        rank: integers (num_samples,), the rank that each is assigned to; samples of rank -1 are left out.
        num_ranks: at least 1.
        sizes: integers (num_samples,), bytes of each; 1 by default, which counts samples.

    Returns:
        int64 (num_ranks, num_ranks): [i, j] is what rank i has and rank j needs.

    Raises:
        ValueError: lengths that differ, ranks out of range, or sizes that are not non-negative integers.
    """
    num_ranks = checked_ranks_count(num_ranks)
    source = checked_ranks(owner, num_ranks, np.size(owner), "owner")
    target = checked_ranks(rank, num_ranks, len(source), "rank", least=-1)
    weight = np.ones(len(source), np.int64) if sizes is None else checked_costs(sizes, "sizes")
    if len(weight) != len(source):
        raise ValueError(f"sizes must have one entry a sample, got {len(weight)} for {len(source)} samples")
    present = target >= 0
    traffic = np.zeros((num_ranks, num_ranks), np.int64)
    # bincount would add its weights as floats.
    np.add.at(traffic, (source[present], target[present]), weight[present])
    return traffic


def place_on_nodes(traffic: ArrayLike, ranks_per_node: int) -> NodePlacement:
    """Rename the ranks of an assignment so that the fewest bytes cross nodes.

    Inside a node, names are then chosen so that the most bytes stay on their rank. Never worse than the given names: by
    bytes between nodes, then by bytes within. Deterministic.

    Args:
        traffic: integers (num_ranks, num_ranks), at least 0, with a sum of at most 2**53: [i, j] is what rank i has
            and rank j of the assignment needs (`traffic_between`).
        ranks_per_node: at least 1; ranks i with the same i // ranks_per_node are a node, and the last may have fewer.

    Raises:
        ValueError: traffic that is not a square of non-negative integers, or ranks_per_node below 1.
    """
    array = np.asarray(traffic)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"traffic must have shape (num_ranks, num_ranks) of at least 1 rank, got {array.shape}")
    checked, num_ranks = checked_costs(array.ravel(), "traffic").reshape(array.shape), len(array)
    if int(checked.sum()) > MAX_BYTES:
        raise ValueError(f"traffic sums to {checked.sum()}, above the limit of 2**53: give it in a larger unit")
    ranks_per_node = min(num_ranks, checked_count(ranks_per_node, "ranks_per_node"))
    starts = np.arange(0, num_ranks, ranks_per_node)
    capacity = np.diff(np.append(starts, num_ranks))
    by_node = np.ascontiguousarray(np.add.reduceat(checked, starts, axis=0).T)
    total = int(checked.sum())

    unchanged = np.repeat(np.arange(len(starts), dtype=np.int32), capacity)
    node = greedy = _greedily(by_node, capacity)
    method: Literal["exact", "greedy"] = "greedy"
    if num_ranks <= EXACT_RANKS:
        method, node = "exact", _exactly(by_node, capacity)
    before, between, by_greedy = (total - _value(by_node, nodes) for nodes in (unchanged, node, greedy))
    if before < between:  # Only the greedy method can be worse.
        node, between = unchanged, before
    rank = _place_inside(checked, starts, capacity, node)
    if before == between:
        # If nodes gain nothing, neither new nodes nor a greedy placement inside them may lose bytes.
        kept = _place_inside(checked, starts, capacity, unchanged)
        rank = max((kept, rank, np.arange(num_ranks, dtype=np.int32)), key=lambda names: _stays(checked, names))
    return NodePlacement(
        rank=rank,
        bytes_between=between,
        bytes_between_before=before,
        bytes_between_greedy=by_greedy if method == "exact" else between,
        bytes_within=total - between - _stays(checked, rank),
        method=method,
    )


def renamed(rank: Ints32, owner: Ints32, sizes: Ints, num_ranks: int, ranks_per_node: int = 1) -> Ints32:
    """Rename the ranks of an assignment by `place_on_nodes`, if it was made without regard to current ranks. `sizes`
    are the price of moving each sample.
    """
    unit = max(0, int(sizes.sum()).bit_length() - MAX_BYTES.bit_length() + 1)
    return place_on_nodes(traffic_between(owner, rank, num_ranks, sizes >> unit), ranks_per_node).rank[rank]


def _greedily(values: Ints, capacity: Ints) -> Ints32:
    bins: Ints32 = place_greedily(values, capacity)
    swap_bins(values, bins, SWAP_PASSES)
    return bins


def _exactly(values: Ints, capacity: Ints) -> Ints32:
    """Solve an assignment problem, in which a bin with room for c items is c equal columns."""
    from scipy.optimize import linear_sum_assignment

    column_bin = np.repeat(np.arange(len(capacity), dtype=np.int32), capacity)
    _, columns = linear_sum_assignment(values[:, column_bin].astype(np.float64), maximize=True)
    bins: Ints32 = column_bin[columns]
    return bins


def _place_inside(traffic: Ints, starts: Ints, capacity: Ints, node: Ints32) -> Ints32:
    """Return the rank of each rank of the assignment inside its node, so that most bytes stay."""
    rank = np.empty(len(node), np.int32)
    members = np.split(np.argsort(node, kind="stable"), starts[1:])
    for start, size, names in zip(starts, capacity, members, strict=True):
        values = np.ascontiguousarray(traffic[start : start + size, names].T)
        solve = _exactly if size <= EXACT_RANKS else _greedily
        rank[names] = start + solve(values, np.ones(size, np.int64))
    return rank


def _value(values: Ints, bins: Ints32) -> int:
    return int(values[np.arange(len(bins)), bins].sum())


def _stays(traffic: Ints, rank: Ints32) -> int:
    """Return the bytes that stay on their rank."""
    return int(traffic[rank, np.arange(len(rank))].sum())
