"""A loader's progress: a position between two steps, and where the next iteration starts.

Every delivered step carries the position after it, so that a state is the position of the step delivered last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from weakref import ref

from orchdata.batch.rounds import check_rounds
from orchdata.order.steps import Draw, StateGetter
from orchdata.planning.plan import Plan


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps: the steps of `epoch` below `step` were delivered, except those `left`.

    Attributes:
        draw: random inputs of the epoch's samples (`Steps.draw`), once they are drawn.
        base_seed: of the workers' random states, if ranks do not share this loader.
        is_drawn: whether `draw` and `base_seed` are drawn.
        left: steps that others have overtaken, where steps come as they are ready.
        sampler: the sampler's own state after step `step - 1`; at an epoch's start, after the epoch before.
        workers: for each worker, what returns its data set's state after its last delivered step; None if it has
            delivered nothing.
        worker: which worker built the step delivered last.
    """

    epoch: int = 0
    step: int = 0
    draw: Draw | None = None
    base_seed: int | None = None
    is_drawn: bool = False
    left: tuple[int, ...] = ()
    sampler: Any = None
    workers: tuple[StateGetter | None, ...] = ()
    worker: int = -1

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
        """Return the position after a step was delivered.

        Args:
            undelivered: steps that are being built.
            sampler: the sampler's own state after the step.
            state: returns the state of the data set in the worker that built the step.
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
    """Where the next iteration starts. Compared by identity, because the first to move the start wins.

    Attributes:
        restores: whether data sets and samplers get the states that the position has.
        is_loaded: whether the user, or a trainer, loaded a state and no step was delivered since.
        by_trainer: whether a trainer loaded it.
        ended: the end of the epoch before, if a state of it was loaded and this is the start of the next one.
        by_trainers_epoch: whether a trainer has set it: iterations that exist and have not started move there too.
        interrupted: state of an iteration that ended with an error, for the first one that continues it.
    """

    position: Position
    restores: bool = False
    is_loaded: bool = False
    by_trainer: bool = False
    ended: Position | None = None
    by_trainers_epoch: bool = False
    interrupted: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: the state of an interrupted iteration stays with the original."""
        return {**vars(self), "interrupted": None}

    def take_interrupted(self) -> Any:
        """Return the state of an interrupted iteration, once."""
        interrupted, self.interrupted = self.interrupted, None
        return interrupted


class Positioned(Protocol):
    """A step, or a stream of steps, that knows the position after it."""

    @property
    def position(self) -> Position: ...


class Progress:
    """A loader's position, and where its next iteration starts.

    Several iterations may exist: each keeps its own position, and the loader's is that of the step delivered last. The
    next iteration starts

        where `load_state_dict` or `set_epoch` put it, else
        at the next epoch, once a step of this one was delivered, else
        where the last one started;
        after an error, at the step that was not delivered.

    Attributes:
        start: where the next iteration starts.
        delivered: the position after the step delivered last, or the stream that knows it.
        plan: of the step delivered last, if it has one, while that lives, and no other start was put.
        drawn: a start, and its position with the random inputs that a state of it has promised.
    """

    def __init__(self) -> None:
        self.start = Start(Position())
        self.delivered: Position | Positioned = self.start.position
        self.plan: ref[Plan] | None = None
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
        """Return the position for a state. Between epochs, the next one's random inputs are drawn now, and kept.

        Args:
            draw_seed: draws the workers' seed.
            draw: draws the random inputs of the samples.
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
