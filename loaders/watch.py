"""Which rows threads are loading, and which rows must not be loaded: notes of a process for its supervisor.

A sample that ends its process, or never returns, can only be detected from outside. So each thread notes the row that
it is about to load where the supervisor can read it. Rows that are known to do so are not loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders import waits

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
    """Notes of one process.

    Args:
        rows: int64 (num_threads,), where each thread notes its row, IDLE for none, WAITING while it waits for storage;
            further threads are not noted. None if there is no supervisor.

    Attributes:
        known_bad_rows: row -> why it is not loaded.
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
            waits.report_to(partial(self._waits, row))
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
