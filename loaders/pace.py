"""As many threads at work as go fastest together.

Threads that wait for storage should be many. Where storage is fast (the page cache) the same threads hinder one
another: each of their short system calls hands the interpreter's lock over, and two take twice the time of one. Which
it is shows in how much gets done, so that is what is looked at, while it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_WINDOW_SECONDS: Final = 0.15  # A rate is that of so long,
_WINDOW_JOBS: Final = 4  # ... and of so many jobs of each thread.
_GAIN: Final = 1.1  # More threads must be faster by so much; fewer need only be as fast.
_REST_SECONDS: Final = 15.0  # After neither more nor fewer were faster; storage may change meanwhile.
_SHORT_SECONDS: Final = 1.0  # Whoever takes longer waits, or has large jobs: he is not counted.


class Pace:
    """Finds by trial how many of `most` threads get most done: it halves or doubles them while that is faster.

    Attributes:
        at_work: how many may be at work now.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self.at_work = self._best = most
        self._best_rate = 0.0
        self._rest_until = now
        self._downwards = True
        self._settling = 0
        self._open(now)

    def done(self, amount: float, now: float) -> None:
        """A job of so much is done; times in seconds."""
        if self._settling:  # jobs that began before the last change
            self._settling -= 1
            if not self._settling:
                self._open(now)
            return
        self._amount += amount
        self._jobs += 1
        seconds = now - self._since
        if seconds >= _WINDOW_SECONDS and self._jobs >= _WINDOW_JOBS * self.at_work:
            self._judge(self._amount / seconds, now)
            self._open(now)

    def _open(self, now: float) -> None:
        self._since, self._amount, self._jobs = now, 0.0, 0

    def _judge(self, rate: float, now: float) -> None:
        if self.at_work == self._best:
            self._best_rate = rate
            if now >= self._rest_until:
                self._try_next(now)
        elif rate > self._best_rate * (1 if self._downwards else _GAIN):
            self._best, self._best_rate = self.at_work, rate
            self._try_next(now)
        else:
            self._change(self._best)
            self._turn_around(now)

    def _try_next(self, now: float) -> None:
        """Half as many as are best, or twice as many."""
        tried = max(1, self._best // 2) if self._downwards else min(self._most, 2 * self._best)
        if tried == self._best:  # there are no fewer, or no more
            self._turn_around(now)
        else:
            self._change(tried)

    def _turn_around(self, now: float) -> None:
        """Fewer were tried, and more are next, or the other way about; then rest."""
        self._rest_until = now if self._downwards and self._best < self._most else now + _REST_SECONDS
        self._downwards = not self._downwards

    def _change(self, count: int) -> None:
        self._settling = max(self.at_work, count)
        self.at_work = count


class Turns:
    """Lets as many threads into its block at once as `Pace` says; those inside for long are not counted.

    Attributes:
        ended: nobody is to begin anything any more.
    """

    def __init__(self, most: int) -> None:
        self.ended = False
        self._pace = Pace(most, time.monotonic())
        self._begun: dict[int, float] = {}  # by thread: when its turn began
        self._is_alone = False
        self._changed = threading.Condition()

    @contextmanager
    def turn(self) -> Iterator[Callable[[float], None]]:
        """Wait until it is this thread's turn; tell what is given how much was done."""
        self._enter()
        amounts: list[float] = []
        try:
            yield amounts.append
        finally:
            with self._changed:
                del self._begun[threading.get_ident()]
                if amounts:
                    self._pace.done(sum(amounts), time.monotonic())
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no thread has a turn, and let none begin one meanwhile."""
        with self._changed:
            while self._is_alone and not self.ended:
                self._changed.wait()
            self._is_alone = True
            while self._begun and not self.ended:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            while not self.ended:
                if self._is_alone:
                    self._changed.wait()
                    continue
                now = time.monotonic()
                counted = [begun for begun in self._begun.values() if now - begun < _SHORT_SECONDS]
                if len(counted) < self._pace.at_work:
                    break
                self._changed.wait(min(counted) + _SHORT_SECONDS - now)
            self._begun[threading.get_ident()] = time.monotonic()

    def end(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()
