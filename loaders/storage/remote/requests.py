"""Requests of a process: made by threads of their own, a limited number at a time, and never by the main thread.

    fetch --queue--> a thread of the pool: keep_trying(client.get) --> bytes, checked --> whoever waits

A client's call does not hear Ctrl-C, but waiting for another thread does. The number in flight follows the time that a
small request takes when the server is idle: far servers need many at a time, and a near one is not flooded.
A read that takes much longer than others is asked for a second time, and the first right answer counts.
"""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from orchdata.loaders import waits
from orchdata.loaders.errors import StorageError
from orchdata.loaders.memory import room
from orchdata.loaders.slow import here
from orchdata.loaders.storage.remote import process
from orchdata.loaders.storage.remote.counts import RequestCounts
from orchdata.loaders.storage.remote.trying import Outage

T = TypeVar("T")

MOST_IN_FLIGHT: Final = 64
"""Requests of a rank at the same time."""
_LEAST_IN_FLIGHT: Final = 4
_PER_MILLISECOND: Final = 2.0
"""Requests in flight for each millisecond that one takes."""
_RECENT: Final = 64
_COPIES: Final = 3
"""Copies of an answer that are in memory at the same time: a client puts together what came in parts, and a reader
takes its part.
"""
_CLIENT_BYTES: Final = 8 << 20
"""Memory of a client that is not of answers: connections, and the stack of a thread."""
_SLOW_SECONDS: Final = 0.3
_SLOW_TIMES: Final = 4.0
_MOST_SECOND: Final = 0.05
_TICK_SECONDS: Final = 0.05


class Pending(Generic[T]):
    """The result of a call that a thread of the pool makes.

    Attributes:
        num_bytes: memory that the result takes.
        began: when the call began, as `time.monotonic`; None if it has not.
        is_wanted: whether anyone may still ask for the result.
        is_awaited: whether someone waits for it, or will.
    """

    def __init__(self, call: Callable[[], T], num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._call: Callable[[], T] | None = call
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._running = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self.began: float | None = None
        self.is_wanted = True
        self.is_awaited = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def drop(self) -> None:
        """Do not make the call if it has not begun, and do not keep its result."""
        self.is_wanted = False
        self._call = self._result = None

    def run(self) -> None:
        """Make the call. The first result counts; an error only if no other attempt is under way."""
        call = self._call
        if call is None or self.is_done:
            return
        with self._lock:
            self._running += 1
            self.began = self.began or time.monotonic()
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - whoever waits gets it
            error = raised
        try:
            with self._lock:
                self._running -= 1
                if self.is_done or (error is not None and self._running):
                    return
                if self.is_wanted:
                    self._result, self._error = result, error
                self._call = None
                self._done.set()
        finally:
            del error, call  # the error refers to this frame

    def fail(self, error: BaseException) -> None:
        """Give whoever waits an error, if there is no result yet."""
        with self._lock:
            if not self.is_done:
                self._error, self._call = error, None
                self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait; return whether the result is there."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Return the result that is there, or raise the error."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error refers to this frame
        return self._result  # type: ignore[return-value]


class Requests:
    """The threads of this process that make requests. They start when they are needed, and end with the process."""

    def __init__(self) -> None:
        self.counts = RequestCounts()
        self.outage = Outage()
        self.most = MOST_IN_FLIGHT
        self._urgent: deque[Pending[Any]] = deque()
        self._later: deque[Pending[Any]] = deque()
        self._changed = threading.Condition()
        self._num_threads = 0
        self._idle = 0
        self._running = self._running_late = self._running_bytes = 0
        self._times: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._reads = self._second = 0

    def submit(self, call: Callable[[], T], *, later: bool = False) -> Pending[T]:
        """Have a thread make a call.

        Args:
            later: after all others.
        """
        pending = Pending(call)
        self._enqueue(pending, later=later)
        return pending

    def begin(self, pending: Pending[Any]) -> None:
        """Have a thread make the call of a result that is wanted."""
        self._enqueue(pending)

    def wait(
        self,
        pending: Pending[T],
        url: str,
        *,
        num_bytes: int = 0,
        is_read: bool = False,
        counts: RequestCounts | None = None,
    ) -> T:
        """Return the result of a call. Raises its error, and StorageError where no client works.

        Args:
            url: for the error.
            num_bytes: how many it reads.
            is_read: whether it may be made twice.
            counts: of requests; None: those of the process.
        """
        if pending.is_done:
            return pending.result()
        started = time.monotonic()
        has_second = not is_read
        with waits.for_storage():
            while not pending.wait(_TICK_SECONDS if not has_second or process.HERE.is_forked else 1.0):
                now = time.monotonic()
                here().check()
                if process.is_hopeless(now - started):
                    raise process.error(url)
                if not has_second and pending.began is not None and now - pending.began > self._slow_after(num_bytes):
                    has_second = True
                    if self._may_repeat():
                        (counts or self.counts).add("second")
                        self._enqueue(pending, first=True)
        return pending.result()

    def timed(self, seconds: float, num_bytes: int) -> None:
        """Note how long an answered read took."""
        with self._changed:
            self._times.append((seconds, num_bytes))
            self._reads += 1

    def share(self, processes: int) -> None:
        """Divide the number in flight among so many processes of the rank."""
        self.most = max(_LEAST_IN_FLIGHT, MOST_IN_FLIGHT // max(1, processes))

    @property
    def in_flight(self) -> int:
        """How many requests may be under way at the same time."""
        if len(self._times) < _LEAST_IN_FLIGHT:
            return min(self.most, 2 * _LEAST_IN_FLIGHT)
        quickest = min(seconds for seconds, _ in list(self._times))
        return max(_LEAST_IN_FLIGHT, min(self.most, int(1000 * quickest * _PER_MILLISECOND)))

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the results of all requests will take which are queued or under way."""
        with self._changed:
            queued = sum(each.num_bytes for queue in (self._urgent, self._later) for each in queue if each.is_wanted)
            return queued + self._running_bytes

    def _slow_after(self, num_bytes: int) -> float:
        """Return after how many seconds a read of so many bytes is slow."""
        recent = list(self._times)
        if len(recent) < 8:
            return 10 * _SLOW_SECONDS
        usual = statistics.median(seconds for seconds, _ in recent)
        size = statistics.median(size for _, size in recent)
        return max(_SLOW_SECONDS, _SLOW_TIMES * usual * max(1.0, num_bytes / max(1.0, size)))

    def _may_repeat(self) -> bool:
        with self._changed:
            if self._second + 1 > max(1.0, _MOST_SECOND * self._reads):
                return False
            self._second += 1
            return True

    def _enqueue(self, pending: Pending[Any], *, later: bool = False, first: bool = False) -> None:
        with self._changed:
            queue = self._later if later else self._urgent
            if first:
                queue.appendleft(pending)
            else:
                queue.append(pending)
            try:
                self._start_thread()
            except (RuntimeError, MemoryError) as error:  # the system has no thread left
                if not self._num_threads:
                    queue.remove(pending)
                    pending.fail(_without_threads(error))
                    return
            self._changed.notify()

    def _start_thread(self) -> None:
        """Start a thread if more requests wait than threads, and one more may be under way. Each takes memory."""
        if len(self._urgent) + len(self._later) > self._idle and self._num_threads < self.in_flight:
            threading.Thread(target=self._serve, name="orchdata-requests", daemon=True).start()
            self._num_threads += 1

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while (taken := self._taken()) is None:
                    self._changed.wait()
                self._idle -= 1
                pending, is_late = taken
                self._running += 1
                self._running_late += is_late
                self._running_bytes += pending.num_bytes
            try:
                pending.run()
            finally:
                with self._changed:
                    self._running -= 1
                    self._running_late -= is_late
                    self._running_bytes -= pending.num_bytes
                    with suppress(RuntimeError, MemoryError):
                        self._start_thread()
                    self._changed.notify()
            del pending, taken

    def _taken(self) -> tuple[Pending[Any], bool] | None:
        """Return the next request, and whether it is one of those after all others; None if none may begin now.

        These have half of the requests in flight at most: they are large, and an urgent one would wait for their end.
        """
        if self._running >= self.in_flight or (self._running and not self._has_room()):
            return None
        if self._urgent:
            return self._urgent.popleft(), False
        return (
            (self._later.popleft(), True) if self._later and self._running_late < max(1, self.in_flight // 2) else None
        )

    def _has_room(self) -> bool:
        """Return whether the next request fits into the memory that is left, with those that run."""
        waiting = self._urgent or self._later
        left = room() if waiting else None
        return left is None or left.left_bytes >= needed_bytes(self._running_bytes + waiting[0].num_bytes)


def needed_bytes(num_bytes: int) -> int:
    """Return the memory that is needed to read this number of bytes."""
    return _COPIES * num_bytes + _CLIENT_BYTES


def _without_threads(error: BaseException) -> StorageError:
    return StorageError("object storage", f"no thread can be started that makes requests ({error})", errno.EAGAIN)


HERE = Requests()


def _in_child() -> None:
    """A forked process has none of the threads."""
    global HERE
    HERE = Requests()


os.register_at_fork(after_in_child=_in_child)
