"""Reused memory for batches: page faults of fresh memory cost more than decoding into it.

A buffer is anonymous memory lent as a numpy array. When the last array or tensor over it is collected the memory
returns to the pool by itself, so a caller who keeps a batch keeps its memory and nothing waits for him.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

T = TypeVar("T")

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


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """An array that is out, and what comes back when it is collected."""

    __slots__ = ("held",)
    held: Any


class Returns(Generic[T]):
    """What comes back when arrays are collected.

    It is noted without a function of Python's: collecting calls one wherever it pleases, where a lock would hang and a
    Ctrl-C would be forgotten.
    """

    def __init__(self) -> None:
        self._out: dict[int, _Lent] = {}
        self._back: deque[_Lent] = deque()

    def __len__(self) -> int:
        """How many arrays are out."""
        return len(self._out) - len(self._back)

    def expect(self, array: NDArray[np.uint8], held: T) -> None:
        """Have `held` come back once no array or tensor over this one is left."""
        lent = _Lent(array, self._back.append)
        lent.held = held
        self._out[id(lent)] = lent

    def take(self) -> Iterator[T]:
        """What has come back since; for any thread."""
        while True:
            try:
                lent = self._back.popleft()
            except IndexError:
                return
            del self._out[id(lent)]
            yield lent.held


class BufferPool:
    """Lends memory and takes it back when the arrays over it are collected.

    Args:
        max_free_bytes: most memory to hold that nobody uses; what has returned above it is released when memory is
            next asked for.
    """

    def __init__(self, max_free_bytes: int = 1 << 30) -> None:
        self._max_free_bytes = max_free_bytes
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._returns = Returns[mmap.mmap]()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of `shape` whose contents are undefined. Raises MemoryError."""
        kind = np.dtype(dtype)
        return self.take(prod(shape) * kind.itemsize).view(kind).reshape(shape)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes whose contents are undefined, (num_bytes,). Raises MemoryError."""
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        self._take_returned()
        capacity = size_class(num_bytes)
        memory = self._reused(capacity) or _map(capacity)
        base = np.frombuffer(memory, np.uint8)
        self._returns.expect(base, memory)
        return base[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Each piece is mapped by itself."""

    def free_bytes(self) -> int:
        """Bytes held and lent to nobody."""
        self._take_returned()
        return self._free_bytes()

    def _free_bytes(self) -> int:
        return sum(capacity * len(memories) for capacity, memories in list(self._free.items()))

    def _take_returned(self) -> None:
        for memory in self._returns.take():
            if self._free_bytes() + len(memory) <= self._max_free_bytes:
                self._free.setdefault(len(memory), deque()).append(memory)

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
