"""Planning padded batches: who gets which sample where a microbatch costs its rows times its longest one.

    rank as for packed batches, by all phases or llm ---+
    rank by balance_padded, or equal blocks of lengths -+--> each split into microbatches -+
    cells of neighbours in length, a row of ranks at a time -------------------------------+-> the one that costs least

Only `llm` is padded in the costs. Each candidate is priced whole, encoder phases included, so the plan never costs
more than the packed one would in this layout. All in integers: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import PhaseCost, balance_padded
from orchdata.planning.assign import assign, dealt
from orchdata.planning.balance import Balance
from orchdata.planning.shares import Shares, cells, counts_kept

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PaddedCost:
    """What a row of the padded `llm` batch costs, and the multiple its length is aligned to."""

    cost: PhaseCost
    multiple_of: int = 1


def share_out_padded(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
    positions: Ints,
    padded: PaddedCost,
) -> Shares:
    """Assign samples to ranks and microbatches so that padded steps take the least time, of the candidates above.

    None has more micro-steps than the split of what packed balancing gives; of equals the one with fewer is taken,
    then the first. Where samples may not go to any rank (scope "grouped" or "grid"), or nothing is balanced, only
    packed balancing is tried.

    Args:
        costs: balanced phase -> int64 (n,); `llm`, the last, is the cost of a row as long as the sample, aligned.
        sizes: capped phase -> int64 (n,), its positions; `balance.caps["llm"]` caps rows times the longest.
        stream_rank: int32 (n,), whose streams each sample is drawn from.
        num_microbatches: how many, or fewer where so many are not found; None for at most what packed balancing gives.
        positions: int64 (n,), of `llm`, aligned, at least 1.

    Raises:
        ValueError: a sample above a cap, unless `balance.oversize` is "own".
    """
    ranks = [assign(costs, balance, num_ranks, stream_rank)]
    balanced = balance.scope != "none" and num_ranks > 1 and len(positions) > 0
    if balanced and len(costs) > 1:
        ranks.append(assign({"llm": costs["llm"]}, balance, num_ranks, stream_rank))
    anywhere = balanced and balance.scope == "global"
    if anywhere and balance.equal_count:
        ranks.append(assign_blocks(positions, num_ranks))
    elif anywhere:
        ranks.append(assign_padded(positions, num_ranks, padded.cost, padded.multiple_of, balance.max_samples))
    shares = [split_padded(rank, num_ranks, sizes, balance) for rank in ranks]
    most = num_microbatches or shares[0].num_microbatches
    if anywhere and sizes and balance.price.meets_in_micro_steps:
        shares += _in_blocks(costs["llm"], sizes, num_ranks, balance, most, num_microbatches)
    allowed = [one for one in shares if one.num_microbatches == num_microbatches]
    allowed = allowed or [one for one in shares if one.num_microbatches <= most] or shares[:1]
    if len(allowed) == 1:
        return allowed[0]
    # The first of equals: what packed balancing chose keeps samples where they were.
    return min(
        allowed, key=lambda one: (balance.price.of(padded_cells_of(costs, one, num_ranks)), one.num_microbatches)
    )


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


def split_padded(rank: Ranks, num_ranks: int, sizes: Mapping[str, Ints], balance: Balance) -> Shares:
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
        return Shares(rank, microbatch, 1)
    caps = balance.caps
    for phase, column in sizes.items():
        if balance.oversize != "own" and int(column.max(initial=0)) > caps[phase]:
            raise ValueError(
                f"a sample has {int(column.max())} {phase} positions, max_tokens allows {caps[phase]}; raise it, or "
                "use Balance(oversize='own')"
            )
    num_microbatches = 1
    for mine in _by_rank(rank, _lengths(sizes), num_ranks):
        cuts = _Cutter(mine, sizes, caps).cut()
        microbatch[mine] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        num_microbatches = max(num_microbatches, len(cuts) - 1)
    return Shares(rank, microbatch, num_microbatches)


def _in_blocks(
    costs: Ints, sizes: Mapping[str, Ints], num_ranks: int, balance: Balance, most: int, wanted: int | None
) -> Iterator[Shares]:
    """All samples from the longest, cut into cells within the caps; micro-steps are of `num_ranks` cells in a row.

    Cells as large as caps allow give the fewest micro-steps; of that many, or as many as are wanted, cells that cost as
    little as can be give the cheapest. Without those that break a limit on counts, or need more than `most`.
    """
    order = np.lexsort((-_lengths(sizes), -costs))
    cutter, dear = _Cutter(order, sizes, balance.caps), costs[order]
    cuts = cutter.cut()
    low, high = int(costs.max()), int(costs.max()) * len(order)
    room = (wanted or -(-(len(cuts) - 1) // num_ranks)) * num_ranks
    while low < high:  # The least that a cell may cost with no more micro-steps.
        middle = (low + high) // 2
        if len(cutter.cut(middle // dear, room)) - 1 <= room:
            high = middle
        else:
            low = middle + 1
    for found in (cutter.cut(low // dear), cuts):
        cell = np.empty(len(order), np.int32)
        cell[order] = np.repeat(np.arange(len(found) - 1, dtype=np.int32), np.diff(found))
        shares = Shares(cell % np.int32(num_ranks), cell // np.int32(num_ranks), -(-(len(found) - 1) // num_ranks))
        if shares.num_microbatches <= most and counts_kept(shares.rank, num_ranks, balance):
            yield shares


def _lengths(sizes: Mapping[str, Ints]) -> Ints:
    """By which microbatches are cut: positions of `llm`, or all alike where it is not capped."""
    return sizes.get("llm", np.ones(len(next(iter(sizes.values()))), np.int64))


class _Cutter:
    """Cuts samples, given from the longest, into microbatches, each as large as the caps allow."""

    def __init__(self, order: NDArray[np.intp], sizes: Mapping[str, Ints], caps: Mapping[str, int]) -> None:
        self._rows = caps.get("llm", len(order)) // _lengths(sizes)[order]
        self._sums = [
            (np.concatenate([[0], np.cumsum(column[order])]), caps[phase])
            for phase, column in sizes.items()
            if phase != "llm"
        ]

    def cut(self, most_rows: Ints | None = None, enough: int | None = None) -> list[int]:
        """Where microbatches begin, and the end.

        Args:
            most_rows: int64 (n,), of a microbatch that begins with each sample.
            enough: microbatches after which the rest does not matter.
        """
        rows = self._rows if most_rows is None else np.minimum(self._rows, most_rows)
        cuts = [0]
        while (start := cuts[-1]) < len(rows) and (enough is None or len(cuts) <= enough + 1):
            stop = start + int(rows[start])
            for sum_to, cap in self._sums:
                stop = min(stop, int(np.searchsorted(sum_to, sum_to[start] + cap, side="right")) - 1)
            cuts.append(min(max(stop, start + 1), len(rows)))
        return cuts


def padded_cells(costs: Ints, shares: Shares, num_ranks: int) -> Ints:
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


def padded_loads(costs: Ints, shares: Shares, num_ranks: int) -> Ints:
    """`padded_cells` of each rank together, int64 (num_ranks,)."""
    loads: Ints = padded_cells(costs, shares, num_ranks).sum(axis=1)
    return loads


def padded_in_turn(positions: Ints, num_ranks: int, num_microbatches: int) -> Shares:
    """What `loads_unbalanced` prices: samples dealt out in turn, a rank's cut by length into even microbatches."""
    rank = dealt(len(positions), num_ranks)
    microbatch = np.zeros(len(positions), np.int32)
    for mine in _by_rank(rank, positions, num_ranks):
        microbatch[mine] = np.arange(len(mine)) * num_microbatches // max(1, len(mine))
    return Shares(rank, microbatch, num_microbatches)


def padded_lower_bound(costs: Ints, positions: Ints, num_ranks: int, padded: PaddedCost) -> int:
    """No assignment of whole samples to ranks, a microbatch each, has a smaller largest load."""
    rank = assign_padded(positions, num_ranks, padded.cost, padded.multiple_of)
    return int(padded_loads(costs, Shares(rank, np.zeros_like(rank), 1), num_ranks).max(initial=0))


def padded_cells_of(costs: Mapping[str, Ints], shares: Shares, num_ranks: int) -> list[Ints]:
    """`cells` of shares of which `llm`, the last phase, is padded."""
    llm = list(costs)[-1]
    packed = cells({phase: column for phase, column in costs.items() if phase != llm}, shares, num_ranks)
    return [*packed, padded_cells(costs[llm], shares, num_ranks)]


def _by_rank(rank: Ranks, lengths: Ints, num_ranks: int) -> list[NDArray[np.intp]]:
    """Places of each rank's samples, from the longest, ties in order."""
    order = np.lexsort((-lengths, rank))
    return np.split(order, np.searchsorted(rank[order], np.arange(1, num_ranks)))


def _descending(values: Ints) -> NDArray[np.intp]:
    """Places from the largest value, ties in order."""
    return np.argsort(-values, kind="stable")
