"""Engines: who runs the tasks of a step. The result is the same in all of them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from orchdata.building.step import BuiltStep, StartedStep, StepSpec, Task, build_step
from orchdata.engines.thread_pool import ThreadPool
from orchdata.engines.torch_threads import use_one_thread


class Engine(Protocol):
    """Builds steps, several at a time.

    Attributes:
        depth: steps worth having under way while the caller works on another; 0 where nothing runs beside him.
    """

    depth: int

    def submit(self, epoch: int, step: int) -> Future[BuiltStep]: ...

    def close(self) -> None:
        """Stop. What runs is waited for a moment; what hangs is left behind. A second call does nothing."""


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

    def close(self) -> None:
        pass


class ThreadEngine:
    """Runs the tasks of several steps on one pool of threads.

    The thread that ends a step's last task finishes the step; a task waits for another only where both use what takes
    one thread at a time (a tokenizer, a collate_fn).

    Args:
        num_threads: threads that read and decode.
        depth: steps under way at once.
    """

    def __init__(self, spec: StepSpec, *, num_threads: int, depth: int) -> None:
        self.depth = depth
        self._spec = spec
        self._closed = False
        self._pool = ThreadPool(num_threads, prepare=_prepare_thread)

    def submit(self, epoch: int, step: int) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        self._pool.submit(partial(self._start, future, epoch, step))
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # what is queued ends at once
            self._pool.close()

    def _start(self, future: Future[BuiltStep], epoch: int, step: int) -> None:
        if self._closed:
            return
        try:
            run = _StepRun(StartedStep(self._spec, epoch, step), future)
        except BaseException as error:  # noqa: BLE001 - it is passed on
            future.set_exception(_passed_on(error))
            return
        for task in run.tasks:
            self._pool.submit(partial(self._run, run, task))
        run.end_task()  # the one held for this start, so that tasks cannot finish the step before all are queued

    def _run(self, run: _StepRun, task: Task) -> None:
        error: BaseException | None = None
        try:
            if not self._closed and not run.has_failed:
                task()
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
            self._future.set_exception(_passed_on(error))


def _prepare_thread() -> None:
    with contextlib.suppress(RuntimeError):  # where the system has no thread left for it, this one may be slower
        use_one_thread()


def _passed_on(error: BaseException) -> Exception:
    """What the caller raises: what would end a thread (SystemExit, KeyboardInterrupt) is not to end him unasked."""
    if isinstance(error, Exception):
        return error
    passed_on = RuntimeError(f"a thread that builds batches met {error!r}")
    passed_on.__cause__ = error
    return passed_on
