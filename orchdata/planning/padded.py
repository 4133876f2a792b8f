"""Planning padded batches: who gets which sample where a microbatch costs its rows times its longest one.

    rank as for packed batches -------------------------+
    rank by balance_padded, or equal blocks of lengths -+-> each split into microbatches -> the one that costs least

Only `llm` is padded in the costs. Each candidate is priced whole, encoder phases included, so the plan never costs
more than the packed one would in this layout. All in integers: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import PhaseCost, balance_padded
from orchdata.balancers.assignment import cells_of
from orchdata.planning.assign import dealt
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PaddedCost:
    """What a row of the padded `llm` batch costs, and the multiple its length is aligned to."""

    cost: PhaseCost
    multiple_of: int = 1


@dataclass(frozen=True, slots=True)
class PaddedShares:
    """rank and microbatch of each sample, int32 (num_samples,); as many microbatches on every rank."""

    rank: Ranks
    microbatch: Ranks
    num_microbatches: int


def share_out_padded(
    costs: Mapping[str, Ints],
    positions: Ints,
    rank: Ranks,
    num_ranks: int,
    balance: Balance,
    padded: PaddedCost,
    sizes: Mapping[str, Ints],
) -> PaddedShares:
    """Assign samples to ranks and microbatches so that padded steps take the least time, of the candidates above.

    Args:
        costs: balanced phase -> int64 (n,); `llm` is the cost of a row as long as the sample, aligned.
        positions: int64 (n,), of `llm`, aligned, at least 1.
        rank: int32 (n,), the assignment under `balance` if nothing were padded. Where samples may not go to any rank
            (scope "grouped" or "grid"), or nothing is balanced, it is kept.
        sizes: capped phase -> int64 (n,), its positions; `balance.caps["llm"]` caps rows times the longest.

    Raises:
        ValueError: a sample above a cap, unless `balance.oversize` is "own".
    """
    candidates = [rank]
    if balance.scope == "global" and num_ranks > 1 and len(positions):
        if balance.equal_count:
            candidates.append(assign_blocks(positions, num_ranks))
        else:
            most = balance.max_samples
            candidates.append(assign_padded(positions, num_ranks, padded.cost, padded.multiple_of, most))
    shares = [split_padded(candidate, num_ranks, sizes, balance) for candidate in candidates]
    # The first of equals: what packed balancing chose keeps samples where they were.
    return min(shares, key=lambda one: _step_cost(costs, one, num_ranks, balance))


def assign_padded(
    positions: Ints, num_ranks: int, cost: PhaseCost, multiple_of: int = 1, max_samples: int | None = None
) -> Ranks:
    """The rank of each sample, int32 (n,), where a rank costs its count times the cost of its longest: exact.

    Positions are at least 1. Raises ValueError as `balance_padded` does.
    """
    return balance_padded(positions, num_ranks, cost, max_samples=max_samples, multiple_of=multiple_of).rank


def assign_blocks(positions: Ints, num_ranks: int) -> Ranks:
    """Equal counts, give or take one: rank 0 gets the longest samples, the last rank the shortest; int32 (n,).

    No other assignment of these counts has smaller loads: see `balance_padded`. Ranks of short samples take one more.
    """
    few, rest = divmod(len(positions), num_ranks)
    counts = np.full(num_ranks, few)
    counts[num_ranks - rest :] += 1
    rank = np.empty(len(positions), np.int32)
    rank[_descending(positions)] = np.repeat(np.arange(num_ranks, dtype=np.int32), counts)
    return rank


def split_padded(rank: Ranks, num_ranks: int, sizes: Mapping[str, Ints], balance: Balance) -> PaddedShares:
    """Cut each rank's samples, from the longest, into as few microbatches as the caps allow.

    A microbatch holds neighbours in length, as many as fit: rows times its longest within the cap of `llm`, and sums
    within those of other phases. Without other caps none is cut into fewer. The m-th microbatches of all ranks, which
    run in step, are then of about the same length.

    Args:
        sizes: capped phase -> int64 (n,), its positions; without any, a step is one microbatch.

    Raises:
        ValueError: a sample above a cap, unless `balance.oversize` is "own".
    """
    microbatch = np.zeros(len(rank), np.int32)
    if not sizes:
        return PaddedShares(rank, microbatch, 1)
    caps = balance.caps
    for phase, column in sizes.items():
        if balance.oversize != "own" and int(column.max(initial=0)) > caps[phase]:
            raise ValueError(
                f"a sample has {int(column.max())} {phase} positions, max_tokens allows {caps[phase]}; raise it, or "
                "use Balance(oversize='own')"
            )
    lengths = sizes.get("llm", np.ones(len(rank), np.int64))
    most = caps.get("llm", len(rank))
    others = [(column, caps[phase]) for phase, column in sizes.items() if phase != "llm"]
    num_microbatches = 1
    for mine in _by_rank(rank, lengths, num_ranks):
        cuts = _cuts(lengths[mine], most, [(column[mine], cap) for column, cap in others])
        microbatch[mine] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        num_microbatches = max(num_microbatches, len(cuts) - 1)
    return PaddedShares(rank, microbatch, num_microbatches)


def padded_cells(costs: Ints, shares: PaddedShares, num_ranks: int) -> Ints:
    """Cost of each rank's microbatches in a padded phase: rows times the cost of the longest.

    Args:
        costs: int64 (n,), of a row as long as the sample.

    Returns:
        int64 (num_ranks, num_microbatches).
    """
    shape = (num_ranks, shares.num_microbatches)
    counts, longest = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    np.add.at(counts, (shares.rank, shares.microbatch), 1)
    np.maximum.at(longest, (shares.rank, shares.microbatch), costs)
    return counts * longest


def padded_loads(costs: Ints, shares: PaddedShares, num_ranks: int) -> Ints:
    """`padded_cells` of each rank together, int64 (num_ranks,)."""
    loads: Ints = padded_cells(costs, shares, num_ranks).sum(axis=1)
    return loads


def dealt_shares(positions: Ints, num_ranks: int, num_microbatches: int) -> PaddedShares:
    """What `loads_unbalanced` prices: samples dealt out in turn, a rank's cut by length into even microbatches."""
    rank = dealt(len(positions), num_ranks)
    microbatch = np.zeros(len(positions), np.int32)
    for mine in _by_rank(rank, positions, num_ranks):
        microbatch[mine] = np.arange(len(mine)) * num_microbatches // max(1, len(mine))
    return PaddedShares(rank, microbatch, num_microbatches)


def padded_lower_bound(costs: Ints, positions: Ints, num_ranks: int, padded: PaddedCost) -> int:
    """No assignment of whole samples to ranks, a microbatch each, has a smaller largest load."""
    rank = assign_padded(positions, num_ranks, padded.cost, padded.multiple_of)
    return int(padded_loads(costs, PaddedShares(rank, np.zeros_like(rank), 1), num_ranks).max(initial=0))


def _cuts(lengths: Ints, most: int, others: list[tuple[Ints, int]]) -> list[int]:
    """Where microbatches of samples in descending order of length begin, and the end: each as large as fits."""
    sums = [(np.concatenate([[0], np.cumsum(column)]), cap) for column, cap in others]
    cuts = [0]
    while (start := cuts[-1]) < len(lengths):
        stop = start + most // int(lengths[start])
        for sum_to, cap in sums:
            stop = min(stop, int(np.searchsorted(sum_to, sum_to[start] + cap, side="right")) - 1)
        cuts.append(min(max(stop, start + 1), len(lengths)))
    return cuts


def _step_cost(costs: Mapping[str, Ints], shares: PaddedShares, num_ranks: int, balance: Balance) -> int:
    """Time of a step: what ranks wait for, in each microbatch and phase or only at the end."""
    cells = np.stack(
        [
            padded_cells(column, shares, num_ranks)
            if phase == "llm"
            else cells_of(column, shares.rank, shares.microbatch, num_ranks, shares.num_microbatches)
            for phase, column in costs.items()
        ]
    )
    waits = cells.max(axis=1) if balance.objective == "barrier" else cells.sum(axis=(0, 2)).max()
    return int(np.sum(waits))


def _by_rank(rank: Ranks, lengths: Ints, num_ranks: int) -> list[NDArray[np.intp]]:
    """Places of each rank's samples, from the longest, ties in order."""
    order = np.lexsort((-lengths, rank))
    return np.split(order, np.searchsorted(rank[order], np.arange(1, num_ranks)))


def _descending(values: Ints) -> NDArray[np.intp]:
    """Places from the largest value, ties in order."""
    return np.argsort(-values, kind="stable")
