"""The loop: a position between two steps, where the next iteration starts, and what `iter(loader)` returns.

    stream (builds steps ahead) --next--> a step's microbatches, and the position after it --> the caller

Every delivered step carries the position after it, so that a state is the position of the step delivered last. The
iterator is no generator: one that has raised is finished, and the next `next()` would look like the end of the epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import ref

from orchdata.batch.batch import Batch
from orchdata.batch.rounds import check_rounds
from orchdata.finalizers import User
from orchdata.loaders.errors import StateError
from orchdata.order.steps import Draw, StateGetter
from orchdata.planning.plan import Plan


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps: the steps of `epoch` below `step` were delivered, except those `left`."""

    epoch: int = 0
    step: int = 0
    draw: Draw | None = None  # random inputs of the epoch's samples (`Steps.draw`), once they are drawn
    base_seed: int | None = None  # of the workers' random states, if ranks do not share this loader
    is_drawn: bool = False  # whether both are drawn
    left: tuple[int, ...] = ()  # steps that others have overtaken, where steps come as they are ready
    sampler: Any = None  # the sampler's own state after step `step - 1`; at an epoch's start, after the epoch before
    # For each worker, what returns its data set's state after its last delivered step; None before its first one.
    workers: tuple[StateGetter | None, ...] = ()
    worker: int = -1  # which worker built the step delivered last

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: the data sets' states, in place of functions that get them from running workers."""
        workers = tuple(None if get is None else stored(deepcopy(get())) for get in self.workers)
        return {**vars(self), "workers": workers}

    def drawn(self, draw: Draw | None, base_seed: int | None) -> Position:
        """Return this position with the epoch's random inputs; `base_seed` is None if ranks share the loader."""
        return replace(self, draw=draw, base_seed=base_seed, is_drawn=base_seed is not None)

    def after(
        self,
        step: int,
        undelivered: Iterable[int] = (),
        *,
        sampler: Any = None,
        state: StateGetter | None = None,
        worker: int = 0,
        num_workers: int = 1,
    ) -> Position:
        """Return the position after a step was delivered, while some are being built; `sampler` is the sampler's own
        state after it, and `state` returns that of the data set in the worker that built it.
        """
        workers = self.workers
        if state is not None:
            before = workers or (None,) * num_workers
            workers = tuple(state if number == worker else before[number] for number in range(num_workers))
        left = [each for each in (*self.left, *undelivered) if each != step]
        return replace(self.reaching(step + 1, left), sampler=sampler, workers=workers, worker=worker)

    def reaching(self, step: int, undelivered: Iterable[int]) -> Position:
        """Return the position after all steps below `step` (or below this one's), except those that are undelivered."""
        step = max(self.step, step)
        return replace(self, step=step, left=tuple(sorted({each for each in undelivered if each < step})))

    def next_epoch(self, *, keep_dataset_state: bool) -> Position:
        """Return the start of the next epoch, from the end of this one; data sets may keep their states."""
        return Position(self.epoch + 1, sampler=self.sampler, workers=self.workers if keep_dataset_state else ())


def stored(state: dict[str, Any]) -> StateGetter:
    """Return a function that returns a copy of the state: a data set may change the state that it gets."""
    return partial(deepcopy, state)


@dataclass(eq=False)
class Start:
    """Where the next iteration starts. Compared by identity, because the first to move the start wins."""

    position: Position
    restores: bool = False  # whether data sets and samplers get the states that the position has
    is_loaded: bool = False  # whether the user, or a trainer, loaded a state and no step was delivered since
    by_trainer: bool = False  # whether a trainer loaded it
    ended: Position | None = None  # the end of the epoch before, if a state of it was loaded and this is the next start
    by_trainers_epoch: bool = False  # a trainer has set it: iterations that exist and have not started move there too
    interrupted: Any = None  # state of an iteration that ended with an error, for the first one that continues it

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: the state of an interrupted iteration stays with the original."""
        return {**vars(self), "interrupted": None}


class Progress:
    """A loader's position, and where its next iteration starts.

    Several iterations may exist: each keeps its own position, and the loader's is that of the step delivered last. The
    next iteration starts

        where `load_state_dict` or `set_epoch` put it, else
        at the next epoch, once a step of this one was delivered, else
        where the last one started;
        after an error, at the step that was not delivered.
    """

    def __init__(self) -> None:
        self.start = Start(Position())
        self.delivered: Position | Stream = self.start.position  # after the step delivered last; or the stream knows it
        self.plan: ref[Plan] | None = None  # of that step, if it has one, while that lives, and no other start was put
        # A start, and its position with the random inputs that a state of it has promised.
        self.drawn: tuple[Start, Position] | None = None
        self._seeded: tuple[Start, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: a position, in place of the running stream that knows it."""
        return {**vars(self), "delivered": self.position, "plan": None}

    def check_rounds(self, when: str) -> None:
        """Raise RuntimeError if a round of the step delivered last was not run backward."""
        check_rounds(None if self.plan is None else self.plan(), when)

    @property
    def position(self) -> Position:
        """After the step delivered last."""
        return self.delivered if isinstance(self.delivered, Position) else self.delivered.position

    def put(self, start: Start) -> None:
        """Start the next iteration there; it is also the loader's position now."""
        self.start, self.delivered, self.plan = start, start.position, None

    def lead(self, own: Start, new: Start) -> Start:
        """Move the start for an iteration, with its start or last move `own`, unless something else has moved it.

        Returns what the iteration passes as `own` next time.
        """
        if self.start is not own:
            return own
        self.start = new
        return new

    def load(self, position: Position, *, by_trainer: bool = False) -> None:
        """Continue from a state."""
        self.put(Start(position, restores=True, is_loaded=True, by_trainer=by_trainer))

    def pass_end(self, *, keep_dataset_state: bool) -> None:
        """Start the next epoch: the position of a loaded state is the end of one."""
        start = self.start
        following = start.position.next_epoch(keep_dataset_state=keep_dataset_state)
        self.put(replace(start, position=following, ended=start.position))

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` next: at its start, or at a loaded state of this epoch, if no step was delivered since."""
        start = self.start
        if start.ended is not None and start.ended.epoch == epoch:
            self.put(replace(start, position=start.ended, ended=None))  # no step of that epoch is left
        elif not start.is_loaded or start.position.epoch != epoch:
            self.put(Start(Position(epoch)))

    def seed(self, base_seed: int) -> None:
        """Store the workers' seed of the iteration that starts here, for a state before its first step."""
        self._seeded = self.start, base_seed

    def known(self, start: Start) -> Position:
        """Return where an iteration starts, with the random inputs that a state of it has promised."""
        return self.drawn[1] if self.drawn is not None and self.drawn[0] is start else start.position

    def promised(self, draw_seed: Callable[[], int], draw: Callable[[], Draw | None]) -> Position:
        """Return the position for a state. Between epochs, the next one's random inputs, of workers and of samples, are
        drawn now, and kept.
        """
        position, start = self.position, self.start
        at_start = (position.epoch, 0) == (start.position.epoch, start.position.step)
        if position.is_drawn or position.step or not at_start:
            return position
        if self.drawn is None or self.drawn[0] is not start:
            seeded = self._seeded
            base_seed = seeded[1] if seeded is not None and seeded[0] is start else draw_seed()
            self.drawn = start, start.position.drawn(draw(), base_seed)
        drawn = self.drawn[1]
        return position.drawn(drawn.draw, drawn.base_seed)

    def draw_of(self, epoch: int) -> Draw | None:
        """Return the draw of an epoch, if the loader knows it."""
        positions = (self.position, self.known(self.start))
        return next((each.draw for each in positions if each.epoch == epoch and each.draw is not None), None)


class TrainerEpochs:
    """What Lightning takes for the sampler of a loader that orders its samples itself: it sets each epoch on it.

    Lightning does not load the loader's state from a checkpoint of the end of an epoch: the loader would start with
    epoch 0 again. After `limit_train_batches` it would continue inside an epoch that is over for Lightning.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._ahead = 0

    def set_epoch(self, epoch: int) -> None:
        """Move to the trainer's epoch if the loader is before it, even if an iterator exists that has not started.

        A loader may be ahead of the trainer: a state was loaded as a training began, or the loader is one of several
        and restarts inside the trainer's epochs. It stays ahead by as many epochs. Raises StateError if a state was
        loaded, not by the trainer, and the trainer resumes at a later epoch.
        """
        start = self._progress.start
        if start.is_loaded:
            if start.ended is not None and epoch == start.ended.epoch:
                return
            self._ahead = max(0, start.position.epoch - epoch)
            if self._ahead and epoch and not start.by_trainer:
                raise StateError(
                    f"a state of epoch {start.position.epoch} was loaded, and the trainer continues at epoch {epoch} "
                    "without the loader's state in its own checkpoint, so that the loader's epoch is not known: load a "
                    "state only where a training begins"
                )
        if epoch + self._ahead > start.position.epoch:
            self._progress.set_epoch(epoch + self._ahead)
            self._progress.start.by_trainers_epoch = True


_process = os.getpid()  # kept up to date, because to ask for it at each step takes longer


def _know_process() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_know_process)


class Stream(Protocol):
    """The steps of one epoch, from where its iteration starts; iterating yields the microbatches of each, a list."""

    computes_position: bool  # when it is asked for: for each step it would cost too much

    @property
    def position(self) -> Position: ...  # after the step yielded last

    @property
    def next_step(self) -> int: ...  # the number of the step that comes next, if none is under way

    @property
    def undelivered(self) -> list[int]:
        """Steps that were drawn and not yielded, in their order."""

    def __next__(self) -> list[Any]:
        """Raises StopIteration at the end of the epoch, and what building a step raises."""

    def leave(self) -> Any:
        """After an error: return what the next iteration needs to try the failed (first undelivered) step again."""

    def skip_failed(self, error: BaseException) -> bool:
        """Return whether this stream continues after an error; if so, skip the failed step.

        A step that is still under way after Ctrl-C is not skipped. For other errors `leave` was called before.
        """

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        """Stop the engine, or keep it for the next iteration. A finalizer does not wait for its end."""


@dataclass(eq=False)
class EpochLoop:
    """One iteration of a loader: where it starts, and how it moves the loader's progress."""

    progress: Progress
    open_stream: Callable[[EpochLoop], Stream]  # returns its steps; called when the first one is requested
    keep_dataset_state: bool  # whether data sets start the next epoch with the state that they have at the end of one
    stores_seed: bool  # whether a state stores the base seed of the workers: ranks do not share the loader
    on_first_step: Callable[[], None] | None  # called once a step was yielded
    base_seed: int = 0
    _has_ended: bool = False

    def __post_init__(self) -> None:
        self.start = self._own = self.progress.start

    @property
    def origin(self) -> Position:
        """Where the iteration starts, with its random inputs if they are known."""
        return self.progress.known(self.start)

    @property
    def is_under_way(self) -> bool:
        """Whether it has not ended, and the next one starts after it: no state was loaded, and no epoch set."""
        return not self._has_ended and self.progress.start is self._own

    @property
    def dataset_states(self) -> list[dict[str, Any] | None]:
        """For each worker, the state that its data set starts with; None for its own. Empty if nothing is restored."""
        workers = self.origin.workers if self.start.restores else ()
        return [None if get is None else get() for get in workers]

    def begin(self) -> Stream:
        """Open the stream for the first step. A trainer may have moved the start since this iteration was created."""
        if self.progress.start.by_trainers_epoch or self.progress.start.by_trainer:
            self.start = self._own = self.progress.start
        return self.open_stream(self)

    def know(self, draw: Draw | None) -> Position:
        """The epoch's random inputs are known. Returns where the iteration starts: the loader's position now."""
        position = self.start.position.drawn(draw, self.base_seed if self.stores_seed else None)
        self.progress.delivered = position
        return position

    def advance(self) -> None:
        """A step was yielded for the first time: the next iteration starts the next epoch."""
        self._own = self.progress.lead(self._own, Start(Position(self.start.position.epoch + 1)))
        if self.on_first_step is not None:
            self.on_first_step()

    def fail(self, stream: Stream) -> None:
        """A step could not be built: the next iteration tries it again."""
        position, undelivered, left = stream.position, stream.undelivered, stream.leave()
        step = undelivered[0] if undelivered else stream.next_step
        start = self.start.position
        # A state may list steps below the one that it starts with: once one came, the start has moved.
        if step == start.step and position.draw == start.draw and self._own is self.start:
            if self.progress.start is self._own:
                self._own.interrupted = left
        else:
            position = position.reaching(step, (*position.left, *undelivered))
            self._own = self.progress.lead(self._own, Start(position, restores=True, interrupted=left))

    def end(self, position: Position) -> None:
        """All steps of the epoch were delivered; its last position."""
        self._has_ended = True
        following = position.next_epoch(keep_dataset_state=self.keep_dataset_state)
        self._own = self.progress.lead(self._own, Start(following))
        self.progress.delivered = self.progress.start.position


@dataclass(eq=False, repr=False)
class LoaderIterator:
    """What `iter(loader)` returns: the microbatches of an epoch one by one, or its steps, each the list of them.

    Attributes:
        as_torch: whether the iteration is over after an error that it cannot continue after.
        watcher: called at each item, and at the end of the epoch; see `trainers.AccelerateEnd`.
        check: called with what happens before each item and the end; may raise.
    """

    loop: EpochLoop
    whole_steps: bool
    as_torch: bool
    watcher: Any = None
    check: Callable[[str], None] | None = None
    _stream: Stream | None = None
    _user: User | None = None
    _rest: list[Any] = field(default_factory=list)  # of the step yielded last, the last microbatch first
    _is_closed: bool = False
    _has_advanced: bool = False
    _error: BaseException | None = None
    _process: ClassVar[int] = -1  # if an interrupt stopped __init__

    def __post_init__(self) -> None:
        vars(self)["_process"] = _process

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if _process != self._process:
            raise RuntimeError("this iteration belongs to the process that forked this one: begin a fresh iter() here")
        if self.check is not None:
            self.check("the next batch was asked for")
        stream = self._stream or self._begin()

        # No microbatch is left: get the next step.
        if not self._rest:
            if self._has_advanced:
                self.loop.progress.check_rounds("the next step was taken")
            try:
                batches = next(stream)
            except StopIteration:
                self._end(stream)
                raise
            except BaseException as error:
                self._handle(stream, error)
                del self, stream  # or the error's traceback would keep the iteration, and its workers, alive
                raise
            if not self._has_advanced:
                self._has_advanced = True
                self.loop.advance()
            self.loop.progress.plan = ref(batches[0].plan) if isinstance(batches[0], Batch) else None
            # The usual step has one microbatch.
            if len(batches) == 1 and not self.whole_steps and self.watcher is None:
                self._deliver(stream)
                return batches.pop()  # not kept here: the caller decides how long it lives
            batches.reverse()
            self._rest = batches
        if self.watcher is not None:
            try:
                self.watcher.item(stream.position)
            except BaseException as error:
                self._finish(error)
                raise

        # The microbatches of a step come one by one. With the last one the step counts as delivered.
        if self.whole_steps:
            step, self._rest = self._rest, []
            step.reverse()
            self._deliver(stream)
            return step
        if len(self._rest) == 1:
            self._deliver(stream)
        return self._rest.pop()

    def _deliver(self, stream: Stream) -> None:
        """All microbatches of the step yielded last are taken."""
        self.loop.progress.delivered = stream if stream.computes_position else stream.position

    def _begin(self) -> Stream:
        """Return the stream, opened when the first step is requested."""
        if self._error is not None and not (self.as_torch and isinstance(self._error, Exception)):
            goes_on = "; a fresh iter() of the loader continues at the step that failed"
            is_failure = isinstance(self._error, Exception)  # and not Ctrl-C, after which an epoch may be over
            raise RuntimeError(f"this iteration ended with {self._error!r}{goes_on * is_failure}") from self._error
        if self._is_closed:
            raise StopIteration
        self._user = User()
        try:
            if self.watcher is not None:
                self.watcher.begin()
            self._stream = self.loop.begin()
        except BaseException as error:
            self._finish(error)
            raise
        return self._stream

    def _end(self, stream: Stream) -> None:
        """The epoch is over."""
        self._stream, self._is_closed = None, True
        try:
            stream.close(is_over=True)
            self.loop.end(stream.position)
            if self.watcher is not None:
                self.watcher.end()
        except BaseException as error:
            self._error = error
            raise

    def _handle(self, stream: Stream, error: BaseException) -> None:
        """After an item's error, or Ctrl-C, continue if the stream can, as torch's does; else end the iteration."""
        # The next iteration starts at the failed step.
        if isinstance(error, Exception | SystemExit):
            self._has_advanced = False
            self.loop.fail(stream)
        # This iteration goes on, or ends.
        if not stream.skip_failed(error):
            self._finish(error)
        elif self.watcher is not None:
            self.watcher.failed()

    def _finish(self, error: BaseException | None = None, *, waits: bool = True) -> None:
        """Stop the stream of this iteration, which has ended with an error, or which the caller leaves."""
        self._error = error
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(has_failed=error is not None, waits=waits)
        if self.watcher is not None:
            self.watcher.close()

    def close(self, *, waits: bool = True) -> None:
        """End the iteration here, as `break` does."""
        if not self._is_closed:
            self._finish(waits=waits)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing, process: Callable[[], int] = os.getpid) -> None:
        if not ends() and process() == self._process:
            self.close(waits=self._user is None or self._user.drops_it())


def place_of(stream: Stream, num_steps: int | None) -> Callable[[], tuple[int, float]]:
    """Return what says where an iteration stands, without keeping it alive: the epoch, and the share of its steps that
    was begun, as far as their number is known.
    """
    reference, last = ref(stream), (stream.position.epoch, 0.0)

    def where() -> tuple[int, float]:
        nonlocal last
        if (running := reference()) is not None:
            last = running.position.epoch, running.next_step / num_steps if num_steps else 0.0
        return last

    return where
