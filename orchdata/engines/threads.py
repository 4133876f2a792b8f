"""Building in this process: in the thread that asks, or in others, several steps at a time; and pinning, in a thread.

A pool of threads never keeps its process from ending. When the interpreter ends, it joins threads of
`concurrent.futures` for ever, so that one that hangs (a lock never released, a dead mount) makes a failed job look as
if it were running. These are daemon threads, and are joined with a time limit:

    close:  nothing more is queued, and running tasks may end: CLOSE_SECONDS
    exit:   the same for pools still open; then SystemExit is raised in threads that run Python: END_SECONDS together

A thread that then remains is stuck outside Python, in a call that does not return.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from orchdata.building.step import Builder, BuiltStep, StartedStep, Task
from orchdata.engines.engine import Engine
from orchdata.notices import warn_user
from orchdata.order.steps import StepTask

CLOSE_SECONDS = 2.0
END_SECONDS = 2.0

_one_thread = threading.Lock()
_Queue = queue.SimpleQueue[Callable[[], None] | None]

_threads: weakref.WeakSet[PoolThread] = weakref.WeakSet()
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


class PoolThread(threading.Thread):
    """Runs tasks from the queue `tasks` until it gets None."""

    def __init__(self, tasks: _Queue, prepare: Callable[[], None], number: int) -> None:
        super().__init__(name=f"orchdata_{number}", daemon=True)
        self.given_up = False  # whether `close` waited for its end in vain
        self.tasks = tasks
        self._prepare = prepare

    def run(self) -> None:
        self._prepare()
        while (task := self.tasks.get()) is not None:
            task()
            del task  # or its step would live until the next task


class ThreadPool:
    """Runs tasks on up to `num_threads` threads, each started when there is work for it; `prepare` is called first in
    each. Neither it nor a task may raise.
    """

    def __init__(self, num_threads: int, prepare: Callable[[], None]) -> None:
        self._num_threads = num_threads
        self._prepare = prepare
        self._tasks: _Queue = queue.SimpleQueue()
        self._started: list[PoolThread] = []
        self._closed = False
        self._lock = threading.Lock()
        # Threads refer to the queue, not to the pool, so that an unreferenced pool ends them.
        weakref.finalize(self, _stop, self._started).atexit = False
        _pools.add(self)

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task; a closed pool drops it."""
        with self._lock:
            if self._closed:
                return
            self._tasks.put(task)
            if len(self._started) == self._num_threads:
                return
            thread = PoolThread(self._tasks, self._prepare, len(self._started))
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads: those that exist do the work
                if not self._started:
                    raise
            else:
                self._started.append(thread)
                _threads.add(thread)

    def close(self) -> None:
        """Let threads end after the queued tasks, and wait for them CLOSE_SECONDS at most. A second call does nothing,
        nor does one while the interpreter ends.
        """
        if self._closed:
            return
        self.stop()
        _join(self._started, CLOSE_SECONDS)
        for thread in self._started:
            thread.given_up = thread.is_alive()

    def stop(self) -> None:
        """`close`, without waiting."""
        with self._lock:
            self._closed = True
        _stop(self._started)


def _stop(threads: Iterable[PoolThread]) -> None:
    """Let threads end after their tasks; their pool queues nothing more."""
    for thread in threads:
        thread.tasks.put(None)


def _join(threads: Iterable[PoolThread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():  # a pool thread may collect garbage
            thread.join(max(0.0, deadline - time.monotonic()))


def _forget_threads() -> None:
    """In a forked child: forget the threads, which do not exist there and would never release a lock."""
    for pool in list(_pools):
        pool._closed = True
    _pools.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _end_threads() -> None:
    """Before the interpreter ends: a thread that returned to it later would abort the process."""
    for pool in list(_pools):
        pool.stop()
    running = [thread for thread in _threads if thread.is_alive()]
    try:
        _join([thread for thread in running if not thread.given_up], END_SECONDS / 2)
        running = [thread for thread in running if thread.is_alive()]
        for thread in running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        _join_those_at_work(running, END_SECONDS / 2)
    finally:  # Ctrl-C included
        if any(thread.is_alive() for thread in running):
            _end_without_destructors()


def _join_those_at_work(running: list[PoolThread], seconds: float) -> None:
    """Join threads, except those that `close` gave up and that use no CPU: other ranks may wait for this one to end."""
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        before = [_nanoseconds_on_cpu(thread) for thread in running]
        _join(running, 0.1)
        running = [
            thread
            for thread, spent in zip(running, before, strict=True)
            if thread.is_alive() and not (thread.given_up and _nanoseconds_on_cpu(thread) == spent)
        ]


def _nanoseconds_on_cpu(thread: threading.Thread) -> float:
    """Return a thread's CPU time on Linux; elsewhere NaN, which equals nothing."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as file:
            return float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return float("nan")


def _end_without_destructors() -> None:
    """Let the process end right after Python, with Python's status: a thread may use what C libraries destroy then."""
    with contextlib.suppress(AttributeError, OSError):  # no such C library: it ends the usual way
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)  # registered last, so called first: flushes what C wrote


class InlineEngine(Engine):
    """Builds a step in the calling thread, when it is requested."""

    def __init__(self, builder: Builder) -> None:
        self.depth = 0
        self._builder = builder

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        try:
            built = self._builder.build(task)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            return _failed(error)
        future: Future[BuiltStep] = Future()
        future.set_result(built)
        return future


def _failed(error: BaseException) -> Future[BuiltStep]:
    """Return a future of an error. No frame of the error's traceback has it: a cycle would keep the caller's frames."""
    future: Future[BuiltStep] = Future()
    future.set_exception(error)
    return future


class ThreadEngine(Engine):
    """Runs the tasks of several steps, `depth` at the same time, on one pool of threads that read and decode.

    The thread that ends a step's last task finishes the step. Tasks wait for each other only for objects that one
    thread may use at a time (a tokenizer, a collate_fn).
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


def use_one_thread() -> None:
    """Let torch's operations in this thread use this thread alone. Other threads, and later ones, keep their setting.

    A decoding thread calls it first, or torch's thread pools compete for the cores: with torch's default of one pool
    thread per core, operations of 1 ms were measured to take 40 ms on busy cores. A training thread must not.
    """
    with _one_thread:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        if others > 1:
            # The call sets this thread, and the default of later threads: another thread restores the default.
            restore = threading.Thread(target=torch.set_num_threads, args=(others,))
            restore.start()
            restore.join()


def passed_on(error: BaseException) -> Exception:
    """Return the error for the caller to raise: SystemExit or KeyboardInterrupt in a thread must not end the caller."""
    if isinstance(error, Exception):
        return error
    passed_on = RuntimeError(f"building a batch met {error!r}")
    passed_on.__cause__ = error
    return passed_on


class PinningEngine:
    """An engine that copies its steps to page-locked memory, in a separate thread ahead of delivery, as torch's loader
    does: tensors, containers of them, and objects with a method `pin_memory`.

    Create it in the training thread: the copies are for the current device of that thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.depth = engine.depth
        self.keeps_time = engine.keeps_time
        self._engine = engine
        self._built: dict[Future[BuiltStep], Future[BuiltStep]] = {}  # until they are done
        self._device = torch.accelerator.current_device_index()
        self._pool = ThreadPool(1, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        pinned: Future[BuiltStep] = Future()
        built = self._built[pinned] = self._engine.submit(task)
        pinned.add_done_callback(self._built.pop)
        built.add_done_callback(lambda done: self._pool.submit(partial(_pin, self._device, done, pinned)))
        return pinned

    def expect(self, future: Future[BuiltStep]) -> None:
        built = self._built.get(future)
        if built is not None:
            self._engine.expect(built)

    def take_notes(self) -> list[str]:
        return self._engine.take_notes()

    def close(self) -> None:
        self._engine.close()
        self._pool.close()


def can_pin() -> bool:
    """Return whether there is an accelerator to pin for; warn if there is none."""
    if torch.accelerator.is_available():
        return True
    warn_user("pin_memory has no effect: torch finds no accelerator")
    return False


def _pin(device: int, built: Future[BuiltStep], pinned: Future[BuiltStep]) -> None:
    try:
        step = built.result()
        torch.accelerator.set_device_index(device)
        pinned.set_result(replace(step, batches=[pin_memory(batch) for batch in step.batches]))
    except BaseException as error:  # noqa: BLE001 - it is passed on
        pinned.set_exception(passed_on(error))
