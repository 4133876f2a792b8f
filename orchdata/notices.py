"""Warnings that a process issues once, for any number of loaders, and which trainer called this package.

Progress of long work, on stderr: a bar in a terminal, elsewhere lines: after two seconds, and then every half minute.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_warned: set[str] = set()
_OURS = os.path.dirname(__file__) + os.sep
_TRAINERS = frozenset(
    ("accelerate", "composer", "ignite", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
)


def warn_once(subject: str, message: str) -> None:
    """Warn about `subject` once in this process, at the line outside of this package that led here."""
    if subject not in _warned:
        _warned.add(subject)
        warn_user(message)


def warn_user(message: str) -> None:
    """Warn at the line outside of this package that led here."""
    warnings.warn(message, stacklevel=_outside()[1])


def calling_trainer() -> str | None:
    """Return the trainer package that contains the line outside of this package that led here, else None. These
    trainers take `len()` for the number of items.
    """
    caller, _ = _outside()
    package = "" if caller is None else str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return package if package in _TRAINERS else None


def _outside() -> tuple[FrameType | None, int]:
    """Return the frame outside of this package that led here, and its depth; the caller of this has depth 1."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


Advance = Callable[[float, int], None]
_FIRST_LINE_SECONDS, _LINE_SECONDS = 2.0, 30.0


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Yield a callable of (done, total). Nothing is drawn before its first call. If stderr is no terminal, a line is
    written after two seconds, and half a minute after each line.
    """
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    state = random.getstate()
    from rich.console import Console
    from rich.progress import Progress

    random.setstate(state)  # importing rich draws from it
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(title, total=None)

    def advance(done: float, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def in_words(seconds: float) -> str:
    """Return a time for messages: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _lines(title: str) -> Advance:
    due = time.monotonic() + _FIRST_LINE_SECONDS

    def advance(done: float, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + _LINE_SECONDS
            sys.stderr.write(f"{title}: {done:,.1f} of {total:,} ({done / max(1, total):.0%})\n")
            sys.stderr.flush()

    return advance
