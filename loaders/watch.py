"""Which samples are at work, and which are not to be: what a process tells whoever watches over it.

A sample that ends its process, or never returns, can only be told by the one next door. So each thread notes the row
it is about to load where the supervisor of the process can read it, and a row that was found to do so is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IDLE = -1

T = TypeVar("T")


_BEYOND = 1 << 63  # no row of an index is


class Watch:
    """Notes of one process.

    Args:
        rows: int64 (num_threads,), where each thread notes its row, IDLE for none; threads beyond are not noted. None
            where nobody looks.

    Attributes:
        blamed: row -> why it is refused.
    """

    def __init__(self, rows: NDArray[np.int64] | None = None) -> None:
        self.blamed: dict[int, str] = {}
        self._rows = rows
        self._places = count()
        self._own = threading.local()

    def begin(self, row: int) -> str | None:
        """This thread is about to load `row`; why it must not, where it is blamed."""
        if self._rows is not None:
            self._note(self._rows, row)
        return self.blamed.get(row) if self.blamed and isinstance(row, int) else None

    def end(self) -> None:
        """The row is done with. Not called where the process is about to be given up with it."""
        if self._rows is not None:
            self._note(self._rows, IDLE)

    def _note(self, rows: NDArray[np.int64], row: int) -> None:
        place = getattr(self._own, "place", None)
        if place is None:
            place = self._own.place = next(self._places)
        if place < len(rows) and isinstance(row, int) and -_BEYOND <= row < _BEYOND:  # samplers give anything
            rows[place] = row

    def load(self, row: int, load: Callable[[int], T], refuse: Callable[[int, str], Exception]) -> T:
        """`load(row)`, noted; where the row is blamed, what `refuse` makes of the reason is raised."""
        if self._rows is None and not self.blamed:
            return load(row)
        blamed = self.begin(row)
        if blamed is not None:
            self.end()
            raise refuse(row, blamed)
        try:
            loaded = load(row)
        except MemoryError:  # which may end this process
            raise
        except BaseException:
            self.end()
            raise
        self.end()
        return loaded
