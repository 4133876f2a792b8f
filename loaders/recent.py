"""Values that were made last, kept while there is room: what is made again and again of one thing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by name, shared by threads; the least recently used are let go. It makes each value in one thread only.

    Args:
        room: bytes that the values kept may take together. One that takes more is not kept.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, name: Hashable) -> Value | None:
        """The value, if it is kept."""
        with self._lock:
            found = self._held.get(name)
            if found is None:
                return None
            self._held.move_to_end(name)
            return found[0]

    def made(self, name: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value; where it is not kept, `make` gives it and its bytes. What that raises passes."""
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with making:
            if (found := self.get(name)) is not None:
                return found
            try:
                value, size = make()
                self._keep(name, value, size)
                return value
            finally:
                with self._lock:
                    self._making.pop(name, None)

    def _keep(self, name: Hashable, value: Value, size: int) -> None:
        with self._lock:
            if size > self._room:
                return
            self._held[name] = value, size
            taken = sum(each for _, each in self._held.values())
            while taken > self._room:
                _, (_, let_go) = self._held.popitem(last=False)
                taken -= let_go
