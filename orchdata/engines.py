"""Engines: who runs the tasks of a step. The result is the same in all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Protocol

from orchdata.loaders.torch_threads import use_one_thread
from orchdata.step import BuiltStep, StartedStep, StepSpec, Task, build_step


class Engine(Protocol):
    """Builds steps, several at a time.

    Attributes:
        depth: steps worth having under way while the caller works on another; 0 where nothing runs beside him.
    """

    depth: int

    def submit(self, epoch: int, step: int) -> Future[BuiltStep]: ...

    def close(self, wait: bool = True) -> None:
        """Stop; steps under way are cancelled, and waited for unless told not to. A second call does nothing."""


class InlineEngine:
    """Builds a step in the calling thread, when it is asked for."""

    def __init__(self, spec: StepSpec) -> None:
        self.depth = 0
        self._spec = spec

    def submit(self, epoch: int, step: int) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            future.set_result(build_step(self._spec, epoch, step))
        except Exception as error:  # noqa: BLE001 - it is passed on
            future.set_exception(error)
        return future

    def close(self, wait: bool = True) -> None:
        pass


class ThreadEngine:
    """Runs the tasks of several steps on one pool of threads.

    No thread ever waits for another: the thread that ends a step's last task finishes the step.

    Args:
        num_threads: threads that read and decode.
        depth: steps under way at once.
        initializer: called in each thread, with its number, before any work.
    """

    def __init__(
        self, spec: StepSpec, *, num_threads: int, depth: int, initializer: Callable[[int], None] | None = None
    ) -> None:
        self.depth = depth
        self._spec = spec
        self._closed = False
        self._initializer = initializer
        self._broken: Exception | None = None
        self._numbers = iter(range(num_threads))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="orchdata", initializer=self._prepare_thread)

    def submit(self, epoch: int, step: int) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        self._pool.submit(self._start, future, epoch, step)
        return future

    def close(self, wait: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        # What is queued ends at once, being closed; to cancel it fails where the interpreter is already ending.
        self._pool.shutdown(wait=wait)

    def _prepare_thread(self) -> None:
        use_one_thread()
        if self._initializer is None:
            return
        try:
            self._initializer(next(self._numbers))
        except Exception as error:  # noqa: BLE001 - raised by steps: the pool would drop them, and callers wait for ever
            self._broken = error

    def _start(self, future: Future[BuiltStep], epoch: int, step: int) -> None:
        if self._closed:
            return
        try:
            if self._broken is not None:
                raise self._broken
            started = StartedStep(self._spec, epoch, step)
            run = _StepRun(started, future)
            for task in started.tasks:
                self._pool.submit(self._run, run, task)
            run.end_task()  # the one held for this start, so that tasks cannot finish the step before all are queued
        except BaseException as error:  # noqa: BLE001 - it is passed on
            _fail(future, error)

    def _run(self, run: _StepRun, task: Task) -> None:
        try:
            if not self._closed and not run.future.done():
                task()
        except BaseException as error:  # noqa: BLE001 - it is passed on
            _fail(run.future, error)
        finally:
            run.end_task()


class _StepRun:
    """Counts a step's open tasks; the last one finishes it."""

    def __init__(self, started: StartedStep, future: Future[BuiltStep]) -> None:
        self.future = future
        self._started = started
        self._open_tasks = len(started.tasks) + 1
        self._lock = threading.Lock()

    def end_task(self) -> None:
        with self._lock:
            self._open_tasks -= 1
            if self._open_tasks or self.future.done():
                return
        try:
            self.future.set_result(self._started.finish())
        except BaseException as error:  # noqa: BLE001 - it is passed on
            _fail(self.future, error)


def _fail(future: Future[BuiltStep], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else CancelledError(str(error)))
