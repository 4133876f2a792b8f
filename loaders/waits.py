"""Which threads wait for storage: a supervisor must not blame the sample that they are loading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_here = threading.local()


def report_to(note: Callable[[bool], None]) -> None:
    """Call `note(True)` when this thread begins to wait for storage, and `note(False)` when it no longer does."""
    _here.note = note


@contextmanager
def for_storage() -> Iterator[None]:
    """The thread waits for storage in this block."""
    note = getattr(_here, "note", None)
    if note is None:
        yield
        return
    note(True)
    try:
        yield
    finally:
        note(False)
