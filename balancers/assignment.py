"""Assignment: the rank of each sample, the loads, and a lower bound of the makespan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_costs, checked_ranks_count
from orchdata.native.assign.bounds import strong_lower_bound
from orchdata.native.jit import Ints, Ints32
from orchdata.native.microbatches.microbatch import cell_sums
from orchdata.native.sorting import descending_order


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Samples of one phase of one global batch, assigned to ranks.

    Attributes:
        rank: int32 (num_samples,), -1 for a sample that costs 0.
        loads: int64 (num_ranks,), the sum of costs on each rank.
        makespan: the largest load.
        lower_bound: no assignment under the same rules has a smaller makespan.
    """

    rank: NDArray[np.int32]
    loads: NDArray[np.int64]
    makespan: int
    lower_bound: int

    @property
    def imbalance(self) -> float:
        """Largest over mean load: 1.0 is perfect, and the value without any load."""
        total = int(self.loads.sum())
        return self.makespan * len(self.loads) / total if total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class MovedAssignment(Assignment):
    """An assignment of samples that ranks have already, and what it moves between them.

    Samples that cost 0 have rank -1 and do not move. Without nodes, every rank counts as a node.

    Attributes:
        moved_samples: the number of samples that change their rank.
        moved_cost_within, moved_cost_between: their costs, inside nodes and between nodes.
        moved_size_within, moved_size_between: their sizes, in the unit of `sizes`.
    """

    moved_samples: int
    moved_cost_within: int
    moved_cost_between: int
    moved_size_within: int
    moved_size_between: int

    @property
    def moved_share(self) -> float:
        """Share of all cost that changes its rank; 0.0 without any load."""
        total = int(self.loads.sum())
        return (self.moved_cost_within + self.moved_cost_between) / total if total else 0.0


def moved_counts(costs: Ints, sizes: Ints, owner: Ints32, rank: Ints32, ranks_per_node: int) -> dict[str, int]:
    """Count what moves, by the names of a `MovedAssignment`."""
    moved = (rank >= 0) & (rank != owner)
    between = moved & (rank // ranks_per_node != owner // ranks_per_node)
    within = moved & ~between
    return {
        "moved_samples": int(np.count_nonzero(moved)),
        "moved_cost_within": int(costs[within].sum()),
        "moved_cost_between": int(costs[between].sum()),
        "moved_size_within": int(sizes[within].sum()),
        "moved_size_between": int(sizes[between].sum()),
    }


def loads_by_rank_and_microbatch(
    costs: Ints, rank: Ints32, microbatch: Ints32, num_ranks: int, num_microbatches: int
) -> Ints:
    """Return the cost of each rank's microbatches, int64 (num_ranks, num_microbatches)."""
    loads: Ints = cell_sums(costs, rank, microbatch, num_ranks, num_microbatches)
    return loads


def loads_of(costs: ArrayLike, rank: Ints32, num_ranks: int) -> Ints:
    """Return the sum of costs on each rank, int64 (num_ranks,); samples of rank -1 are left out."""
    loads = np.zeros(num_ranks, np.int64)
    present = rank >= 0
    np.add.at(loads, rank[present], np.asarray(costs, np.int64)[present])
    return loads


def lower_bound(costs: ArrayLike, num_ranks: int) -> int:
    """Return a lower bound of the makespan of any assignment of the samples to `num_ranks` ranks.

    The larger of the mean (rounded up) and, over all k >= 0, the sum of the k+1 smallest among the k*num_ranks+1
    largest costs: some rank has k+1 of those.

    Args:
        costs: integers (num_samples,), at least 0.
        num_ranks: at least 1.

    Raises:
        ValueError: costs that are not non-negative integers, or num_ranks below 1.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    return int(strong_lower_bound(checked[descending_order(checked)], num_ranks))
