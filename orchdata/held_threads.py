"""Threads that are outside Python when the interpreter goes: held where they are, as Python 3.14 holds them.

An earlier Python ends a thread that comes back for the interpreter's lock. Through frames of C++, which torch has in
every call that gives the lock away, that is "terminate called without an active exception": an abort in place of the
status that the process ends with.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable

_LOOK_SECONDS = 0.02  # in which a thread that runs Python comes to another instruction

_given_up: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def hold(threads: Iterable[threading.Thread]) -> None:
    """Let threads go no further: they are in calls that nobody waits for any more, and the process is about to end.

    Each gets a signal whose handler does not return. One that still runs Python does not, for it could take the
    interpreter's lock with it. Nothing is held where the system has no signal left for that.
    """
    alive = [thread.ident for thread in threads if thread.is_alive() and thread.ident is not None]
    if not alive:
        return
    before = _places()
    time.sleep(_LOOK_SECONDS)
    now = _places()
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
        for ident in alive:
            if ident in now and now[ident] == before.get(ident):
                signal.pthread_kill(ident, signal.SIGRTMAX)


def _places() -> dict[int, tuple[int, int]]:
    """Which instruction each thread is at."""
    return {ident: (id(frame), frame.f_lasti) for ident, frame in sys._current_frames().items()}


def hold_at_end(thread: threading.Thread) -> None:
    """Hold it once the interpreter goes, if it has not ended by then."""
    _given_up.add(thread)


@atexit.register
def _hold_at_end() -> None:
    hold(list(_given_up))
