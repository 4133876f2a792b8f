"""Reused memory for batches: page faults of fresh memory cost more than decoding into it.

A buffer is anonymous memory lent as a numpy array. When the last array or tensor over it is collected the memory
returns to the pool by itself, so a caller who keeps a batch keeps its memory and nothing waits for him.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL_BYTES = 1 << 16  # malloc serves these from memory it already has


class BufferPool:
    """Lends arrays and takes their memory back when they are collected.

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
        num_bytes = prod(shape) * kind.itemsize
        if num_bytes < _SMALL_BYTES:
            return np.empty(shape, kind)
        capacity = _size_class(num_bytes)
        try:
            memory = self._free.setdefault(capacity, deque()).pop()
        except IndexError:
            memory = _map(capacity)
        base = np.frombuffer(memory, np.uint8)
        weakref.finalize(base, self._give_back, memory).atexit = False
        return base[:num_bytes].view(kind).reshape(shape)

    def free_bytes(self) -> int:
        """Bytes held and lent to nobody."""
        return sum(capacity * len(memories) for capacity, memories in list(self._free.items()))

    def _give_back(self, memory: mmap.mmap) -> None:
        if self.free_bytes() + len(memory) <= self._max_free_bytes:
            self._free[len(memory)].append(memory)


def _map(capacity: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, capacity)
    except (OSError, ValueError, OverflowError) as error:  # ENOMEM; more than an address holds
        raise MemoryError(f"cannot map {capacity} bytes: {error}") from error


def _size_class(num_bytes: int) -> int:
    """The next of four steps per power of two, so that batches of similar size share memory."""
    step = 1 << max(12, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
