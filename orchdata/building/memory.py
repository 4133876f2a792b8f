"""Reused memory for batches: page faults of fresh memory cost more than decoding into it.

A buffer is anonymous memory lent as a numpy array. When the last array or tensor over it is collected the memory
returns to the pool by itself, so a caller who keeps a batch keeps its memory and nothing waits for him.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL_BYTES = 1 << 16  # malloc serves these from memory it already has


class Memory(Protocol):
    """Where the arrays of batches lie: a pool, or any other place that lends bytes."""

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes whose contents are undefined, (num_bytes,). Raises MemoryError."""

    def reserve(self, num_bytes: int) -> None:
        """About so many bytes will be taken. Raises MemoryError."""


class Reservation:
    """Arrays by name, whose sizes are known before there is memory for them."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._arrays[name] = shape, np.dtype(dtype)

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Of each array, in the order they were added."""
        return tuple(prod(shape) * dtype.itemsize for shape, dtype in self._arrays.values())

    def lay(self, memory: Sequence[NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
        """The arrays, each in a piece of memory of its `num_bytes`."""
        pieces = zip(self._arrays.items(), memory, strict=True)
        return {name: piece.view(dtype).reshape(shape) for (name, (shape, dtype)), piece in pieces}


class BufferPool:
    """Lends memory and takes it back when the arrays over it are collected.

    Args:
        max_free_bytes: most memory to hold that nobody uses; what returns above it is released.
    """

    def __init__(self, max_free_bytes: int = 1 << 30) -> None:
        self._max_free_bytes = max_free_bytes
        # Appends and pops of a deque are atomic: a finalizer may run inside `empty` itself, where a lock would hang.
        self._free: dict[int, deque[mmap.mmap]] = {}

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of `shape` whose contents are undefined. Raises MemoryError."""
        kind = np.dtype(dtype)
        return self.take(prod(shape) * kind.itemsize).view(kind).reshape(shape)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes whose contents are undefined, (num_bytes,). Raises MemoryError."""
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        capacity = size_class(num_bytes)
        memory = self._reused(capacity) or _map(capacity)
        base = np.frombuffer(memory, np.uint8)
        weakref.finalize(base, self._give_back, memory).atexit = False
        return base[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Each piece is mapped by itself."""

    def free_bytes(self) -> int:
        """Bytes held and lent to nobody."""
        return sum(capacity * len(memories) for capacity, memories in list(self._free.items()))

    def _reused(self, capacity: int) -> mmap.mmap | None:
        """The smallest free memory that is large enough, and at most twice as large as needed.

        Where there is none, the largest that is too small goes, of at least half the size: what is mapped instead
        serves its sizes too. Else each size that batches ever had would keep memory of its own.
        """
        sizes = sorted(self._free)
        for size in [size for size in sizes if capacity <= size <= 2 * capacity]:
            with suppress(IndexError):
                return self._free[size].pop()
        for size in reversed([size for size in sizes if capacity <= 2 * size < 2 * capacity]):
            with suppress(IndexError):
                self._free[size].pop()
                break
        return None

    def _give_back(self, memory: mmap.mmap) -> None:
        if self.free_bytes() + len(memory) <= self._max_free_bytes:
            self._free.setdefault(len(memory), deque()).append(memory)


def _map(capacity: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:  # ENOMEM; more than an address holds
        raise MemoryError(f"cannot map {capacity} bytes: {error}") from error
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # a quarter of the time to write 20 MiB first, and less each time after
    return memory


def size_class(num_bytes: int) -> int:
    """The next of four steps per power of two, so that batches of similar size share memory."""
    step = 1 << max(12, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
