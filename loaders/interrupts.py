"""Ctrl-C at a moment when the exception would be lost, or leave something half done, is delivered a moment later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver a Ctrl-C of the block after it: for short code that must not be interrupted.

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
            previous(*came[0])
