"""Logs a warning with shard and key for samples that take long while shards are indexed.

    indexing thread --notes its sample--> ThreadProgress <--looks once a second-- watcher --after 30 s--> log

There is no other effect. The work for a sample is limited by counts (`Limits`, `text.jinja.Work`), so that every
machine gives the same result; time never decides. Time in which a thread waits for storage, or for its turn with a
tokenizer, does not count: the watcher sees that in the thread's stack.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final
from weakref import WeakValueDictionary

AFTER_SECONDS: Final = 30.0
SCANNING: Final = 0.25
"""The part of the work for a shard that is scanning it; the rest is measuring its samples. For short texts it is a
fifth, for records that name images more than half."""
_LOOK_SECONDS: Final = 1.0
_WAITING: Final = (
    "orchdata.loaders.storage.",
    "orchdata.loaders.locks",
    "orchdata.loaders.shards.jsonl.media_files",
    "orchdata.loaders.shards.parquet.framing",
)
"""Modules whose functions wait for storage, or for another thread."""

Report = Callable[[str, object, float], None]
"""Called with the shard, the key of the sample, and the seconds that it has taken so far."""

_logger = logging.getLogger("orchdata")


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


def log(shard: str, key: object, seconds: float) -> None:
    """Warn that a sample takes long."""
    _logger.warning(
        "%s: sample %r has taken %.0f s so far, without waiting for storage. Indexing continues: no sample "
        "fails because of the time it takes. If it takes too long, leave it out of the data",
        shard,
        key,
        seconds,
    )


class Watcher:
    """Looks at all threads, and reports each slow sample once."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._seen: dict[int, tuple[object, float]] = {}  # thread -> its sample, and the seconds so far

    def look(self, seconds: float) -> None:
        """Look at all threads, `seconds` after the last time."""
        frames = sys._current_frames()
        seen: dict[int, tuple[object, float]] = {}
        for thread, progress in list(_threads.items()):
            key = progress.key
            if key is None:
                continue
            known, before = self._seen.get(thread, (None, 0.0))
            if known is not key:
                before = 0.0
            taken = before + (seconds if known is key and not _is_waiting(frames.get(thread)) else 0.0)
            if before < AFTER_SECONDS <= taken:
                self._report(progress.shard, key, taken)
            seen[thread] = key, taken
        self._seen = seen


def _is_waiting(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_WAITING):
            return True
        frame = frame.f_back
    return False


class _Watch:
    """The watcher's thread. It runs while there are users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ended = threading.Event()
        self._thread = threading.current_thread()

    def enter(self, report: Report) -> None:
        with self._lock:
            if not self._users:
                self._ended = threading.Event()
                what = Watcher(report), self._ended
                self._thread = threading.Thread(target=_run, args=what, name="orchdata-slow", daemon=True)
                self._thread.start()
            self._users += 1

    def leave(self) -> None:
        """The last user waits until the thread has ended."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._ended.set()
                self._thread.join()


def _run(watcher: Watcher, ended: threading.Event) -> None:
    last = time.monotonic()
    while not ended.wait(_LOOK_SECONDS):
        now = time.monotonic()
        watcher.look(min(now - last, 2 * _LOOK_SECONDS))  # a stopped process was not working
        last = now


_watch = _Watch()


@contextmanager
def watching(report: Report = log) -> Iterator[None]:
    """Report slow samples during the block. Blocks may overlap: the first block's `report` is used for all."""
    _watch.enter(report)
    try:
        yield
    finally:
        _watch.leave()


def _forget() -> None:
    """In a fork: the watcher's thread and the samples are the parent's."""
    global _watch
    _watch = _Watch()
    for progress in list(_threads.values()):
        progress.key = None


os.register_at_fork(after_in_child=_forget)
