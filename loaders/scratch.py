"""Working memory of a thread, reused from sample to sample: fresh pages cost more than the work in them."""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from numpy.typing import NDArray

# A thread keeps at most this much between samples; a larger buffer is freed with its sample.
_KEPT_BYTES = 64 << 20
_LINE_BYTES = 64


class Scratch(threading.local):
    """One buffer per thread. The thread's next `take` overwrites the result of the previous one."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialized bytes (num_bytes,), aligned to a cache line of the CPU, as torch's memory is."""
        if num_bytes > _KEPT_BYTES:
            return _aligned(num_bytes)
        if num_bytes > len(self._buffer):
            # A power of two: samples that grow a little do not each allocate fresh pages.
            self._buffer = _aligned(max(1 << 20, 1 << (num_bytes - 1).bit_length()))
        return self._buffer[:num_bytes]

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Return uninitialized float32 of `shape`."""
        return self.take(4 * prod(shape)).view(np.float32).reshape(shape)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + _LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + num_bytes]
