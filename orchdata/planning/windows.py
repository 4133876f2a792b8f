"""Windows of concatenated documents: which tokens of which documents each step has, and which rank has each window.

    order, tokens of documents --one sequence of tokens--> steps of `size` windows --cut--> pieces of documents
    pieces --sums of their tokens--> windows --sorted by cost--> micro-steps --ranks--> Shares

The documents of all epochs follow each other in their orders. A step has the next `size * length` tokens, and a piece
is what one window has of one document: the first step of an epoch begins with the rest of the epoch before, and every
step is full. With `drop_last` each epoch begins with its first document. Where a step begins is computed from sums of
tokens. Each microbatch is one window. Windows of about the same cost are put into one micro-step, where ranks wait for
each other, and the heaviest of them goes to the rank with the least so far: all in integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.loaders.storage.storage import basename
from orchdata.native.costs import sequence_costs
from orchdata.order.order import SampleOrder, Samples, TokenCounts
from orchdata.order.steps import Batches, Begin, Location, StepTask, Sums
from orchdata.planning.balance import Attention
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.shares import Shares, StepSamples

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """The tokens that the n pieces of a step have of their documents, as many as `Plan.llm_positions`: int64 (n,)."""

    first: Ints  # the first token of the piece in its document
    epoch: Ints  # whose pass through the documents the piece belongs to: that of the step, or the one before
    loss_tokens: Ints  # labels other than -100


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBatches(Batches):
    """An order of documents cut into global batches of windows. It pickles."""

    size: int  # windows of a global batch, over all ranks
    length: int  # tokens of a window
    order: SampleOrder
    sums: Sums  # of tokens along the order
    counts: TokenCounts  # tokens of documents
    index: Any  # names documents for states
    drop_last: bool = False  # an epoch begins with its first document, and its rest is left out

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.size * self.length

    def count(self, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> int:
        if self.drop_last:
            return self.sums.of_epoch(epoch) // self.step_tokens
        until = self.sums.of_epochs_before(epoch) + self.sums.of_epoch(epoch)
        return until // self.step_tokens - self._steps_before(epoch)

    def bounds(self, step: int, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> tuple[int, int]:
        """Return the positions of the epoch whose documents the step has tokens of, without its rest of the epoch
        before. Raises IndexError outside the epoch.
        """
        if not 0 <= step < (count := self.count(num_positions, epoch)):
            raise IndexError(f"step {step} is outside the epoch of {count} steps")
        start, stop = self._tokens(epoch, step)
        return self.sums.position(epoch, max(0, start)), self.sums.position(epoch, stop - 1) + 1

    def describe(self) -> dict[str, Any]:
        return {"global_batch_size": self.size, "windows": {"length": self.length, "drop_last": self.drop_last}}

    def samples(self, order: SampleOrder, task: StepTask) -> Samples:
        """Return the pieces of a step, in the order of its windows."""
        self.bounds(task.step, 0, task.epoch)
        parts = self._parts(task.epoch, *self._tokens(task.epoch, task.step))
        documents = Samples.concatenate([self._documents(order, *part) for part in parts])
        tokens = documents.tokens
        if int(tokens.sum()) != self.step_tokens:
            reason = f"the documents of step {task.step} have {tokens.sum()} tokens, not {self.step_tokens}"
            raise self.index.damaged(reason)
        # Documents are cut where a window begins.
        begins = np.cumsum(tokens) - tokens
        cuts = np.union1d(begins, np.arange(self.size, dtype=np.int64) * self.length)
        of = np.searchsorted(begins, cuts, side="right") - 1
        first = documents.first[of] + cuts - begins[of]
        return documents.take(of)._replace(tokens=np.diff(cuts, append=self.step_tokens), first=first)

    def location(self, step: int, length: Callable[[int], int], epoch: int, begin: Begin | None) -> Location:
        """Return where a step begins."""
        start = self._tokens(epoch, step)[0]
        (epoch_of, token, _), *_ = self._parts(epoch, start, start + 1)
        position = self.sums.position(epoch_of, token)
        row = int(self.order.rows(epoch_of, position, position + 1)[1][0])
        return Location(
            position=position if epoch_of == epoch else 0 if epoch_of < epoch else self.order.length(epoch),
            tokens=max(0, start),
            document={"epoch": epoch_of, "position": position, **self._name_of(row)},
            token=token - self.sums.before(epoch_of, position),
        )

    def step_at(self, epoch: int, position: int, token: int) -> int:
        """Return the step of an epoch that begins at a token of one of its documents."""
        tokens = self.sums.before(epoch, position) + token
        if self.drop_last:
            return tokens // self.step_tokens
        return (self.sums.of_epochs_before(epoch) + tokens) // self.step_tokens - self._steps_before(epoch)

    def _name_of(self, row: int) -> dict[str, Any]:
        piece = int(self.index.piece[np.array([row])][0])
        name = {"shard": basename(self.index.shard_of(row).url), "key": self.index.key(row)}
        return name | ({"piece": piece} if self.index.is_split else {})

    def _steps_before(self, epoch: int) -> int:
        return self.sums.of_epochs_before(epoch) // self.step_tokens

    def _tokens(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the tokens of a step, counted from the start of the epoch: negative for those of the epoch before."""
        if self.drop_last:
            return step * self.step_tokens, (step + 1) * self.step_tokens
        start = (self._steps_before(epoch) + step) * self.step_tokens - self.sums.of_epochs_before(epoch)
        return start, start + self.step_tokens

    def _parts(self, epoch: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return tokens [start, stop), counted from the start of an epoch, as (epoch, start, stop) of their epochs."""
        while start < 0:
            epoch -= 1
            start, stop = start + (tokens := self.sums.of_epoch(epoch)), stop + tokens
        parts = []
        while start < stop:
            tokens = self.sums.of_epoch(epoch)
            if start < tokens:
                parts.append((epoch, start, min(stop, tokens)))
            epoch, start, stop = epoch + 1, max(0, start - tokens), stop - tokens
        return parts

    def _documents(self, order: SampleOrder, epoch: int, start: int, stop: int) -> Samples:
        """Return the documents that have tokens [start, stop) of an epoch, each with its tokens there."""
        position, end = self.sums.position(epoch, start), self.sums.position(epoch, stop - 1) + 1
        documents = order.samples(epoch, position, end)
        tokens = self.counts(documents.row)
        begins = self.sums.before(epoch, position) + np.cumsum(tokens) - tokens
        first = np.maximum(start - begins, 0)
        tokens = np.minimum(begins + tokens, stop) - begins - first
        return documents._replace(tokens=tokens, first=first, epoch=np.full(len(tokens), epoch, np.int64))


def piece_labels(tokens: Ints, document_labels: Ints) -> Ints:
    """Return the labels of pieces, int64 (n,): of all tokens but the first, or of none, as of their documents."""
    return np.where(document_labels > 0, tokens - 1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class WindowCost(FixedCost):
    """The length of windows, and what a sequence costs, as `CostModel.coefficients` gives it: each piece is a sequence,
    or with attention "window" each window. The pieces of a step are in the order of its windows, and fill them: so
    positions alone say where windows begin.
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
        """Return ranks and microbatches of the pieces. Windows that ranks cannot share evenly leave some without one at
        the end.
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
