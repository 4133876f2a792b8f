"""Planned steps: drawn in this process, built ahead by an engine, delivered in order.

tasks --ahead--> engine --under way--> delivery (waits, counts, masks, sends to peers) --> microbatches
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from orchdata.building.collate import STOP_ITERATION
from orchdata.building.step import Builder, BuildSpec, BuiltStep
from orchdata.delivery.delivery import Delivery
from orchdata.engines.engine import Engine, InlineEngine, PinningEngine, ThreadEngine, Workers
from orchdata.engines.processes.engine import ProcessEngine
from orchdata.engines.warm import Warming
from orchdata.finalizers import Ending
from orchdata.loop.loop import EpochLoop, Position
from orchdata.order.steps import StateGetter, Steps, StepTask
from orchdata.ranks.agreement import Agreement, Beginning, check_plans, fail_check
from orchdata.ranks.parallel import Rank


class Interrupted(NamedTuple):
    """State of an iteration with an error, for the one that continues it."""

    begun: Beginning  # kept, because for the other ranks, which had no error, it is the same iteration
    tasks: Iterator[StepTask] | None  # its steps from the failed one on, if they were drawn


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Shared by all iterations of a loader; `builder` is of the spec, in this process, if its steps are planned."""

    spec: BuildSpec
    builder: Builder | None
    steps: Steps
    rank: Rank
    agreement: Agreement
    delivery: Delivery


class PlannedStream:
    """The steps of one iteration, built by its own engine, which `leave` closes, or keeps for the next iteration."""

    computes_position = False

    def __init__(self, context: LoopContext, loop: EpochLoop, engine: Engine, leave: Callable[..., None]) -> None:
        self.position = loop.start.position
        self._context = context
        self._loop = loop
        self._engine = engine
        self._leave = leave
        left = partial(leave, engine, is_over=False, has_failed=False)
        self._ending = Ending(self, left) if engine.depth else None
        self.next_step = self.position.step
        self._tasks: Iterator[StepTask] | None = None
        self._ahead: deque[StepTask] = deque()  # drawn, and not yet under way
        self._under_way: deque[tuple[StepTask, Future[BuiltStep]]] = deque()
        self._interrupted: Interrupted | None = loop.start.interrupted
        loop.start.interrupted = None
        begun = self._interrupted and self._interrupted.begun
        self._begun = context.agreement.begin(self.position.epoch, self.next_step, begun)

    @property
    def undelivered(self) -> list[int]:
        return [*(task.step for task, _ in self._under_way), *(task.step for task in self._ahead)]

    def __next__(self) -> list[Any]:
        if self._tasks is None:
            left, self._interrupted = self._interrupted, None
            self.position, self._tasks = draw_tasks(self._context, self._loop, self._begun, left)

        # As many steps are under way as the engine wants, and the first of them is awaited.
        self._submit(max(1, self._engine.depth))
        step = self.next_step
        every = self._context.rank.check_plan_every
        is_checked = bool(every) and (step - self._begun.step) % every == 0
        if not self._under_way:
            if is_checked and step == self._loop.start.position.step:
                check_plans(self.position.epoch, step, None, self._context.rank.groups)  # there is no step to plan
            raise StopIteration
        task, future = self._under_way[0]
        try:
            try:
                batches = self._context.delivery.deliver(self._engine, future, task)
            finally:
                del future  # as in `Delivery.deliver`
            self._submit(self._engine.depth + 1)  # this one is still among them
        except Exception as error:
            if is_checked:
                fail_check(error, self._context.rank.groups)
            if isinstance(error, StopIteration):
                raise RuntimeError(STOP_ITERATION) from error
            raise

        # A step whose plan other ranks do not have stays under way: it is tried again.
        if is_checked:
            plan = self._under_way[0][1].result().plan
            check_plans(self.position.epoch, step, plan.hash, self._context.rank.groups)
        self._under_way.popleft()
        self.next_step += 1
        self.position = self.position.after(task.step, self.undelivered, sampler=task.sampler_state)
        return batches

    def leave(self) -> Interrupted:
        undelivered = [*(task for task, _ in self._under_way), *self._ahead]
        tasks = None if self._tasks is None else chain(undelivered, self._tasks)
        return Interrupted(self._begun, tasks)

    def skip_failed(self, error: BaseException) -> bool:
        context = self._context
        is_collective = context.delivery.is_collective or context.rank.check_plan_every
        # The step is still under way, and awaited again. Other ranks may wait for this one in a collective.
        return isinstance(error, KeyboardInterrupt) and self._tasks is not None and not is_collective

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        try:
            if is_over:
                self._context.delivery.end_epoch(self.position.epoch)
        except BaseException:
            has_failed = True
            raise
        finally:
            if waits or self._ending is None:
                self._leave(self._engine, is_over=is_over, has_failed=has_failed)
            if self._ending is not None:
                self._ending.cancel() if waits else self._ending.soon()

    def _submit(self, depth: int) -> None:
        while len(self._under_way) < depth:
            if not self._ahead and self._tasks is not None:
                try:
                    self._ahead.extend(islice(self._tasks, 1))
                except BaseException:
                    self._tasks = None  # it is over: an iteration that continues draws again
                    raise
            if not self._ahead:
                return
            task = self._ahead[0]
            try:
                filled = self._context.steps.filled(task)
            except Exception as error:  # noqa: BLE001 - it is raised when the step is awaited, as one of its build
                future: Future[BuiltStep] = Future()
                future.set_exception(error)
            else:
                future = self._engine.submit(filled)
            self._under_way.append((task, future))
            self._ahead.popleft()


def draw_tasks(
    context: LoopContext, loop: EpochLoop, begun: Beginning, left: Interrupted | None
) -> tuple[Position, Iterator[StepTask]]:
    """Return where an iteration starts, and its steps, once all ranks have the random inputs of the epoch."""
    origin = loop.origin

    # After an error, the tasks that the failed iteration drew are taken again.
    if left is not None and left.tasks is not None:
        return loop.know(origin.draw), left.tasks

    # Ranks compare where they begin. All use the random inputs that rank 0 has drawn, or those of the state.
    draw = begun.agree(lambda: origin.draw or context.steps.draw())
    if origin.draw is not None and draw != origin.draw:
        raise ValueError("ranks continue from different states: pass load_state_dict the same on every rank")
    position = loop.know(draw)

    # Tasks begin at the first step that is not delivered; delivered steps after it are left out.
    first = min((*origin.left, origin.step))
    tasks = context.steps.tasks(
        origin.epoch,
        first,
        draw,
        again=origin.draw is not None or context.rank.rank > 0,
        sampler_state=origin.sampler if loop.start.restores else None,
    )
    if first == origin.step:
        return position, tasks
    return position, (task for task in tasks if task.step >= origin.step or task.step in origin.left)


@dataclass(eq=False)
class PlannedSource:
    """Where planned steps come from: an engine that is opened for an iteration, or kept. As the two sources of torch's
    loader, it opens a stream, returns the data set's own state before its first step, and stops what is kept.
    """

    workers: Workers
    warming: Warming
    pin_memory: bool
    idle: Engine | None = None
    _known_bad_rows: dict[int, str] = field(default_factory=dict)

    def stream(self, context: LoopContext, loop: EpochLoop) -> PlannedStream:
        engine, self.idle = self.idle or self._open(context, loop.base_seed), None
        return PlannedStream(context, loop, engine, self.leave)

    def state_before(self) -> tuple[StateGetter, ...]:
        return ()

    def _open(self, context: LoopContext, base_seed: int) -> Engine:
        # Threads call kernels while `timeout` runs, and processes that are forked would each load them.
        workers = self.workers
        if workers.forks or (workers.num_threads and not workers.num_workers):
            self.warming.finish(context.spec)
        else:
            self.warming.wait()
        spec, builder = context.spec, context.builder
        assert builder is not None
        engine = context.delivery.receiving_engine()
        if engine is None and workers.num_workers:
            filled = replace(
                workers,
                base_seed=base_seed,
                reads=builder.reads,
                name_of=spec.content.name_of,
                known_bad_rows=self._known_bad_rows,
            )
            engine = ProcessEngine(spec, filled) if workers.engine is None else workers.engine.open(spec, filled)
        elif engine is None and workers.num_threads:
            engine = ThreadEngine(builder, num_threads=workers.num_threads, depth=workers.prefetch_factor)
        elif engine is None:
            engine = InlineEngine(builder)
        return PinningEngine(engine) if self.pin_memory else engine

    def leave(self, engine: Engine, *, is_over: bool, has_failed: bool) -> None:
        """Keep an engine for the next iteration, or close it."""
        keeps = self.workers.persistent_workers and not has_failed and (is_over or self.workers.engine is not None)
        if keeps and self.idle is None:
            self.idle = engine
        else:
            engine.close()

    def close(self) -> None:
        """Close the engine that is kept."""
        if self.idle is not None:
            self.idle.close()
            self.idle = None
