"""Windows of concatenated documents: which tokens of which documents each step has.

    order, tokens of documents --one sequence of tokens--> steps of `size` windows --cut--> pieces of documents

The documents of all epochs follow each other in their orders. A step has the next `size * length` tokens, and a piece
is what one window has of one document. So the first step of an epoch begins with the rest of the epoch before, and
every step is full. With `drop_last` each epoch begins with its first document, and its rest is left out. Where a step
begins is computed from sums of tokens, for any epoch and step.

Sharing out windows of concatenated documents: each microbatch is one window.

    pieces of documents --sums of their tokens--> windows --sorted by cost--> micro-steps --ranks--> Shares

All windows have the same length, so only their costs differ: a window of one document costs more attention than one of
many. Windows of about the same cost are put into one micro-step, where ranks wait for each other, and the heaviest of
them goes to the rank with the least so far. All in integers: every rank computes the same.

What windows of concatenated documents can be made of: checks of a loader's arguments and of its index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.balancers.costs.model import CostModel
from orchdata.loaders.index.index import Index, basename
from orchdata.loaders.recipe import Recipe
from orchdata.native.costs import sequence_costs
from orchdata.notices import warn_once
from orchdata.order.mixture import AnyOrder
from orchdata.order.order import SampleOrder, TokenCounts
from orchdata.order.steps import Batches, Begin, GlobalBatches, Location, Sums
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Attention
from orchdata.planning.sharing.accumulated import FixedCost
from orchdata.planning.sharing.shares import Shares, StepSamples

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """The tokens that the n pieces of a step have of their documents. Their numbers are `Plan.llm_positions`.

    Attributes:
        first: int64 (n,), the first token of the piece in its document.
        epoch: int64 (n,), the epoch whose pass through the documents the piece belongs to: that of the step, or the one
            before for its rest.
        loss_tokens: int64 (n,), labels other than -100.
    """

    first: Ints
    epoch: Ints
    loss_tokens: Ints


class Pieces(NamedTuple):
    """The pieces of a step, in the order of their windows; all arrays have n items.

    Attributes:
        source, row: the document, as `SampleOrder.rows` gives it.
        stream: the stream that the document is drawn from.
        passes: of a mixture, the pass through its source; else None.
        tokens: number of tokens, at least 1.
        first, epoch: see `TokenRanges`.
    """

    source: NDArray[np.int32]
    row: Ints
    stream: Ints
    passes: NDArray[np.int32] | None
    tokens: Ints
    first: Ints
    epoch: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBatches(Batches):
    """An order cut into global batches of windows. It pickles.

    Attributes:
        size: windows of a global batch, over all ranks.
        length: tokens of a window.
        drop_last: whether an epoch begins with its first document, and its rest is left out.
        order: of the documents.
        sums: tokens along the order.
        counts: tokens of documents.
        index: names documents for states.
    """

    size: int
    length: int
    order: SampleOrder
    sums: Sums
    counts: TokenCounts
    index: Index
    drop_last: bool = False

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
        """Return the positions of the epoch whose documents the step has tokens of. Its rest of the epoch before is not
        among them. Raises IndexError outside the epoch.
        """
        if not 0 <= step < (count := self.count(num_positions, epoch)):
            raise IndexError(f"step {step} is outside the epoch of {count} steps")
        start, stop = self._tokens(epoch, step)
        return self.sums.position(epoch, max(0, start)), self.sums.position(epoch, stop - 1) + 1

    def describe(self) -> dict[str, Any]:
        return {"global_batch_size": self.size, "windows": {"length": self.length, "drop_last": self.drop_last}}

    def pieces(self, epoch: int, step: int) -> Pieces:
        """Return the pieces of a step, which `bounds` has checked."""
        parts = [self._documents(*part) for part in self._parts(epoch, *self._tokens(epoch, step))]
        tokens = np.concatenate([part.tokens for part in parts])
        if int(tokens.sum()) != self.step_tokens:
            raise self.index.damaged(f"the documents of step {step} have {tokens.sum()} tokens, not {self.step_tokens}")
        # Documents are cut where a window begins.
        begins = np.cumsum(tokens) - tokens
        cuts = np.union1d(begins, np.arange(self.size, dtype=np.int64) * self.length)
        of = np.searchsorted(begins, cuts, side="right") - 1
        first = np.concatenate([part.first for part in parts])
        passes = [part.passes for part in parts if part.passes is not None]
        return Pieces(
            source=np.concatenate([part.source for part in parts])[of],
            row=np.concatenate([part.row for part in parts])[of],
            stream=np.concatenate([part.stream for part in parts])[of],
            passes=np.concatenate(passes)[of] if passes else None,
            tokens=np.diff(cuts, append=self.step_tokens),
            first=first[of] + cuts - begins[of],
            epoch=np.concatenate([part.epoch for part in parts])[of],
        )

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

    def _documents(self, epoch: int, start: int, stop: int) -> Pieces:
        """Return the documents that have tokens [start, stop) of an epoch, each with its tokens there."""
        position, end = self.sums.position(epoch, start), self.sums.position(epoch, stop - 1) + 1
        source, row = self.order.rows(epoch, position, end)
        tokens = self.counts(row)
        begins = self.sums.before(epoch, position) + np.cumsum(tokens) - tokens
        first = np.maximum(start - begins, 0)
        return Pieces(
            source=source,
            row=row,
            stream=self.order.drawn_from(epoch, position, end),
            passes=self.order.passes(epoch, position, end),
            tokens=np.minimum(begins + tokens, stop) - begins - first,
            first=first,
            epoch=np.full(len(row), epoch, np.int64),
        )


def piece_labels(tokens: Ints, document_labels: Ints) -> Ints:
    """Return the labels of pieces, int64 (n,): of all tokens but the first, or of none (see `check_labels`).

    Args:
        tokens: int64 (n,), of the pieces.
        document_labels: int64 (n,), labels of their whole documents.
    """
    return np.where(document_labels > 0, tokens - 1, 0)


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


_CHUNK_ROWS = 1 << 20
_WHOLE = "or keep samples whole, by od.Packed(length=...) without concatenate"


def check_windows(
    length: int | None,
    balance: Balance,
    size: Mapping[str, Any],
    cost: CostModel | None,
    recipes: Sequence[Recipe],
    index: Index,
) -> None:
    """Raise ValueError if a loader's arguments and data do not fit windows of `length` tokens; None for no windows.

    Args:
        size: the argument that says how large a step is.
    """
    if length is None:
        return
    budgets = size.get("global_batch_tokens")
    if budgets is not None:
        near = max(1, round(budgets[0][1] / length))
        raise ValueError(
            f"global_batch_tokens: the steps of Packed(concatenate=True) are counted in windows of {length} tokens; "
            f"pass global_batch_size={near}, which is {near * length} tokens"
        )
    for name, is_given in (
        ("Balance.assignment='per_phase' spreads media over ranks", balance.assignment == "per_phase"),
        (f"Balance.max_samples={balance.max_samples} caps samples", balance.max_samples is not None),
        (f"Balance.max_tokens caps {', '.join(balance.caps)}", any(phase != "llm" for phase in balance.caps)),
        (f"cost= names the phases {', '.join(cost.phases if cost else ())}", cost and cost.phases != ("llm",)),
    ):
        if is_given:
            raise ValueError(
                f"{name}, and a microbatch of Packed(concatenate=True) is one window of text: leave it out"
            )
    # Nothing but text, in the data and in what the recipes say.
    usual = Recipe().modalities
    out = f"leave media out, by od.Recipe({', '.join(f'{name}=None' for name in usual)}, text=...), {_WHOLE}"
    for name in index.modalities[1:]:
        if count := index.totals["modalities"][name]["parts"]:
            raise ValueError(
                f"Packed(concatenate=True): the data set has {count:,} parts of {name}, which cannot be cut: {out}"
            )
    for name, modality in (each for recipe in recipes for each in recipe.modalities.items()):
        if name not in usual or modality != usual[name]:
            raise ValueError(f"Packed(concatenate=True) cuts text, and the recipe says how {name} is prepared: {out}")


def check_accumulate(accumulate: int, windows: int, num_ranks: int) -> None:
    """Raise ValueError unless a step of so many windows has `accumulate` of them on a rank."""
    each = -(-windows // num_ranks)
    if each != accumulate:
        raise ValueError(
            f"a microbatch of Packed(concatenate=True) is one window, so a step of {windows} windows on {num_ranks} "
            f"ranks has {each} microbatches, not accumulate={accumulate}: leave accumulate out"
        )


def windows_of(batches: Batches, length: int, order: AnyOrder, counts: TokenCounts, index: Index) -> WindowBatches:
    """Return the steps of windows of an order. Raises ValueError if an epoch has not enough tokens for a step.

    Args:
        batches: their size is in windows.
    """
    assert isinstance(batches, GlobalBatches)
    windows = WindowBatches(
        size=batches.size,
        length=length,
        drop_last=batches.drop_last,
        order=order,
        sums=order.sums(counts),
        counts=counts,
        index=index,
    )
    tokens = windows.sums.of_epoch(0)
    if not tokens:
        raise ValueError("the data set has no usable document, and Packed(concatenate=True) fills every window")
    if tokens < windows.step_tokens:
        most = tokens // length
        raise ValueError(
            f"the documents of an epoch have {tokens:,} tokens, and a step of {windows.size:,} windows of "
            f"length={length} has {windows.step_tokens:,}: use {f'at most {most:,} windows a step, ' if most else ''}"
            "a smaller length, or more data"
        )
    return windows


def warn_of_windows(batches: WindowBatches, recipes: Sequence[Recipe], num_ranks: int) -> None:
    """Warn once about microbatches that stay empty, and about texts that are split without need."""
    micro_steps = -(-batches.size // num_ranks)
    empty = micro_steps * num_ranks - batches.size
    if empty:
        warn_once(
            "windows that ranks cannot share",
            f"global_batch_size={batches.size} windows on {num_ranks} ranks: each rank has {micro_steps} microbatches "
            f"a step, and {empty} of these {micro_steps * num_ranks} have no window and are padding. "
            f"{micro_steps * num_ranks} windows would fill them",
        )
    if any(recipe.text.overflow == "split" for recipe in recipes):
        warn_once(
            "split texts are concatenated",
            "TextPreprocessor(overflow='split') makes documents of the pieces of a long text, which are shuffled one "
            "by one. Packed(concatenate=True) cuts long texts itself: leave max_tokens and overflow out",
        )


def check_labels(length: int | None, index: Index, excluded: Ints) -> None:
    """Raise ValueError if some tokens of a document have no label: a cut document's labels are then not known.

    Args:
        length: tokens of a window; None for no windows, which checks nothing.
        excluded: rows that are left out, ascending.
    """
    count, first = 0, -1
    if length is None:
        return
    for start in range(0, index.num_rows, _CHUNK_ROWS):
        row = np.arange(start, min(start + _CHUNK_ROWS, index.num_rows))
        tokens, loss = index.llm_tokens[row].astype(np.int64), index.loss_tokens[row]
        partial = row[(loss > 0) & (loss < tokens - 1)]
        partial = partial[~np.isin(partial, excluded)]
        first = int(partial[0]) if first < 0 and len(partial) else first
        count += len(partial)
    if count:
        raise ValueError(
            f"{count:,} of {index.num_rows:,} documents have tokens without a label, such as the prompts of a chat; "
            f"the first is {index.called(first)} of {index.shard_of(first).url}. Packed(concatenate=True) cuts "
            "documents, and which side of a cut has how many labels is not in the index. Give the model all of it as "
            f"plain text, by Recipe(record=...), a function of yours that returns a string, {_WHOLE}"
        )
