"""A cache of the most recently used values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by name, shared by threads; the least recently used are dropped. Each value is created in one thread only.

    Args:
        room: bytes that all cached values may take. A larger value is not cached.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, name: Hashable) -> Value | None:
        """Return the value if it is cached."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            self._entries.move_to_end(name)
            return entry[0]

    def made(self, name: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """Return the value; if it is not cached, `make` returns it with its size. Exceptions of `make` pass."""
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with making:
            if (cached := self.get(name)) is not None:
                return cached
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
            self._entries[name] = value, size
            taken = sum(each for _, each in self._entries.values())
            while taken > self._room:
                _, (_, dropped) = self._entries.popitem(last=False)
                taken -= dropped
