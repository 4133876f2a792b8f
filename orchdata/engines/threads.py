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

    The thread that ends a step's last task finishes the step. Tasks wait for each other only for objects that one
    thread may use at a time (a tokenizer, a collate_fn).

    Args:
        num_threads: threads that read and decode.
        depth: steps under way at the same time.
    """

    def __init__(self, builder: Builder, *, num_threads: int, depth: int) -> None:
        self.depth = depth
        self._builder = builder
        self._closed = False
        self._planned: deque[tuple[Future[BuiltStep], StartedStep]] = deque()
        self._is_filling = False  # whether `_fill` is queued or runs
        self._lock = threading.Lock()
        self._pool = ThreadPool(num_threads, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        self._pool.submit(partial(self._start, future, task))
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # queued tasks do nothing
            self._pool.close()

    def _start(self, future: Future[BuiltStep], task: StepTask) -> None:
        """Plan a step. It is filled after all queued tasks of the steps before it."""
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
        """Queue the tasks of a planned step, and allocate memory, after the last task of the step before began."""
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
            run.end_task()  # an extra task, so that the step cannot finish before all its tasks are queued
        with self._lock:
            self._is_filling = is_more = bool(self._planned)
        if is_more:
            self._pool.submit(self._fill)

    def _run(self, run: _StepRun, fill: Task) -> None:
        error: BaseException | None = None
        try:
            if not self._closed and not run.has_failed:
                fill()
        except BaseException as raised:  # noqa: BLE001 - it is passed on
            error = raised
        try:
            run.end_task(error)
        finally:
            del run, error  # or this frame, which the error's traceback has, would refer to the error: a cycle


class _StepRun:
    """Counts a step's open tasks: the last one finishes the step, the first exception fails it."""

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
            del self, error  # as in `ThreadEngine._run`


def prepare_thread() -> None:
    """Prepare a thread that builds or pins."""
    with contextlib.suppress(RuntimeError):  # if the system has no thread left, this one may be slower
        use_one_thread()


def passed_on(error: BaseException) -> Exception:
    """Return the error for the caller to raise: SystemExit or KeyboardInterrupt in a thread must not end the caller."""
    if isinstance(error, Exception):
        return error
    passed_on = RuntimeError(f"building a batch met {error!r}")
    passed_on.__cause__ = error
    return passed_on
