"""The loop: what `iter(loader)` returns.

    stream (builds steps ahead) --next--> a step's microbatches, and the position after it --> the caller

It is not a generator: one that has raised is finished, and the next `next()` would look like the end of the epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

from orchdata.batch.batch import Batch
from orchdata.finalizers import User
from orchdata.loop.position import Position, Progress, Start
from orchdata.order.steps import Draw

_process = os.getpid()  # kept up to date, because to ask for it at each step takes longer


def _know_process() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_know_process)


class Stream(Protocol):
    """The steps of one epoch, from where its iteration starts; iterating yields the microbatches of each, a list.

    Attributes:
        position: after the step yielded last.
        next_step: number of the step that comes next, if none is under way.
        computes_position: whether the position is computed when it is asked for: for each step it would cost too much.
    """

    computes_position: bool

    @property
    def position(self) -> Position: ...

    @property
    def next_step(self) -> int: ...

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

    @property
    def sampler_state(self) -> Any:
        """The state that the sampler starts with; None for its own."""
        return self.origin.sampler if self.start.restores else None

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


class LoaderIterator:
    """What `iter(loader)` returns: the microbatches of an epoch one by one, or its steps, each the list of them.

    Args:
        as_torch: whether the iteration is over after an error that it cannot continue after, as with torch's loader.
        watcher: is called at each item, and at the end of the epoch; see `trainers.AccelerateEnd`.
        check: called before each item, and before the end of the epoch, with what happens; it may raise.
    """

    _process = -1  # if an interrupt stopped __init__

    def __init__(
        self,
        loop: EpochLoop,
        *,
        whole_steps: bool,
        as_torch: bool,
        watcher: Any = None,
        check: Callable[[str], None] | None = None,
    ) -> None:
        self.loop = loop
        self._whole_steps = whole_steps
        self._as_torch = as_torch
        self._watcher = watcher
        self._check = check
        self._is_plain = not whole_steps and watcher is None
        self._process = _process
        self._stream: Stream | None = None
        self._user: User | None = None
        self._rest: list[Any] = []  # of the step yielded last, the last microbatch first
        self._is_closed = False
        self._has_advanced = False
        self._error: BaseException | None = None

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if _process != self._process:
            raise RuntimeError("this iteration belongs to the process that forked this one: begin a fresh iter() here")
        if self._check is not None:
            self._check("the next batch was asked for")
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
            if self._is_plain and len(batches) == 1:
                self._deliver(stream)
                return batches.pop()  # not kept here: the caller decides how long it lives
            batches.reverse()
            self._rest = batches
        if self._watcher is not None:
            try:
                self._watcher.item(stream.position)
            except BaseException as error:
                self._finish(error)
                raise

        # The microbatches of a step come one by one. With the last one the step counts as delivered.
        if self._whole_steps:
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
        if self._error is not None and not (self._as_torch and isinstance(self._error, Exception)):
            goes_on = "; a fresh iter() of the loader continues at the step that failed"
            is_failure = isinstance(self._error, Exception)  # and not Ctrl-C, after which an epoch may be over
            raise RuntimeError(f"this iteration ended with {self._error!r}{goes_on * is_failure}") from self._error
        if self._is_closed:
            raise StopIteration
        self._user = User()
        try:
            if self._watcher is not None:
                self._watcher.begin()
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
            if self._watcher is not None:
                self._watcher.end()
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
        elif self._watcher is not None:
            self._watcher.failed()

    def _finish(self, error: BaseException | None = None, *, waits: bool = True) -> None:
        """Stop the stream of this iteration, which has ended with an error, or which the caller leaves."""
        self._error = error
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(has_failed=error is not None, waits=waits)
        if self._watcher is not None:
            self._watcher.close()

    def close(self, *, waits: bool = True) -> None:
        """End the iteration here, as `break` does."""
        if not self._is_closed:
            self._finish(waits=waits)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing, process: Callable[[], int] = os.getpid) -> None:
        if not ends() and process() == self._process:
            self.close(waits=self._user is None or self._user.drops_it())
