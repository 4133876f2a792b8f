"""Sharing out padded steps: a microbatch costs its number of rows times its longest row.

    rank as for packed steps, by all phases or llm -----+
    rank by balance_padded, or equal blocks of lengths -+--> each split into microbatches -+
    cells of neighbours in length, one cell a rank in each micro-step ---------------------+-> the one that costs least

Only `llm` is padded in the costs. Each candidate is priced with its encoder phases, so the plan never costs more than
the packed one would in this layout. All in integers: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.balancers.padded import balance_padded
from orchdata.planning.assign import dealt
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, one_microbatch

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PaddedCost(Padding):
    """`llm` batches padded to their longest sample: what a row costs, and the multiple to which its length is aligned.

    `StepSamples.costs["llm"]` is then the cost of a row as long as the sample, aligned; positions are aligned and at
    least 1. The cap of `llm` counts rows times the longest.
    """

    cost: PhaseCost
    multiple_of: int = 1

    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """The cheapest of the candidates above.

        None of them has more micro-steps than the split of ranks that packed balancing gives. Ties: fewer micro-steps,
        then the first found, as packed balancing keeps samples where they were. Only packed balancing is tried where
        samples may not go to any rank (scope "grouped" or "grid"), or nothing is balanced.

        Args:
            num_microbatches: or fewer, where this number is not found; by default at most what packed balancing gives.
        """
        balance, num_ranks, positions = step.balance, step.num_ranks, step.positions
        ranks = [step.assign()]
        balanced = balance.scope != "none" and num_ranks > 1 and len(positions) > 0
        if balanced and len(step.costs) > 1:
            ranks.append(step.of_phases("llm").assign())
        anywhere = balanced and balance.scope == "global"
        if anywhere and balance.equal_count:
            ranks.append(assign_blocks(positions, num_ranks))
        elif anywhere:
            ranks.append(self.assign(positions, num_ranks, balance.max_samples))
        shares = [split_padded(step, rank) for rank in ranks]
        most = num_microbatches or shares[0].num_microbatches
        if anywhere and step.meets_in_micro_steps:
            shares += _in_blocks(step, most, num_microbatches)
        allowed = [one for one in shares if one.num_microbatches == num_microbatches]
        allowed = allowed or [one for one in shares if one.num_microbatches <= most] or shares[:1]
        return allowed[0] if len(allowed) == 1 else self.cheapest(step, allowed)

    def assign(self, positions: Ints, num_ranks: int, max_samples: int | None = None) -> Ranks:
        """The rank of each sample, int32 (n,), with the smallest makespan of one microbatch a rank."""
        return balance_padded(
            positions, num_ranks, self.cost, max_samples=max_samples, multiple_of=self.multiple_of
        ).rank

    def loads(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        shape = (num_ranks, shares.num_microbatches)
        counts, longest = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        np.add.at(counts, (shares.rank, shares.microbatch), 1)
        np.maximum.at(longest, (shares.rank, shares.microbatch), costs)
        return counts * longest

    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """A rank's samples are cut by length into even microbatches."""
        rank, microbatch = dealt(len(positions), num_ranks), np.zeros(len(positions), np.int32)
        for mine in _by_rank(rank, positions, num_ranks):
            microbatch[mine] = np.arange(len(mine)) * num_microbatches // max(1, len(mine))
        return self.loads(costs, positions, Shares(rank, microbatch, num_microbatches), num_ranks)

    def lower_bound(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> int:
        if num_microbatches > 1:
            return lower_bound(costs, num_ranks)
        shares = one_microbatch(self.assign(positions, num_ranks))
        return int(self.loads(costs, positions, shares, num_ranks).max(initial=0))


def assign_blocks(positions: Ints, num_ranks: int) -> Ranks:
    """Equal counts, give or take one: rank 0 gets the longest samples, the last rank the shortest; int32 (n,).

    No other assignment of these counts has smaller loads: see `balance_padded`. Ranks of short samples take one more.
    """
    few, rest = divmod(len(positions), num_ranks)
    counts = np.full(num_ranks, few)
    counts[num_ranks - rest :] += 1
    rank = np.empty(len(positions), np.int32)
    rank[np.argsort(-positions, kind="stable")] = np.repeat(np.arange(num_ranks, dtype=np.int32), counts)
    return rank


def split_padded(step: StepSamples, rank: Ranks) -> Shares:
    """Cut each rank's samples, from the longest, into as few microbatches as the caps allow.

    A microbatch holds neighbours in length, as many as fit: rows times its longest within the cap of `llm`, and sums
    within those of other phases. Without other caps none is cut into fewer. The m-th microbatches of all ranks, which
    run in step, then have about the same length.

    Raises:
        ValueError: a sample above a cap, unless `balance.oversize` is "own".
    """
    sizes, caps = step.sizes, step.balance.caps
    if not sizes:
        return one_microbatch(rank)
    for phase, column in sizes.items():
        if step.balance.oversize != "own" and int(column.max(initial=0)) > caps[phase]:
            raise ValueError(
                f"a sample has {int(column.max())} {phase} positions, max_tokens allows {caps[phase]}; raise it, or "
                "use Balance(oversize='own')"
            )
    microbatch, num_microbatches = np.zeros(len(rank), np.int32), 1
    for mine in _by_rank(rank, _lengths(step), step.num_ranks):
        cuts = _Cutter(step, mine).cut()
        microbatch[mine] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        num_microbatches = max(num_microbatches, len(cuts) - 1)
    return Shares(rank, microbatch, num_microbatches)


def _in_blocks(step: StepSamples, most: int, wanted: int | None) -> Iterator[Shares]:
    """All samples from the longest, cut into cells within the caps; `num_ranks` consecutive cells are a micro-step.

    Cells as large as caps allow give the fewest micro-steps; of that number, or the number that is wanted, cells with
    the smallest largest cost give the cheapest. Without those that break a limit on counts, or need more than `most`.
    """
    costs, num_ranks = step.costs["llm"], step.num_ranks
    order = np.lexsort((-_lengths(step), -costs))
    cutter, descending = _Cutter(step, order), costs[order]
    largest_cells = cutter.cut()
    low, high = int(costs.max()), int(costs.max()) * len(order)
    room = (wanted or -(-(len(largest_cells) - 1) // num_ranks)) * num_ranks
    while low < high:  # The least that a cell may cost with no more micro-steps.
        middle = (low + high) // 2
        if len(cutter.cut(middle // descending, room)) - 1 <= room:
            high = middle
        else:
            low = middle + 1
    for cuts in (cutter.cut(low // descending), largest_cells):
        cell = np.empty(len(order), np.int32)
        cell[order] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        shares = Shares(cell % np.int32(num_ranks), cell // np.int32(num_ranks), -(-(len(cuts) - 1) // num_ranks))
        if shares.num_microbatches <= most and step.keeps_counts(shares.rank):
            yield shares


def _lengths(step: StepSamples) -> Ints:
    """The key by which microbatches are cut: positions of `llm`, or equal ones where it is not capped."""
    return step.sizes.get("llm", np.ones(step.num_samples, np.int64))


class _Cutter:
    """Cuts samples, given from the longest, into microbatches, each as large as the caps allow."""

    def __init__(self, step: StepSamples, order: NDArray[np.intp]) -> None:
        caps = step.balance.caps
        self._rows = caps.get("llm", len(order)) // _lengths(step)[order]
        self._sums = [
            (np.concatenate([[0], np.cumsum(column[order])]), caps[phase])
            for phase, column in step.sizes.items()
            if phase != "llm"
        ]

    def cut(self, most_rows: Ints | None = None, enough: int | None = None) -> list[int]:
        """Where microbatches begin, and the end.

        Args:
            most_rows: int64 (n,), of a microbatch that begins with each sample.
            enough: number of microbatches after which the rest does not matter.
        """
        rows = self._rows if most_rows is None else np.minimum(self._rows, most_rows)
        cuts = [0]
        while (start := cuts[-1]) < len(rows) and (enough is None or len(cuts) <= enough + 1):
            stop = start + int(rows[start])
            for sum_to, cap in self._sums:
                stop = min(stop, int(np.searchsorted(sum_to, sum_to[start] + cap, side="right")) - 1)
            cuts.append(min(max(stop, start + 1), len(rows)))
        return cuts


def _by_rank(rank: Ranks, lengths: Ints, num_ranks: int) -> list[NDArray[np.intp]]:
    """Indices of each rank's samples, from the longest, ties in order."""
    order = np.lexsort((-lengths, rank))
    return np.split(order, np.searchsorted(rank[order], np.arange(1, num_ranks)))
