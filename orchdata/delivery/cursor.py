"""Where a loader stands, and where its iterations begin.

A fresh iteration goes through one epoch. It begins

    where `load_state_dict` or `set_epoch` put it, else
    at the next epoch, once a step of this one was delivered, else
    where the last one began;
    after an error of the loader's own, at the step that was not delivered.

Several iterations may be under way: each keeps to its own epoch and place, and the state is that of the step delivered
last.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from orchdata.delivery.state import Position

T = TypeVar("T")


class Cursor(Generic[T]):
    """A loader's place.

    Attributes:
        delivered: behind the last delivered step: what a state holds.
        begin: where the next iteration begins.
        failed: where the iteration begins that goes on with one that had an error, and what the latter left for it.
    """

    def __init__(self) -> None:
        self.delivered = self.begin = Position()
        self.failed: tuple[Position, T] | None = None
        self._restored: Position | None = None

    def restore(self, position: Position) -> None:
        self.delivered = self.begin = self._restored = position

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` next; at its start, unless a state of it was restored and no step delivered since."""
        if self.begin is not self._restored or self.begin.epoch != epoch:
            self.delivered = self.begin = Position(epoch)


class Iteration(Generic[T]):
    """One way through an epoch, from where the cursor stands now.

    It moves the cursor's next beginning only while nothing else has: another iteration, a state, an epoch set.
    """

    def __init__(self, cursor: Cursor[T]) -> None:
        self.begin = cursor.begin
        self.epoch = cursor.begin.epoch
        self._cursor = cursor
        self._left = cursor.begin

    def start(self) -> None:
        self._cursor.delivered = self.begin

    def left(self) -> T | None:
        """What the iteration left that this one goes on with, once."""
        failed = self._cursor.failed
        if failed is None or failed[0] is not self.begin:
            return None
        self._cursor.failed = None
        return failed[1]

    def hand_out(self, step: int) -> None:
        """A step is about to be handed out: the epoch has begun."""
        if step == self.begin.step:
            self._lead_to(Position(self.epoch + 1))

    def deliver(self, step: int) -> None:
        """A step was handed out whole."""
        self._cursor.delivered = Position(self.epoch, step + 1)

    def fail(self, step: int, left: T) -> None:
        """The step could not be made: the next iteration tries it again, and finds what is `left` for it."""
        if step != self.begin.step:
            self._lead_to(Position(self.epoch, step))
        if self._cursor.begin is self._left:
            self._cursor.failed = self._left, left

    def end(self) -> None:
        """The epoch was delivered whole."""
        self._lead_to(Position(self.epoch + 1))
        self._cursor.delivered = self._cursor.begin

    def _lead_to(self, position: Position) -> None:
        if self._cursor.begin is self._left:
            self._cursor.begin = self._left = position


class Steps:
    """An iterator over what a generator yields, which after an error never looks as if the epoch had ended.

    A generator is over once it raised: whoever caught the error and asks for more would get StopIteration.
    """

    def __init__(self, made: Generator[Any, None, None]) -> None:
        self._made = made
        self._process = os.getpid()
        self._error: Exception | None = None

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._process:
            raise RuntimeError("this iteration belongs to the process that forked this one: begin a fresh iter() here")
        if self._error is not None:
            raise RuntimeError(
                f"this iteration ended with {self._error!r}; a fresh iter() of the loader goes on at the step that "
                "failed"
            ) from self._error
        try:
            return next(self._made)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise

    def close(self) -> None:
        """End the iteration here, as `break` does."""
        self._made.close()
