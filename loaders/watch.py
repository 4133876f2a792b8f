"""What threads are at: notes of the rows that they load, of the shards that they index, and of waits for storage.

A sample that ends its process, or never returns, can only be detected from outside. So each thread notes the row that
it is about to load where the supervisor can read it, and rows that are known to do so are not loaded. A thread that
waits for storage says so: its sample is not to blame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

IDLE = -1
WAITING = -(1 << 63) + 1
"""Noted in place of its row by a thread that waits for storage: the sample is not to blame for that."""

T = TypeVar("T")


def all_wait(rows: Iterable[int]) -> bool:
    """Whether all threads that load a sample wait for storage, which gives up before this process is to blame."""
    noted = set(rows)
    return WAITING in noted and noted <= {IDLE, WAITING}


_BEYOND = 1 << 63  # above any row of an index


class Watch:
    """Notes of one process, with `known_bad_rows`: row -> why it is not loaded.

    In `rows`, int64 (num_threads,), each thread notes its row, IDLE for none, WAITING while it waits for storage;
    further threads are not noted. None if there is no supervisor.
    """

    def __init__(self, rows: NDArray[np.int64] | None = None) -> None:
        self.known_bad_rows: dict[int, str] = {}
        self._rows = rows
        self._slots = count()
        self._own = threading.local()

    def begin(self, row: int) -> str | None:
        """Note that this thread is about to load `row`; return why it must not if the row is known bad."""
        if self._rows is not None:
            self._note(self._rows, row)
            report_to(partial(self._waits, row))
        return self.known_bad_rows.get(row) if self.known_bad_rows and isinstance(row, int) else None

    def end(self) -> None:
        """Note that the row is done. Not called if the process is about to be given up because of it."""
        if self._rows is not None:
            self._note(self._rows, IDLE)

    def _waits(self, row: int, does: bool) -> None:
        if self._rows is not None:
            self._note(self._rows, WAITING if does else row)

    def _note(self, rows: NDArray[np.int64], row: int) -> None:
        slot = getattr(self._own, "slot", None)
        if slot is None:
            slot = self._own.slot = next(self._slots)
        if slot < len(rows) and isinstance(row, int) and -_BEYOND <= row < _BEYOND:  # samplers give anything
            rows[slot] = row

    def load(self, row: int, load: Callable[[int], T], refuse: Callable[[int, str], Exception]) -> T:
        """Note the row and return `load(row)`; if the row is known bad, raise `refuse(row, reason)`."""
        if self._rows is None and not self.known_bad_rows:
            return load(row)
        reason = self.begin(row)
        if reason is not None:
            self.end()
            raise refuse(row, reason)
        try:
            loaded = load(row)
        except MemoryError:  # which may end this process
            raise
        except BaseException:
            self.end()
            raise
        self.end()
        return loaded


SCANNING: Final = 0.25
"""The part of the work for a shard that is scanning it; the rest is measuring its samples. For short texts it is a
fifth, for records that name images more than half."""


class Ended(BaseException):
    """The build has ended, by an error or Ctrl-C: no failure of the sample that the thread was at."""


class ThreadProgress:
    """The sample that a thread is indexing: its shard, and the fraction of the work for it that is done. If `ended()`,
    the thread's next sample raises Ended.
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


_waiting = threading.local()


def report_to(note: Callable[[bool], None]) -> None:
    """Call `note(True)` when this thread begins to wait for storage, and `note(False)` when it no longer does."""
    _waiting.note = note


@contextmanager
def for_storage() -> Iterator[None]:
    """The thread waits for storage in this block."""
    note = getattr(_waiting, "note", None)
    if note is None:
        yield
        return
    note(True)
    try:
        yield
    finally:
        note(False)
