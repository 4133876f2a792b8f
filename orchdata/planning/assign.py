"""Scopes of balancing: a global batch's costs and who is near its samples -> rank of each sample.

none     dealt out in turn
grouped  inside each group of ranks, from what the group's streams hold
grid     inside each group, then among the ranks of the same place in all groups
global   over all ranks
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import balance as balance_packed
from orchdata.balancers import balance_grid, balance_phases
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]


def near_ranks(start: int, num_samples: int, streams: int, num_ranks: int) -> NDArray[np.int32]:
    """The rank each sample of a global batch is near to: ranks share out the streams, in order and evenly.

    Args:
        start: position of the first sample in the epoch's order; position p is drawn from stream p % streams.
        num_samples: of the global batch.
        streams: of the order.
        num_ranks: at least 1; counts of samples near them differ by at most one.

    Returns:
        int32 (num_samples,), ascending over the samples sorted by stream.
    """
    stream = (start + np.arange(num_samples)) % streams
    near = np.empty(num_samples, np.int32)
    near[np.argsort(stream, kind="stable")] = np.arange(num_samples) * num_ranks // max(1, num_samples)
    return near


def dealt(num_samples: int, num_ranks: int) -> NDArray[np.int32]:
    """Samples dealt out in turn, int32 (num_samples,)."""
    return (np.arange(num_samples) % num_ranks).astype(np.int32)


def assign(costs: Mapping[str, Ints], balance: Balance, num_ranks: int, near: NDArray[np.int32]) -> NDArray[np.int32]:
    """The rank of each sample, in every phase.

    Args:
        costs: phase -> int64 (num_samples,), the phases to balance; `llm` is at least 1 for every sample.
        balance: scope, objective and limits; a group size where the scope needs one.
        num_ranks: at least 1.
        near: int32 (num_samples,), from `near_ranks`.
    """
    num_samples = len(near)
    if balance.scope == "none" or num_ranks == 1:
        return dealt(num_samples, num_ranks)
    if balance.scope == "global":
        return balance_phases(
            costs,
            num_ranks,
            objective=balance.objective,
            equal_count=balance.equal_count,
            max_samples=balance.max_samples,
        ).rank
    together = np.sum(list(costs.values()), axis=0)
    if balance.scope == "grid":
        return balance_grid(together, near, num_ranks, balance.group_size or num_ranks).rank
    return _grouped(together, balance, num_ranks, near)


def _grouped(together: Ints, balance: Balance, num_ranks: int, near: NDArray[np.int32]) -> NDArray[np.int32]:
    size = balance.group_size or num_ranks
    rank = np.empty(len(together), np.int32)
    for first in range(0, num_ranks, size):
        members = np.flatnonzero((near >= first) & (near < first + size))
        found = balance_packed(
            together[members],
            min(size, num_ranks - first),
            equal_count=balance.equal_count,
            max_samples=balance.max_samples,
        )
        rank[members] = first + found.rank
    return rank
