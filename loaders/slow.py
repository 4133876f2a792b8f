"""What each thread is indexing: the shard, the sample, and how much of the work for the shard is done.

The work for a sample is limited by counts (`Limits`, `text.jinja.Work`), so that every machine gives the same result;
time never decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

SCANNING: Final = 0.25
"""The part of the work for a shard that is scanning it; the rest is measuring its samples. For short texts it is a
fifth, for records that name images more than half."""


class Ended(BaseException):
    """The build has ended, by an error or Ctrl-C: no failure of the sample that the thread was at."""


class ThreadProgress:
    """The sample that a thread is indexing.

    Attributes:
        shard: path of the shard.
        fraction: of the work for the shard that is done.
        ended: returns whether the build has ended; the next sample of the thread then raises Ended.
    """

    __slots__ = ("__weakref__", "_key", "ended", "fraction", "shard")

    def __init__(self) -> None:
        self.shard = ""
        self.fraction = 0.0
        self.ended: Callable[[], bool] | None = None
        self._key: object = None

    @property
    def key(self) -> object:
        """Key of the sample; None between samples. Setting the next one raises Ended if the build has ended."""
        return self._key

    @key.setter
    def key(self, key: object) -> None:
        if key is not None:
            self.check()
        self._key = key

    def check(self) -> None:
        """Raise Ended if the build has ended."""
        if self.ended is not None and self.ended():
            raise Ended

    @contextmanager
    def at(self, shard: str) -> Iterator[None]:
        """Note that the thread indexes this shard during the block."""
        before, self.shard = self.shard, shard
        self.fraction = 0.0
        try:
            yield
        finally:
            self.shard, self.key, self.fraction = before, None, 0.0


class _Here(threading.local):
    def __init__(self) -> None:
        self.progress = _threads[threading.get_ident()] = ThreadProgress()


_threads: WeakValueDictionary[int, ThreadProgress] = WeakValueDictionary()
_here = _Here()


def here() -> ThreadProgress:
    """Return the notes of this thread."""
    return _here.progress


def shards_under_way() -> float:
    """Return how many shards' work the threads of this process have done for shards that are not complete."""
    return sum(progress.fraction for progress in list(_threads.values()))
