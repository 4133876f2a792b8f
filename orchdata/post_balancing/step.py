"""Steps of post_balance: each rank draws its samples, all compute the same plan, and samples move.

On the wire, for each step: five int64 from every rank (its action, iteration, step, number of samples, hash of the last
plan) and three for each of its first 64 samples (cost, loss tokens, bytes); if a rank has more samples, three for each
sample of all ranks, padded to the longest list; then the bytes of the samples that move.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from orchdata.loaders.errors import StepError
from orchdata.post_balancing.group import Bytes, Ints, LostRanksError, RankGroup, unpadded
from orchdata.post_balancing.plan import MoveRule, PostPlan, make_post_plan
from orchdata.ranks.wire import Message, describe, read

Cost = Callable[[Any], int | Mapping[str, int]]
LossTokens = Callable[[Any], int]

# Rows sent together with the action. A constant, so that even ranks with different settings can report that.
_FIRST_ROWS = 64


class _Action(IntEnum):
    """The action of a rank in a step."""

    DRAWING = 0
    EXHAUSTED = 1  # Takes part with an empty list.
    CLOSING = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class PostBatch:
    """One rank's samples of one step.

    Attributes:
        samples: samples of this rank, by the rank that drew them, then in the order drawn; possibly none.
        loss_scale: number of ranks / max(1, loss tokens of the step over all ranks). Summed losses times this, with
            gradients averaged over the ranks, give the mean over all loss tokens (over samples, without `loss_tokens`).
        step: number of the step in this epoch, from 0.
        global_loss_tokens: loss tokens of the step over all ranks; its samples, without `loss_tokens`.
        plan: the rank that drew and the rank that got each sample, the same on every rank.
    """

    samples: list[Any]
    loss_scale: float
    step: int
    global_loss_tokens: int
    plan: PostPlan


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step ready to be delivered, and the loader's position after it was drawn.

    Attributes:
        exhausted: whether the loader had no more.
        state: state of the loader, if it has one.
        seconds: stage -> seconds.
    """

    batch: PostBatch
    exhausted: bool
    state: Any
    seconds: dict[str, float]


@dataclass(slots=True)
class _Drawn:
    """The contribution of this rank to a step."""

    action: _Action
    samples: list[Any] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    table: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    error: Exception | None = None


class StepMaker:
    """Builds the steps of one iteration, one after another, together with the other ranks.

    Args:
        loader: iterated in the thread that builds steps.
        cost, loss_tokens: cost and loss tokens of a sample; a mapping of costs by phase counts as its sum.
        group: the ranks that build steps together.
        rule: when samples move.
        iteration: number of this iteration, the same on every rank.
        step: the first step to build.
        exhausted: whether the loader has no more in this epoch.
    """

    def __init__(
        self,
        loader: Any,
        cost: Cost,
        loss_tokens: LossTokens | None,
        group: RankGroup,
        rule: MoveRule,
        *,
        iteration: int,
        step: int,
        exhausted: bool,
    ) -> None:
        self.group = group
        self.state: Any = None
        self._loader = loader
        self._cost = cost
        self._loss_tokens = loss_tokens
        self._rule = rule
        self._iteration = iteration
        self.step = step
        self._samples: Iterator[Any] | None = iter(()) if exhausted else None
        self._exhausted = exhausted
        self._last_hash = 0
        self._movable = rule.balance.scope != "none" and group.size > 1
        if exhausted:
            self._take_state()

    def make(self, *, closing: bool = False) -> ReadyStep | None:
        """Return the next step; None if no rank has one, or this one is closing.

        Raises:
            StepError: on every rank, if one of them cannot continue; it names the step, and the rank if known.
        """
        started = time.perf_counter()
        drawn = _Drawn(_Action.CLOSING) if closing else self._draw()
        fetched = time.perf_counter()
        try:
            agreed = self._agree(drawn)
            return None if agreed is None else self._share(drawn, *agreed, started, fetched)
        except LostRanksError as error:
            raise self.group.explain_loss(self.step, error) from error
        except StepError:
            raise
        except Exception as error:
            # The others are in the middle of this step: only closed connections wake them.
            reason = f"failed in step {self.step}: {_name(error)}"
            self.group.give_up(reason)
            raise StepError(f"rank {self.group.rank} {reason}", self.step, self.group.rank) from error

    def _draw(self) -> _Drawn:
        try:
            if self._samples is None:
                self._samples = iter(self._loader)
            if self._exhausted:
                return _Drawn(_Action.EXHAUSTED)
            try:
                samples = next(self._samples)
            except StopIteration:
                self._exhausted = True
                self._take_state()
                return _Drawn(_Action.EXHAUSTED)
            self._take_state()
            return self._described(samples)
        except Exception as error:  # noqa: BLE001 - every rank raises it
            return _Drawn(_Action.FAILED, error=error)

    def _described(self, samples: Any) -> _Drawn:
        if not isinstance(samples, list | tuple):
            raise TypeError(
                f"the loader must yield lists of samples, got a {type(samples).__name__}: collate after post_balance"
            )
        drawn = _Drawn(_Action.DRAWING, samples=list(samples), table=np.zeros((len(samples), 3), np.int64))
        if self._movable:
            drawn.messages = [describe(sample) for sample in samples]
            drawn.table[:, 2] = [message.num_bytes for message in drawn.messages]
        for row, sample in zip(drawn.table, samples, strict=True):
            row[0] = max(1, _total(self._cost(sample)))
            row[1] = 1 if self._loss_tokens is None else _count(self._loss_tokens(sample), "loss_tokens")
        return drawn

    def _take_state(self) -> None:
        if hasattr(self._loader, "state_dict"):
            self.state = copy.deepcopy(self._loader.state_dict())

    def _agree(self, drawn: _Drawn) -> tuple[Ints, Ints] | None:
        """Send the others the action and rows of this rank. Return the number of samples of each rank, and all rows;
        None at the end.
        """
        own = np.zeros(5 + 3 * _FIRST_ROWS, np.int64)
        own[:5] = drawn.action, self._iteration, self.step, len(drawn.samples), self._last_hash
        first = drawn.table[:_FIRST_ROWS].ravel()
        own[5 : 5 + len(first)] = first
        gathered = self.group.gather(own)
        # A rank that cannot continue ends the step on all ranks.
        actions = gathered[:, 0]
        if (actions == _Action.FAILED).any():
            raise self._failure(actions, drawn.error) from drawn.error
        if (actions != _Action.DRAWING).all() or drawn.action == _Action.CLOSING:
            return None
        for closing in np.flatnonzero(actions == _Action.CLOSING):
            raise StepError(
                f"rank {closing} stopped iterating before step {self.step}, which needs every rank: leave the loop"
                " after the same step on all of them",
                self.step,
                int(closing),
            )
        for column, what in ((1, "iteration"), (2, "step"), (4, "the hash of the last plan")):
            differing = np.flatnonzero(gathered[:, column] != gathered[0, column])
            if len(differing):
                rank = int(differing[0])
                raise StepError(
                    f"at step {self.step} rank {rank} differs from rank 0 in {what}: {gathered[rank, column]} and"
                    f" {gathered[0, column]}",
                    self.step,
                    rank,
                )
        # All rows, in a second gather if some rank has many.
        counts = gathered[:, 3]
        if counts.max() > _FIRST_ROWS:
            return counts, self.group.gather_rows(drawn.table, counts)
        return counts, unpadded(gathered[:, 5:].reshape(self.group.size, _FIRST_ROWS, 3), counts)

    def _failure(self, actions: Ints, error: Exception | None) -> StepError:
        texts = self.group.gather_texts("" if error is None else _name(error))
        rank = self.group.rank if error is not None else int(np.argmax(actions == _Action.FAILED))
        return StepError(f"rank {rank} failed at step {self.step}: {texts[rank]}", self.step, rank)

    def _share(self, drawn: _Drawn, counts: Ints, table: Ints, started: float, fetched: float) -> ReadyStep:
        owner = np.repeat(np.arange(self.group.size, dtype=np.int32), counts)
        plan = make_post_plan(table[:, 0], table[:, 2], owner, self.group.size, self._rule)
        planned = time.perf_counter()
        loss_tokens = int(table[:, 1].sum())
        samples = self._moved(drawn, plan)
        batch = PostBatch(samples, self.group.size / max(1, loss_tokens), self.step, loss_tokens, plan)
        self.step += 1
        self._last_hash = int(plan.hash, 16) >> 1
        moved = time.perf_counter()
        seconds = {"fetching": fetched - started, "planning": planned - fetched, "moving": moved - planned}
        return ReadyStep(batch, self._exhausted, self.state, seconds)

    def _moved(self, drawn: _Drawn, plan: PostPlan) -> list[Any]:
        """Exchange samples, and return those of this rank after the move."""
        own = self.group.rank
        if plan.rank is plan.owner or not (plan.rank != plan.owner).any():
            return drawn.samples
        first = int(np.searchsorted(plan.owner, own))
        leaving, arriving = plan.leaving(own), plan.arriving(own)
        to_each, from_each = np.zeros((2, plan.num_ranks), np.int64)
        np.add.at(to_each, plan.rank[leaving], plan.sizes[leaving])
        np.add.at(from_each, plan.owner[arriving], plan.sizes[arriving])
        outgoing: Bytes = np.empty(int(to_each.sum()), np.uint8)
        for index, (start, stop) in zip(leaving, _spans(plan.sizes[leaving]), strict=True):
            drawn.messages[index - first].write_to(outgoing[start:stop])
        incoming = self.group.exchange(outgoing, to_each.tolist(), from_each.tolist())
        arrived = {
            int(index): read(incoming[start:stop])
            for index, (start, stop) in zip(arriving, _spans(plan.sizes[arriving]), strict=True)
        }
        return [
            arrived[index] if index in arrived else drawn.samples[index - first] for index in plan.places(own).tolist()
        ]


def _spans(sizes: Ints) -> Iterator[tuple[int, int]]:
    return pairwise([0, *np.cumsum(sizes).tolist()])


def _total(cost: Any) -> int:
    """Return a sample's cost, summed over phases."""
    if isinstance(cost, Mapping):
        return sum(_count(value, f"cost of phase {phase!r}") for phase, value in cost.items())
    return _count(cost, "cost")


def _count(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must return an integer, got {value!r}: scale and round it") from None
    if not 0 <= number <= 1 << 62:
        raise ValueError(f"{name} must return an integer from 0 to 2**62, got {number}")
    return number


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
