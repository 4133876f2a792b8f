"""Ctrl-C at a moment when the exception would be lost is delivered a moment later.

Python raises KeyboardInterrupt in the main thread at any point. In a finalizer, or in the interpreter's own calls
around a fork, the exception is only written to stderr.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

_SOON_SECONDS = 0.02


def interrupts_deferred() -> AbstractContextManager[None]:
    """Deliver a Ctrl-C of the block after it: for short code that must not be interrupted."""
    return _then(lambda previous, came: previous(*came))


def interrupts_later(finalizer: FrameType) -> AbstractContextManager[None]:
    """The same for a finalizer, which cannot raise: the Ctrl-C is delivered as soon as the finalizer has ended.

    Args:
        finalizer: its frame.
    """
    return _then(lambda *_: threading.Thread(target=_send_after, args=(finalizer,), daemon=True).start())


def _send_after(frame: FrameType) -> None:
    """Send SIGINT again, when the main thread has left a frame. A signal also ends a wait of the main thread."""
    main = threading.main_thread().ident
    assert main is not None
    while _is_in(frame, sys._current_frames().get(main)):
        time.sleep(_SOON_SECONDS)
    signal.pthread_kill(main, signal.SIGINT)


def _is_in(frame: FrameType, innermost: FrameType | None) -> bool:
    while innermost is not None and innermost is not frame:
        innermost = innermost.f_back
    return innermost is not None


@contextmanager
def _then(deliver: Callable[[Callable[..., Any], tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `deliver(previous handler, its arguments)` after the block if Ctrl-C came during it.

    Does nothing where no Python handler would run: in another thread, where SIGINT is ignored or left to the system,
    and in a subinterpreter.
    """
    came: list[tuple[Any, ...]] = []
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            deliver(previous, came[0])
