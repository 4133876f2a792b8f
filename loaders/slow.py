"""Samples that take long while shards are indexed: a line in the log names the shard and the sample.

    thread that indexes --notes what it is at--> Place <--looks once a second-- watcher --after 30 s--> log

Nothing else comes of it. How much work a sample may be is counted (`Limits`, `text.jinja.Work`), so that every machine
gives the same verdict; time never makes one. Seconds in which a thread waits for storage, or for its turn with a
tokenizer, do not count: its stack tells, when it is looked at.
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
_LOOK_SECONDS: Final = 1.0
_WAITING: Final = (
    "orchdata.loaders.storage.",
    "orchdata.loaders.locks",
    "orchdata.loaders.shards.jsonl.media_files",
    "orchdata.loaders.shards.parquet.framing",
)
"""Modules whose functions wait for storage, or for another thread."""

Tell = Callable[[str, object, float], None]
"""Is given the shard, the key of the sample, and the seconds that it has taken so far."""

_logger = logging.getLogger("orchdata")


class Place:
    """What a thread is at.

    Attributes:
        shard: its path.
        key: of the sample; None between samples.
    """

    __slots__ = ("__weakref__", "key", "shard")

    def __init__(self) -> None:
        self.shard = ""
        self.key: object = None

    @contextmanager
    def at(self, shard: str) -> Iterator[None]:
        """In the block the thread is at this shard."""
        before, self.shard = self.shard, shard
        try:
            yield
        finally:
            self.shard, self.key = before, None


class _Here(threading.local):
    def __init__(self) -> None:
        self.place = _places[threading.get_ident()] = Place()


_places: WeakValueDictionary[int, Place] = WeakValueDictionary()
_here = _Here()


def here() -> Place:
    """This thread's place, to note in it what the thread is at."""
    return _here.place


def log(shard: str, key: object, seconds: float) -> None:
    """Say that a sample takes long."""
    _logger.warning(
        "%s: sample %r has taken %.0f s so far, without waiting for storage. It is not given up: how long a sample "
        "takes makes no verdict. If it takes too long, leave it out of the data",
        shard,
        key,
        seconds,
    )


class Watcher:
    """Looks at what threads are at, and tells of each sample once that takes long."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._seen: dict[int, tuple[object, float]] = {}  # of each thread the sample, and how long it has taken

    def look(self, seconds: float) -> None:
        """Look at all threads, so many seconds after the last time."""
        frames = sys._current_frames()
        seen: dict[int, tuple[object, float]] = {}
        for thread, place in list(_places.items()):
            key = place.key
            if key is None:
                continue
            known, before = self._seen.get(thread, (None, 0.0))
            if known is not key:
                before = 0.0
            taken = before + (seconds if known is key and not _is_waiting(frames.get(thread)) else 0.0)
            if before < AFTER_SECONDS <= taken:
                self._tell(place.shard, key, taken)
            seen[thread] = key, taken
        self._seen = seen


def _is_waiting(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_WAITING):
            return True
        frame = frame.f_back
    return False


class _Watch:
    """The thread that looks, while anybody wants it to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ended = threading.Event()
        self._thread = threading.current_thread()

    def enter(self, tell: Tell) -> None:
        with self._lock:
            if not self._users:
                self._ended = threading.Event()
                what = Watcher(tell), self._ended
                self._thread = threading.Thread(target=_run, args=what, name="orchdata-slow", daemon=True)
                self._thread.start()
            self._users += 1

    def leave(self) -> None:
        """The last one to leave waits until the thread has ended."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._ended.set()
                self._thread.join()


def _run(watcher: Watcher, ended: threading.Event) -> None:
    last = time.monotonic()
    while not ended.wait(_LOOK_SECONDS):
        now = time.monotonic()
        watcher.look(min(now - last, 2 * _LOOK_SECONDS))  # a process that was stopped was not at work
        last = now


_watch = _Watch()


@contextmanager
def watching(tell: Tell = log) -> Iterator[None]:
    """In the block, samples that take long are told of. Blocks may overlap: all are told in the way of the first."""
    _watch.enter(tell)
    try:
        yield
    finally:
        _watch.leave()


def _forget() -> None:
    """In a fork: the thread that looks is the parent's, and so is what was at work."""
    global _watch
    _watch = _Watch()
    for place in list(_places.values()):
        place.key = None


os.register_at_fork(after_in_child=_forget)
