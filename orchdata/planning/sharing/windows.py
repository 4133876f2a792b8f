"""Sharing out windows of concatenated documents: each microbatch is one window.

    pieces of documents --sums of their tokens--> windows --sorted by cost--> micro-steps --ranks--> Shares

All windows have the same length, so only their costs differ: a window of one document costs more attention than one of
many. Windows of about the same cost are put into one micro-step, where ranks wait for each other, and the heaviest of
them goes to the rank with the least so far. All in integers: every rank computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.native.costs import sequence_costs
from orchdata.planning.layout import Attention
from orchdata.planning.sharing.fixed import FixedCost
from orchdata.planning.sharing.shares import Shares, StepSamples

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WindowCost(FixedCost):
    """The length of windows, and what a sequence costs, as `CostModel.coefficients` gives it.

    The pieces of a step are in the order of its windows, and fill them: so positions alone say where windows begin.

    Attributes:
        attention: "document": each piece is a sequence. "window": each window is one.
    """

    attention: Attention

    def of_pieces(self, tokens: Ints) -> Ints:
        """Return the cost of each piece, int64 (num_pieces,). With attention "window", the pieces share the cost of
        their window by their tokens.
        """
        costs: Ints
        if self.attention == "document":
            costs = sequence_costs(tokens, *self.coefficients)
            return costs
        whole = int(sequence_costs(np.array([self.length]), *self.coefficients)[0])
        each, rest = divmod(whole, self.length)
        stop = np.cumsum(tokens)
        # The cost up to and with each piece, whose differences add up to the whole.
        windows, inside = np.divmod(stop, self.length)
        until = windows * whole + inside * each + inside * rest // self.length
        costs = np.maximum(np.diff(until, prepend=0), 1)
        return costs

    def windows_of(self, tokens: Ints) -> Ints:
        """Return the window of each piece, int64 (num_pieces,), ascending from 0."""
        before: Ints = np.cumsum(tokens) - tokens
        return before // self.length

    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """Return ranks and microbatches of the pieces. The windows of a step that its ranks cannot share evenly leave
        some ranks without a window in the last micro-step.
        """
        window = self.windows_of(step.positions)
        costs = _sums(step.costs["llm"], window)
        number, num_ranks = len(costs), step.num_ranks
        micro_steps = max(1, -(-number // num_ranks), num_microbatches or 1)
        turn = np.arange(number)
        rank, microbatch = turn % num_ranks, turn // num_ranks
        if step.balance.scope != "none" and num_ranks > 1 and number and int(costs.min()) < int(costs.max()):
            rank, microbatch = _balanced(costs, num_ranks)
        return Shares(rank[window].astype(np.int32), microbatch[window].astype(np.int32), micro_steps)

    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """Windows are dealt out in turn."""
        of_windows = _sums(costs, self.windows_of(positions))
        loads = np.zeros(num_ranks * num_microbatches, np.int64)
        loads[: len(of_windows)] = of_windows
        loads[len(of_windows) :] = sequence_costs(np.array([self.length]), *self.coefficients)[0]
        return loads.reshape(num_microbatches, num_ranks).T

    def lower_bound(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> int:
        return lower_bound(_sums(costs, self.windows_of(positions)), num_ranks)


def _sums(costs: Ints, window: Ints) -> Ints:
    """Return the cost of each window, int64 (num_windows,)."""
    sums = np.zeros(int(window[-1]) + 1 if len(window) else 0, np.int64)
    np.add.at(sums, window, costs)
    return sums


def _balanced(costs: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Return the rank and micro-step of each window. Ties: the first window, then the lowest rank."""
    rank, microbatch = np.empty((2, len(costs)), np.int64)
    loads = np.zeros(num_ranks, np.int64)
    heaviest = np.argsort(-costs, kind="stable")
    for number, start in enumerate(range(0, len(costs), num_ranks)):
        together = heaviest[start : start + num_ranks]
        ranks = np.argsort(loads, kind="stable")[: len(together)]
        rank[together], microbatch[together] = ranks, number
        loads[ranks] += costs[together]
    return rank, microbatch
