"""Requests of a process: made by threads of their own, a limited number at a time, and again after trouble that passes.

    Pending --queue--> a thread of the pool: keep_trying(client.get) --> bytes, checked --> whoever waits

A client's call does not hear Ctrl-C, but waiting for another thread does. The pool refers weakly to what it makes: a
request that no one holds any more is not made, and not tried again.

No client works in a child that was forked after one was used, because its threads do not exist there. A child knows
that the process that it was forked from used one through this library, and refuses at once. If only the user's own code
had used one, its first request is given up after `FORKED_SECONDS`.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from orchdata.loaders import waits
from orchdata.loaders.errors import StorageError
from orchdata.loaders.memory import room
from orchdata.loaders.slow import here
from orchdata.loaders.storage.counted import RequestCounts
from orchdata.loaders.storage.remote.clients.trouble import Trouble

T = TypeVar("T")

RETRY_SECONDS: Final = 300.0
"""How long a request is tried again."""
FORKED_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 8.0
_MOST_ODD: Final = 5  # answers without a range: a server may have none, and a proxy may make a single one
_SAID_EVERY: Final = 60.0
_MOST_IN_FLIGHT: Final = 64
"""Requests of a rank at the same time."""
_LEAST_IN_FLIGHT: Final = 4
_COPIES: Final = 3
"""Copies of an answer that are in memory at the same time: a client puts together what came in parts, and a reader
takes its part.
"""
_CLIENT_BYTES: Final = 8 << 20
"""Memory of a client that is not of answers: connections, and the stack of a thread."""
_WHY: Final = (
    "cannot be read: this process was forked from one that had used object storage, and no client works in it: start "
    'processes with multiprocessing_context="forkserver" or "spawn" instead of "fork"'
)

_log = logging.getLogger("orchdata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[T]):
    """A request, and how long it is made again.

    Attributes:
        call: one attempt. Raises Trouble.
        url, doing: for errors: the object, without secrets, and what failed.
        retry_seconds: for how long after the first failure it is made again.
        counts: gets the attempts after the first.
        refresh: reads credentials again; called once.
        ended: whether the result is wanted no more, though someone may hold it.
        num_bytes: memory that the result takes.
    """

    call: Callable[[], T]
    url: str
    doing: str
    retry_seconds: float
    counts: RequestCounts
    refresh: Callable[[], bool]
    ended: Callable[[], bool] = lambda: False
    num_bytes: int = 0


class Pending(Future[T]):
    """The result of a request that a thread of the pool makes, as long as anyone holds this object."""

    def __init__(self, request: Request[T]) -> None:
        super().__init__()
        self.request = request


class Requests:
    """The threads of this process that make requests. They start when they are needed, and end with the process.

    Args:
        parent: those of the process that this one was forked from.

    Attributes:
        most: number under way at the same time.
    """

    def __init__(self, parent: Requests | None = None) -> None:
        self.counts = RequestCounts()
        self.most = _MOST_IN_FLIGHT
        self._urgent: deque[weakref.ref[Pending[Any]]] = deque()
        self._later: deque[weakref.ref[Pending[Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = self._running = self._running_late = self._running_bytes = 0
        self._said = -_SAID_EVERY
        self._is_used = self._has_answer = False
        self._is_forked = parent is not None
        self._refuses: bool = parent is not None and (parent._is_used or parent._refuses)

    def check(self, url: str) -> None:
        """Note that this process uses a client. Raises StorageError if none can work in it."""
        if self._refuses:
            raise StorageError(url, _WHY)
        self._is_used = True

    def share(self, processes: int) -> None:
        """Divide the number in flight among so many processes of the rank."""
        self.most = max(_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT // max(1, processes))

    def begin(self, request: Request[T], *, later: bool = False) -> Pending[T]:
        """Have a thread make a request, `later` after all others. Return its result, which the caller must hold."""
        pending = Pending(request)
        with self._changed:
            (self._later if later else self._urgent).append(weakref.ref(pending))
            if len(self._urgent) + len(self._later) > self._idle and self._threads < self.most:
                try:
                    threading.Thread(target=self._serve, name="orchdata-requests", daemon=True).start()
                    self._threads += 1
                except RuntimeError as error:  # the system has no thread left
                    if not self._threads:
                        reason = f"no thread can be started that makes requests ({error})"
                        raise StorageError("object storage", reason, errno.EAGAIN) from error
            self._changed.notify()
        return pending

    def wait(self, pending: Pending[T]) -> T:
        """Return the result of a request. Raises its error, and StorageError where no client works."""
        started = time.monotonic()
        with waits.for_storage():
            while not pending.done():
                with suppress(TimeoutError):
                    pending.exception(min(1.0, FORKED_SECONDS))
                here().check()
                if self._is_forked and not self._has_answer and time.monotonic() - started >= FORKED_SECONDS:
                    raise StorageError(pending.request.url, _WHY)
        return pending.result()

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the results of all requests will take which are queued or under way."""
        with self._changed:
            queued = [each() for queue in (self._urgent, self._later) for each in queue]
            return sum(each.request.num_bytes for each in queued if each is not None) + self._running_bytes

    def keep_trying(self, request: Request[T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Make a request; make it again after trouble that may pass.

        Raises:
            StorageError: it failed for a lasting reason, or for too long.
            StaleIndexError: the object is another one than was indexed.
        """
        pause, attempts, num_odd, is_refreshed, until = _FIRST_PAUSE, 1, 0, False, None
        while True:
            try:
                result = request.call()
            except Trouble as raised:
                trouble = raised.with_traceback(None)  # whose frames have the bytes of the answer
                self._has_answer = True  # the client works in this process
            else:
                self._has_answer = True
                return result

            if trouble.kind == "credentials" and not is_refreshed and request.refresh():
                is_refreshed = True
            else:
                now = time.monotonic()
                until = now + request.retry_seconds if until is None else until
                num_odd += trouble.kind == "odd"
                may_pass = trouble.kind == "passing" or (trouble.kind == "odd" and num_odd < _MOST_ODD)
                if not may_pass or now >= until or request.ended() or not is_wanted():
                    raise trouble.as_error(request.url, request.doing, attempts)
                if attempts > 5 and now - self._said >= _SAID_EVERY:
                    self._said = now
                    limit = request.retry_seconds
                    _log.warning("%s: %s; trying again for up to %g s", request.url, trouble.reason, limit)
                time.sleep(min(until - now, pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, _LONGEST_PAUSE)
            attempts += 1
            request.counts.add("again")

    def _serve(self) -> None:
        """Make requests, one after the other; a thread runs this."""
        while True:
            with self._changed:
                self._idle += 1
                while (taken := self._taken()) is None:
                    self._changed.wait()
                self._idle -= 1
                pending, is_late = taken
                request, reference = pending.request, weakref.ref(pending)
                self._running += 1
                self._running_late += is_late
                self._running_bytes += request.num_bytes
            del pending, taken  # others decide how long it is wanted
            self._make(request, reference)
            with self._changed:
                self._running -= 1
                self._running_late -= is_late
                self._running_bytes -= request.num_bytes
                self._changed.notify()

    def _make(self, request: Request[T], reference: weakref.ref[Pending[T]]) -> None:
        """Make a request, and give its result to whoever still holds the object for it."""
        try:
            result = self.keep_trying(request, lambda: reference() is not None)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            if (pending := reference()) is not None:
                pending.set_exception(error)
                del pending  # the error refers to this frame
        else:
            if (pending := reference()) is not None:
                pending.set_result(result)

    def _taken(self) -> tuple[Pending[Any], bool] | None:
        """Return the next request, and whether it is one of those after all others; None if none may begin now.

        These have half of the requests in flight at most: they are large, and an urgent one would wait for their end.
        """
        for queue, may_begin in ((self._urgent, True), (self._later, self._running_late < max(1, self.most // 2))):
            while queue and may_begin and self._running < self.most:
                if (pending := queue[0]()) is None:  # no one wants it
                    queue.popleft()
                    continue
                try:
                    left = room() if self._running else None
                except (OSError, MemoryError):  # no file or memory is left to look: as if there were no room
                    return None
                if left is not None and left.left_bytes < needed_bytes(self._running_bytes + pending.request.num_bytes):
                    return None
                queue.popleft()
                return pending, queue is self._later
        return None


def needed_bytes(num_bytes: int) -> int:
    """Return the memory that is needed to read this number of bytes."""
    return _COPIES * num_bytes + _CLIENT_BYTES


HERE = Requests()


def _in_child() -> None:
    """A forked process has none of the threads."""
    global HERE
    HERE = Requests(HERE)


os.register_at_fork(after_in_child=_in_child)
