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
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from orchdata.delivery.state import Held, Position
from orchdata.loaders.errors import StateError
from orchdata.loaders.interrupts import interrupts_later

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is to know of a step that is handed out, for a state behind it: see `Position`.

    Attributes:
        undone: steps that were drawn and not handed out.
        worker, num_workers: who built it, among how many.
        held: asks for what that worker's data set held behind it.
    """

    undone: list[int]
    sampler: Any
    held: Held | None
    worker: int
    num_workers: int


class Cursor(Generic[T]):
    """A loader's place.

    Attributes:
        delivered: behind the last delivered step: what a state holds.
        begin: where the next iteration begins.
        failed: where the iteration begins that goes on with one that had an error, and what the latter left for it.
        resumed: where an iteration begins whose data set and sampler are given back what they held there.
    """

    def __init__(self) -> None:
        self.delivered = self.begin = Position()
        self.failed: tuple[Position, T] | None = None
        self.resumed: Position | None = None
        self._restored: Position | None = None
        self._passed: Position | None = None
        self._seeded: tuple[Position, int] | None = None
        self._drawn: tuple[Position, Position] | None = None
        self._told: Position | None = None
        self._ahead = 0
        self._by_trainer = False

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: what an iteration under way has left for the next one stays with the original."""
        return {**vars(self), "failed": None}

    def restore(self, position: Position, *, by_trainer: bool = False) -> None:
        """Begin next where a state was taken; whether a trainer loaded it."""
        self._by_trainer = by_trainer
        self.delivered = self.begin = self._restored = self.resumed = position
        self._passed = None

    def pass_end(self, *, held: bool) -> None:
        """Begin the next epoch, where the restored place is the end of one; see `Position.following`."""
        end = self.begin
        self.restore(end.following(held=held), by_trainer=self._by_trainer)
        self._passed = end

    def seed(self, base_seed: int) -> None:
        """What the workers of the next iteration are seeded with, as far as is known."""
        self._seeded = self.begin, base_seed

    def draw(self, seed: Callable[[], int], tell: Callable[[], Mapping[str, Any] | None]) -> Position:
        """The place of a state: between epochs, what the next one depends on is drawn for it, and then holds.

        Args:
            seed: draws that of its workers.
            tell: draws what its samples depend on.
        """
        position, begin = self.delivered, self.begin
        if position.is_drawn or position.step or (position.epoch, 0) != (begin.epoch, begin.step):
            return position
        if self._drawn is None or self._drawn[0] is not begin:
            seeded = self._seeded
            base_seed = seeded[1] if seeded is not None and seeded[0] is begin else seed()
            self._drawn = begin, replace(begin, told=tell(), base_seed=base_seed, is_drawn=True)
        found = self._drawn[1]
        return replace(position, told=found.told, base_seed=found.base_seed, is_drawn=True)

    def known(self, position: Position) -> Position:
        """A place where an iteration begins, with what a state of it has promised."""
        return self._drawn[1] if self._drawn is not None and self._drawn[0] is position else position

    def told_of(self, epoch: int) -> Mapping[str, Any] | None:
        """What is known here of what an epoch's samples depend on."""
        places = (self.delivered, self.known(self.begin))
        return next((place.told for place in places if place.epoch == epoch and place.told is not None), None)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` next; at its start, unless a state of it was restored and no step delivered since."""
        passed = self._passed
        if passed is not None and self.begin is self._restored and passed.epoch == epoch:
            self.restore(passed, by_trainer=self._by_trainer)  # nothing is left of it, and nothing of it comes again
        elif self.begin is not self._restored or self.begin.epoch != epoch:
            self.delivered = self.begin = Position(epoch)

    def tell_epoch(self, epoch: int) -> None:
        """A trainer begins this epoch: begin it too, if the loader would begin an earlier one, and be it that an
        iteration which has not begun was to begin there.

        A loader may be ahead: of a state that was loaded as a training begins, or as one of several that begins anew
        inside of the trainer's epochs. It stays ahead by so many. Raises StateError for a state that was loaded, not by
        the trainer, as it resumes at a later epoch.
        """
        begin, passed = self.begin, self._passed
        if begin is self._restored:
            if passed is not None and epoch == passed.epoch:
                return
            self._ahead = max(0, begin.epoch - epoch)
            if self._ahead and epoch and not self._by_trainer:
                raise StateError(
                    f"a state of epoch {begin.epoch} was loaded, and the trainer goes on at epoch {epoch} without the "
                    "loader's state in its own checkpoint, so that nobody knows the loader's epoch: load a state only "
                    "where a training begins"
                )
        if epoch + self._ahead > begin.epoch:
            self.set_epoch(epoch + self._ahead)
            self._told = self.begin

    def replaced(self, begin: Position) -> Position:
        """Where an iteration begins that was to begin here."""
        return self.begin if self.begin is self._told else begin


class EpochOfTrainer:
    """What Lightning takes for the sampler of a loader with an order of its own, and tells its epoch before each.

    Of a checkpoint that was written at the end of an epoch Lightning does not load the loader's state: the loader would
    begin with epoch 0 again. Behind `limit_train_batches` it would go on inside of an epoch that is over for Lightning.
    """

    def __init__(self, cursor: Cursor[Any]) -> None:
        self.set_epoch = cursor.tell_epoch


class Iteration(Generic[T]):
    """One way through an epoch, from where the cursor stands now.

    It moves the cursor's next beginning only while nothing else has: another iteration, a state, an epoch set.

    Args:
        is_alone: whether its workers' seed is kept in states: with other ranks, each has one of its own.

    Attributes:
        base_seed: of the random states of workers, as torch draws it.
    """

    def __init__(self, cursor: Cursor[T], *, is_alone: bool) -> None:
        self.base_seed = 0
        self._is_alone = is_alone
        self._cursor = cursor
        self._has_begun = False
        self._has_ended = False
        self._begin_at(cursor.begin)

    def _begin_at(self, position: Position) -> None:
        self.begin = self._left = self._behind = position
        self.epoch = position.epoch
        self.is_resumed = position is self._cursor.resumed

    def go(self) -> None:
        """Its first step is asked for: a trainer may have told its epoch since."""
        place = self._cursor.replaced(self.begin)
        if place is not self.begin:
            self._begin_at(place)

    @property
    def origin(self) -> Position:
        """Where it begins, with what is known of it by now."""
        return self._cursor.known(self.begin)

    @property
    def is_under_way(self) -> bool:
        """Whether it has not ended, and the next one begins where it leads: no state was loaded, and no epoch set."""
        return not self._has_ended and self._cursor.begin is self._left

    def start(self, told: Mapping[str, Any] | None) -> None:
        """What its samples depend on is known."""
        base_seed = self.base_seed if self._is_alone else None
        self._behind = replace(self.begin, told=told, base_seed=base_seed, is_drawn=self._is_alone)
        self._cursor.delivered = self._behind

    def left(self) -> T | None:
        """What the iteration left that this one goes on with, once."""
        failed = self._cursor.failed
        if failed is None or failed[0] is not self.begin:
            return None
        self._cursor.failed = None
        return failed[1]

    def hand_out(self, step: int, found: Found) -> None:
        """A step is about to be handed out: the epoch has begun."""
        behind, held = self._behind, self._behind.held
        if found.held is not None:
            held = tuple(
                found.held if number == found.worker else behind.held[number] if behind.held else None
                for number in range(found.num_workers)
            )
        self._behind = replace(
            _reached(behind, step + 1, (each for each in (*behind.left, *found.undone) if each != step)),
            sampler=found.sampler,
            held=held,
            worker=found.worker,
        )
        if not self._has_begun:
            self._has_begun = True
            self._lead_to(Position(self.epoch + 1))

    def num_left(self, num_steps: int) -> int:
        """Steps of an epoch of `num_steps` that come after the step handed out last."""
        return max(0, num_steps - self._behind.step) + len(self._behind.left)

    def deliver(self) -> None:
        """The step handed out last was taken whole."""
        self._cursor.delivered = self._behind

    def fail(self, step: int, undone: list[int], left: T) -> None:
        """The step could not be made: the next iteration tries it again, and finds what is `left` for it."""
        self._has_begun = False
        if step != self.begin.step or self._behind.told != self.begin.told:
            self._lead_to(_reached(self._behind, step, (*self._behind.left, *undone)))
            self._cursor.resumed = self._left
        if self._cursor.begin is self._left:
            self._cursor.failed = self._left, left

    def end(self, *, held: bool) -> None:
        """The epoch was delivered whole; whether data sets go on with what they hold is the loader's affair."""
        self._has_ended = True
        self._lead_to(self._behind.following(held=held))
        self._cursor.delivered = self._cursor.begin

    def _lead_to(self, position: Position) -> None:
        if self._cursor.begin is self._left:
            self._cursor.begin = self._left = position


def _reached(position: Position, step: int, undone: Iterable[int]) -> Position:
    """The place behind all steps below `step`, at least, but for those undone."""
    step = max(position.step, step)
    return replace(position, step=step, left=tuple(sorted({each for each in undone if each < step})))


@dataclass(frozen=True)
class Failed:
    """Yielded in place of a step that could not be made, where the iteration goes on behind it."""

    error: BaseException


class Steps:
    """An iterator over what a generator yields, which after an error never looks as if the epoch had ended.

    A generator is over once it raised: whoever caught the error and asks for more would get StopIteration. One that
    yields `Failed` goes on.

    Args:
        made: the generator.
        as_torch: whether an error ends the iteration for good, as one of a sampler does with torch's loader.
    """

    _process = -1  # of one that an interrupt has kept from beginning

    def __init__(self, made: Generator[Any, None, None], *, as_torch: bool = False) -> None:
        self._made = made
        self._as_torch = as_torch
        self._process = os.getpid()
        self._error: BaseException | None = None

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._process:
            raise RuntimeError("this iteration belongs to the process that forked this one: begin a fresh iter() here")
        if self._error is not None:
            if self._as_torch and isinstance(self._error, Exception):
                raise StopIteration
            raise RuntimeError(
                f"this iteration ended with {self._error!r}; a fresh iter() of the loader goes on at the step that "
                "failed"
            ) from self._error
        try:
            made = next(self._made)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error
            raise
        if isinstance(made, Failed):
            try:
                if isinstance(made.error, StopIteration):  # it would look as if the epoch had ended
                    raise RuntimeError("the data set, or collate_fn, raised StopIteration") from made.error
                raise made.error
            finally:
                del self  # or whoever keeps the error would keep the iteration, and what runs for it
        return made

    def close(self) -> None:
        """End the iteration here, as `break` does."""
        self._made.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing, process: Callable[[], int] = os.getpid) -> None:
        # Nobody would hear of a Ctrl-C that comes while `break` ends what runs: what a finalizer raises is lost.
        if not ends() and process() == self._process:
            with interrupts_later():
                self._made.close()
