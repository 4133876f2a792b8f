"""Building in threads of this process, several steps at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial

from orchdata.building.assembler import Task
from orchdata.building.step import Builder, BuiltStep, StartedStep
from orchdata.engines.engine import PlainEngine
from orchdata.engines.thread_pool import ThreadPool
from orchdata.engines.torch_threads import use_one_thread
from orchdata.order.steps import StepTask


class ThreadEngine(PlainEngine):
    """Runs the tasks of several steps on one pool of threads.

    The thread that ends a step's last task finishes the step; a task waits for another only where both use what takes
    one thread at a time (a tokenizer, a collate_fn).

    Args:
        num_threads: threads that read and decode.
        depth: steps under way at once.
    """

    def __init__(self, builder: Builder, *, num_threads: int, depth: int) -> None:
        self.depth = depth
        self._builder = builder
        self._closed = False
        self._planned: deque[tuple[Future[BuiltStep], StartedStep]] = deque()
        self._is_filling = False  # one of them has its turn
        self._lock = threading.Lock()
        self._pool = ThreadPool(num_threads, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        self._pool.submit(partial(self._start, future, task))
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # what is queued ends at once
            self._pool.close()

    def _start(self, future: Future[BuiltStep], task: StepTask) -> None:
        """Plan a step. Its turn to be filled comes behind all that is queued of steps before it."""
        if self._closed:
            return
        try:
            started = self._builder.start(task)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            future.set_exception(passed_on(error))
            return
        with self._lock:
            self._planned.append((future, started))
            is_next = not self._is_filling
            self._is_filling = True
        if is_next:
            self._pool.submit(self._fill)

    def _fill(self) -> None:
        """Queue the tasks of a planned step, which takes its memory: not before the last task of another has begun."""
        if self._closed:
            return
        with self._lock:
            future, started = self._planned.popleft()
        try:
            run = _StepRun(started, future)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            future.set_exception(passed_on(error))
        else:
            for fill in run.tasks:
                self._pool.submit(partial(self._run, run, fill))
            run.end_task()  # the one held for this start, so that tasks cannot finish the step before all are queued
        with self._lock:
            self._is_filling = bool(self._planned)
            goes_on = self._is_filling
        if goes_on:
            self._pool.submit(self._fill)

    def _run(self, run: _StepRun, fill: Task) -> None:
        error: BaseException | None = None
        try:
            if not self._closed and not run.has_failed:
                fill()
        except BaseException as raised:  # noqa: BLE001 - it is passed on
            error = raised
        run.end_task(error)


class _StepRun:
    """Counts a step's open tasks; the last one finishes it, the first one that fails fails it."""

    def __init__(self, started: StartedStep, future: Future[BuiltStep]) -> None:
        self.tasks = started.tasks
        self.has_failed = False
        self._future = future
        self._started = started
        self._open_tasks = len(started.tasks) + 1
        self._lock = threading.Lock()

    def end_task(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._open_tasks -= 1
            if self.has_failed:
                return
            self.has_failed = error is not None
            if error is None and self._open_tasks:
                return
        if error is None:
            try:
                self._future.set_result(self._started.finish())
            except BaseException as raised:  # noqa: BLE001 - it is passed on
                error = raised
        if error is not None:
            self._future.set_exception(passed_on(error))


def prepare_thread() -> None:
    """The first thing a thread does that builds or pins."""
    with contextlib.suppress(RuntimeError):  # where the system has no thread left for it, this one may be slower
        use_one_thread()


def passed_on(error: BaseException) -> Exception:
    """What the caller raises: what would end a thread (SystemExit, KeyboardInterrupt) is not to end him unasked."""
    if isinstance(error, Exception):
        return error
    passed_on = RuntimeError(f"building a batch met {error!r}")
    passed_on.__cause__ = error
    return passed_on
