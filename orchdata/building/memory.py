"""Reused memory for batches: page faults of fresh memory cost more than decoding into it.

A buffer is anonymous memory, allocated as a numpy array. It returns to the pool when the last array or tensor over it
is collected: a caller that keeps a batch keeps its memory, and nothing waits for that.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

_SMALL_BYTES = 1 << 16  # malloc serves these from memory it already has
_MOST_FREE_BYTES = 1 << 30


class Memory(Protocol):
    """The memory of the arrays of batches: a pool, or another allocator."""

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate uninitialised bytes, (num_bytes,). Raises MemoryError."""

    def reserve(self, num_bytes: int) -> None:
        """Prepare to allocate about this number of bytes. Raises MemoryError."""


class _InUse(weakref.ref[NDArray[np.uint8]]):
    """An array in use, and the value that returns when it is collected."""

    __slots__ = ("value",)
    value: Any


class Returns(Generic[T]):
    """Values that return when arrays are collected.

    The callback is no Python function: the collector calls them anywhere, where locks hang and a Ctrl-C is lost.
    """

    def __init__(self) -> None:
        self._out: dict[int, _InUse] = {}
        self._back: deque[_InUse] = deque()

    def __len__(self) -> int:
        """The number of arrays in use."""
        return len(self._out) - len(self._back)

    def expect(self, array: NDArray[np.uint8], value: T) -> None:
        """Return `value` later, when no array or tensor over this one is left."""
        used = _InUse(array, self._back.append)
        used.value = value
        self._out[id(used)] = used

    def take(self) -> Iterator[T]:
        """Yield what has returned since the last call; any thread may call it."""
        while True:
            try:
                used = self._back.popleft()
            except IndexError:
                return
            del self._out[id(used)]
            yield used.value


class BufferPool:
    """Allocates memory, and takes it back when the arrays over it are collected; above `_MOST_FREE_BYTES` of it are
    released at the next allocation.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._returns = Returns[mmap.mmap]()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate uninitialised bytes, (num_bytes,). Raises MemoryError."""
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        self.free_bytes()
        capacity, memory = size_class(num_bytes), None
        sizes = sorted(self._free)
        # The smallest free memory that is large enough, and at most twice as large as needed.
        for size in [size for size in sizes if capacity <= size <= 2 * capacity]:
            with suppress(IndexError):
                memory = self._free[size].pop()
                break
        if memory is None:
            # Release the largest free memory of at least half the size: the new mapping serves its sizes too. Otherwise
            # each size that batches ever had would keep its own memory.
            for size in reversed([size for size in sizes if capacity <= 2 * size < 2 * capacity]):
                with suppress(IndexError):
                    self._free[size].pop()
                    break
            try:
                memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, ValueError, OverflowError) as error:  # ENOMEM, or above the address space
                raise MemoryError(f"cannot map {capacity} bytes: {error}") from error
            with suppress(OSError):  # a kernel without them
                memory.madvise(
                    mmap.MADV_HUGEPAGE
                )  # a quarter of the time to write 20 MiB first, and less each time after
        base = np.frombuffer(memory, np.uint8)
        self._returns.expect(base, memory)
        return base[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Do nothing: each piece is mapped separately."""

    def free_bytes(self) -> int:
        """Take back what has returned, and return the bytes of unused memory."""
        for memory in self._returns.take():
            if self._num_free + len(memory) <= _MOST_FREE_BYTES:
                self._free.setdefault(len(memory), deque()).append(memory)
        return self._num_free

    @property
    def _num_free(self) -> int:
        return sum(capacity * len(memories) for capacity, memories in list(self._free.items()))


def size_class(num_bytes: int) -> int:
    """Round up to one of four sizes per power of two, so that batches of similar size share memory."""
    step = 1 << max(12, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
