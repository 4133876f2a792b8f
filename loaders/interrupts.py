"""Ctrl-C that comes where nobody would hear of it is kept for a moment later.

Python raises KeyboardInterrupt in the main thread wherever it is; in a finalizer, or in what the interpreter calls
around a fork, it is written to stderr and forgotten.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_SOON_SECONDS = 0.02


def interrupts_held() -> AbstractContextManager[None]:
    """Ctrl-C in the block counts behind it: for what must not be interrupted, and takes a moment."""
    return _then(lambda previous, came: previous(*came))


def interrupts_later() -> AbstractContextManager[None]:
    """The same in a finalizer, out of which nothing can be raised: it counts as soon as that is over."""
    return _then(_again_soon)


def _again_soon(*_: object) -> None:
    """A signal, as Ctrl-C is: what the main thread waits for by then ends."""
    later = threading.Timer(_SOON_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    later.daemon = True
    later.start()


@contextmanager
def _then(heard: Callable[[Callable[..., Any], tuple[Any, ...]], None]) -> Iterator[None]:
    """Behind the block, where Ctrl-C came in it: `heard(what would have been called, with what)`.

    Nothing is held where nobody of Python's own would hear of it: in another thread, where it is ignored or left to
    the system, and in a subinterpreter.
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
            heard(previous, came[0])
