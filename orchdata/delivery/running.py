"""One iteration of a loader: its steps drawn, kept under way, and delivered in order.

settle (are ranks alike? what are the epoch's samples?) -> tasks --ahead--> engine --under way--> deliver
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

from orchdata.building.assembler import EndOfData
from orchdata.building.step import BuiltStep
from orchdata.delivery.cursor import Failed, Found, Iteration
from orchdata.delivery.delivery import Delivery
from orchdata.engines.engine import Engine
from orchdata.notices import warn_once
from orchdata.order.steps import Epochs, StepTask
from orchdata.ranks.agreement import check_plans, fail_check
from orchdata.ranks.comparing import Agreement, Beginning
from orchdata.ranks.parallel import Rank


class Left(NamedTuple):
    """What an iteration with an error leaves for the one that goes on with it.

    Attributes:
        begun: for the other ranks, which had no error, it is the same iteration.
        tasks: its steps from the failed one on, where they were drawn.
    """

    begun: Beginning
    tasks: Iterator[StepTask] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What all iterations of a loader share.

    Attributes:
        iterated: the data set can only be iterated: an iteration goes on somewhere by going there.
        goes_on: an iteration goes on behind a step that failed.
        in_order: steps come in their order; else as they are ready.
        num_workers: that build, this process among them where nobody else does.
        goes_over: data sets go on, in the next epoch, with what they hold at the end of one.
    """

    epochs: Epochs
    rank: Rank
    agreement: Agreement
    delivery: Delivery
    iterated: bool
    goes_on: bool
    in_order: bool
    num_workers: int
    goes_over: bool


class Running:
    """An iteration under way on an engine of its own."""

    def __init__(self, course: Course, iteration: Iteration[Left], engine: Engine) -> None:
        self._course = course
        self._iteration = iteration
        self._engine = engine
        self._first = iteration.begin.step
        self._under_way: deque[tuple[StepTask, Future[BuiltStep]]] = deque()
        self._ahead: deque[StepTask] = deque()  # drawn, and not yet under way
        self._tasks: Iterator[StepTask] | None = None
        self._left = iteration.left()
        self._begun = course.agreement.begin(iteration.epoch, self._first, self._left and self._left.begun)

    def steps(self) -> Iterator[tuple[int, list[Any] | Failed]]:
        """Each step and its microbatches, up to the end of the epoch."""
        for step in count(self._first):
            made = self._made(step)
            if made is None:
                break
            yield step, made
            del made  # or the last step would live on while the next is waited for
        self._course.delivery.end_epoch(self._iteration.epoch)
        self._iteration.end(held=self._course.goes_over)

    def _made(self, step: int) -> list[Any] | Failed | None:
        """None at the end of the epoch."""
        try:
            self._begun.compare()
            if self._tasks is None:
                self._tasks = self._settle()
            return self._deliver(step)
        except EndOfData:
            return None
        except Exception:
            self._fail(step)
            raise

    def _settle(self) -> Iterator[StepTask]:
        """The epoch's steps from here on, once all ranks know what its samples depend on."""
        iteration, course, origin = self._iteration, self._course, self._iteration.origin
        drawn = origin.told
        if self._left is not None and self._left.tasks is not None:
            iteration.start(drawn)
            return self._left.tasks
        told = self._begun.tell(drawn or course.epochs.tell())
        if drawn is not None and told != drawn:
            raise ValueError("ranks go on from different states: give load_state_dict the same on every rank")
        iteration.start(told)
        again = drawn is not None or course.rank.rank > 0
        held = origin.sampler if iteration.is_resumed else None
        first = min((*origin.left, self._first))
        tasks = course.epochs.tasks(iteration.epoch, first, told, again=again, held=held)
        if first == self._first:
            return tasks
        return (task for task in tasks if task.step >= self._first or task.step in origin.left)

    def _deliver(self, step: int) -> list[Any] | Failed | None:
        task = self._under_way[0][0] if self._under_way else self._next_task()
        every, epoch, groups = self._course.rank.check_plan_every, self._iteration.epoch, self._course.rank.groups
        is_checked = bool(every) and (step - self._begun.step) % every == 0
        if task is None:
            if is_checked and step == self._first:
                check_plans(epoch, step, None, groups)  # there is no step left to plan
            return None
        try:
            made, future = self._received(step)
        except EndOfData:
            raise
        except Exception as error:
            if is_checked:
                fail_check(error, groups)
            raise
        task, _ = self._under_way[0]
        if isinstance(made, Failed):
            self._under_way.popleft()
            return made
        if is_checked:
            check_plans(epoch, step, future.result().plan.hash, groups)
        self._under_way.popleft()  # not before: a step whose plan is refused is tried again
        self._hand_out(task, future.result())
        return made

    def _hand_out(self, task: StepTask, built: BuiltStep) -> None:
        self._iteration.hand_out(
            task.step,
            Found(
                undone=self._undone,
                sampler=task.held,
                held=built.held,
                worker=built.worker,
                num_workers=self._course.num_workers,
            ),
        )

    def _received(self, step: int) -> tuple[list[Any] | Failed, Future[BuiltStep]]:
        self._submit(max(1, self._engine.depth))
        self._bring_forward()
        task, future = self._under_way[0]
        try:
            batches = self._course.delivery.deliver(self._engine, future, task)
        except EndOfData:
            raise
        except (Exception, SystemExit) as error:
            if not self._course.goes_on or not future.done() or isinstance(error, Warning):
                raise  # a warning that is an error here says nothing of the step
            self._fail(step)
            return Failed(error), future
        self._submit(self._engine.depth + 1)  # this one is still among them
        return batches, future

    def _bring_forward(self) -> None:
        """Where steps come as they are ready, put the first that is before the others."""
        if self._course.in_order:
            return
        if self._under_way[0][0].held is not None:
            warn_once(
                "a sampler with a state keeps order",
                "in_order=False: batches come in order all the same, for the sampler holds a state of its own, which "
                "says where it stands and not which of its batches others have overtaken",
            )
            return
        self._engine.expect(self._under_way[0][1])
        wait([future for _, future in self._under_way], return_when=FIRST_COMPLETED)
        place = next(place for place, (_, future) in enumerate(self._under_way) if future.done())
        ready = self._under_way[place]
        del self._under_way[place]
        self._under_way.appendleft(ready)

    def _submit(self, depth: int) -> None:
        while len(self._under_way) < depth and self._next_task() is not None:
            task = self._ahead.popleft()
            self._under_way.append((task, self._engine.submit(task)))

    def _next_task(self) -> StepTask | None:
        if not self._ahead and self._tasks is not None:
            try:
                self._ahead.extend(islice(self._tasks, 1))
            except Exception:
                self._tasks = None  # it is over: whoever goes on draws again
                raise
        return self._ahead[0] if self._ahead else None

    def _fail(self, step: int) -> None:
        undone = [*(task for task, _ in self._under_way), *self._ahead]
        at = undone[0].step if undone else step
        drawn = None if self._tasks is None or self._course.iterated else chain(undone, self._tasks)
        self._iteration.fail(at, self._undone, Left(self._begun, drawn))

    @property
    def _undone(self) -> list[int]:
        """Steps that were drawn and not handed out."""
        return [*(task.step for task, _ in self._under_way), *(task.step for task in self._ahead)]
