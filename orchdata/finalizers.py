"""What ends with its owner is ended by a thread of ours: a finalizer that the collector runs never waits.

It runs in any thread, between any two instructions: in one that has a lock which the end needs, or in the one that the
end waits for. So it only queues a number here, which takes no lock. `break` waits (see `User`).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from itertools import count

_EXIT_SECONDS = 10.0
_SOON_SECONDS = 0.01

_numbers = count()
_ends: dict[int, Callable[[], object]] = {}
_queued: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may be called during a `put`
_lock = threading.Lock()  # never taken by a finalizer
_thread: threading.Thread | None = None
_of_parents: list[object] = []  # of the parent of this forked process: it ends them


class User:
    """Who uses an iteration, an attribute of it: a finalizer may wait where it is the user's thread that drops it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # The collector clears references with a callback before it finalizes.
        self._reference = weakref.ref(self, lambda _: None)

    def drops_it(self) -> bool:
        return self._reference() is not None and threading.get_ident() == self._thread


class Ending:
    """Has `end` called once its owner is unreachable, or the interpreter exits. `end` must not refer to the owner."""

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        global _thread
        self._number = next(_numbers)
        with _lock:
            _ends[self._number] = end
            if _thread is None:
                _thread = threading.Thread(target=_run, name="orchdata finalizers", daemon=True)
                try:
                    _thread.start()
                except RuntimeError:  # the system has no more threads: the next owner tries again
                    _thread = None
        self._finalizer = weakref.finalize(owner, _queued.put, self._number)
        self._finalizer.atexit = False  # `_end_all` waits

    def soon(self) -> None:
        """Have it called now, in the other thread: for a finalizer."""
        self._finalizer()

    def cancel(self) -> None:
        """Have it never called. The thread ends with the last of them."""
        if self._finalizer.detach() is not None:
            _ends.pop(self._number, None)
            _queued.put(self._number)
            while (thread := _thread) not in (None, threading.current_thread()) and not _ends:
                thread.join(_SOON_SECONDS)


def call_soon(function: Callable[[], object]) -> None:
    """Have a function called in the other thread, which runs while there is an `Ending`."""
    number = next(_numbers)
    _ends[number] = function
    _queued.put(number)


def wait_for_finalizers(seconds: float | None = None) -> None:
    """Wait until all is ended whose owners are gone."""
    done = threading.Event()
    with _lock:
        if _thread is None or threading.current_thread() is _thread:
            return
        call_soon(done.set)
    done.wait(seconds)


def _run() -> None:
    global _thread
    while True:
        _call(_ends.pop(_queued.get(), None))
        with _lock:
            if not _ends and _queued.empty():
                _thread = None
                return


def _call(end: Callable[[], object] | None) -> None:
    try:
        if end is not None:
            end()
    except Exception:
        logging.getLogger("orchdata").exception("what a loader has started could not be ended")


@atexit.register
def _end_all() -> None:
    wait_for_finalizers(_EXIT_SECONDS)
    while _ends:
        _call(_ends.popitem()[1])


def _forget() -> None:
    global _ends, _queued, _lock, _thread
    _of_parents.append(_ends)
    _ends, _queued, _lock, _thread = {}, queue.SimpleQueue(), threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
