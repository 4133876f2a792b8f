"""Assignment: which rank holds each sample, the loads that gives, and how far from the best possible they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_costs, checked_count
from orchdata.native.packed import strong_lower_bound
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
        """Largest over mean load: 1.0 is perfect, and what it is without any load."""
        total = int(self.loads.sum())
        return self.makespan * len(self.loads) / total if total else 1.0


def lower_bound(costs: ArrayLike, num_ranks: int) -> int:
    """Smallest makespan that any assignment of the samples to `num_ranks` ranks could have.

    The larger of the mean (rounded up) and, over all k >= 0, the sum of the k+1 smallest among the k*num_ranks+1
    largest costs: some rank must hold k+1 of those.

    Args:
        costs: integers (num_samples,), at least 0.
        num_ranks: at least 1.

    Raises:
        ValueError: costs that are not non-negative integers, or num_ranks below 1.
    """
    checked = checked_costs(costs)
    num_ranks = checked_count(num_ranks, "num_ranks")
    return int(strong_lower_bound(checked[descending_order(checked)], num_ranks))
