"""A pool of threads that never keeps its process from ending.

When the interpreter ends, it joins threads of `concurrent.futures` for ever, so that one that hangs (a lock never
released, a dead mount) makes a failed job look as if it were running. These are daemon threads, and are joined with a
time limit:

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
from collections.abc import Callable, Iterable

CLOSE_SECONDS = 2.0
END_SECONDS = 2.0

_Queue = queue.SimpleQueue[Callable[[], None] | None]

_threads: weakref.WeakSet[PoolThread] = weakref.WeakSet()
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


class PoolThread(threading.Thread):
    """Runs tasks from the queue `tasks` until it gets None.

    Attributes:
        given_up: whether `close` waited for its end in vain.
    """

    def __init__(self, tasks: _Queue, prepare: Callable[[], None], number: int) -> None:
        super().__init__(name=f"orchdata_{number}", daemon=True)
        self.given_up = False
        self._tasks = tasks
        self._prepare = prepare

    def run(self) -> None:
        self._prepare()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # or its step would live until the next task

    def stop(self) -> None:
        """Let it end after its task; its pool queues nothing more."""
        self._tasks.put(None)


class ThreadPool:
    """Runs tasks on up to `num_threads` threads, each started when there is work for it.

    Args:
        prepare: called in each thread before any task. Neither it nor a task may raise.
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
            if len(self._started) < self._num_threads:
                self._start_one()

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

    def abandon(self) -> None:
        """Mark it as closed: its threads are not in this process."""
        self._closed = True

    def _start_one(self) -> None:
        thread = PoolThread(self._tasks, self._prepare, len(self._started))
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: those that exist do the work
            if not self._started:
                raise
            return
        self._started.append(thread)
        _threads.add(thread)


def _stop(threads: Iterable[PoolThread]) -> None:
    for thread in threads:
        thread.stop()


def _join(threads: Iterable[PoolThread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():  # a pool thread may collect garbage
            thread.join(max(0.0, deadline - time.monotonic()))


def _forget_threads() -> None:
    """In a forked child: forget the threads, which do not exist there and would never release a lock."""
    for pool in list(_pools):
        pool.abandon()
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
