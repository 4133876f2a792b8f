"""Threads that are stuck in a call outside Python when the interpreter exits: paused there, as Python 3.14 does.

Earlier versions of Python end a thread that requests the interpreter's lock again. With C++ frames on the stack, as in
every torch call that releases the lock, that is "terminate called without an active exception": the process aborts and
its exit status is lost.
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

_LOOK_SECONDS = 0.02  # in this time a thread that runs Python reaches another instruction

_to_pause: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def pause(threads: Iterable[threading.Thread]) -> None:
    """Stop threads for good: nothing waits for their calls any more, and the process is about to end.

    Each gets a signal with a handler that does not return. A thread that still runs Python gets none, as it could keep
    the interpreter's lock. If the system has no free signal, no thread is paused.
    """
    alive = [thread.ident for thread in threads if thread.is_alive() and thread.ident is not None]
    if not alive:
        return
    before = _instructions()
    time.sleep(_LOOK_SECONDS)
    now = _instructions()
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
        for ident in alive:
            if ident in now and now[ident] == before.get(ident):
                signal.pthread_kill(ident, signal.SIGRTMAX)


def _instructions() -> dict[int, tuple[int, int]]:
    """Return the current instruction of each thread."""
    return {ident: (id(frame), frame.f_lasti) for ident, frame in sys._current_frames().items()}


def pause_at_exit(thread: threading.Thread) -> None:
    """Pause the thread when the interpreter exits, if it has not ended by then."""
    _to_pause.add(thread)


@atexit.register
def _pause_at_exit() -> None:
    pause(list(_to_pause))
