"""Ctrl-C that comes where nobody would hear of it is kept for a moment later.

Python raises KeyboardInterrupt in the main thread wherever it is; in a finalizer, or in what the interpreter calls
around a fork, it is written to stderr and forgotten.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SOON_SECONDS = 0.02


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C in the block counts behind it: for what must not be interrupted, and takes a moment."""
    came, previous = _held()
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
            if came:
                previous(*came[0])


@contextmanager
def interrupts_later() -> Iterator[None]:
    """The same in a finalizer, out of which nothing can be raised: it counts as soon as that is over."""
    came, previous = _held()
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
            if came:
                # A signal, as Ctrl-C is: what the main thread waits for by then ends.
                main = threading.main_thread().ident
                later = threading.Timer(_SOON_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
                later.daemon = True
                later.start()


def _held() -> tuple[list[tuple[Any, ...]], Callable[..., Any] | None]:
    """What comes from now on, and what would have been called; None where it cannot be held."""
    came: list[tuple[Any, ...]] = []
    if threading.current_thread() is not threading.main_thread():
        return came, None
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, left to the system, or of no Python
        return came, None
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    except ValueError:  # a subinterpreter
        return came, None
    return came, previous
