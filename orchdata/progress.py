"""Progress bars for long work, on stderr and only where a person sees them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Yield a callable of (done, total). Nothing is drawn before its first call, or if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    state = random.getstate()
    from rich.console import Console
    from rich.progress import Progress

    random.setstate(state)  # importing rich draws from it
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(title, total=None)

    def advance(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
