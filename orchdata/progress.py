"""Progress of long work, on stderr: a bar in a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, int], None]
_LINE_SECONDS = 30.0


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Yield a callable of (done, total). Nothing is drawn before its first call. If stderr is not a terminal, a line is
    written when half a minute has passed since the last one.
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


def _lines(title: str) -> Advance:
    last = time.monotonic()

    def advance(done: float, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_SECONDS:
            last = now
            sys.stderr.write(f"{title}: {done:,.1f} of {total:,} ({done / max(1, total):.0%})\n")
            sys.stderr.flush()

    return advance
