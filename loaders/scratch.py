"""Memory that a thread works in, reused from sample to sample: fresh pages cost more than what is done with them."""

from __future__ import annotations

import threading
from math import prod

import numpy as np
from numpy.typing import NDArray

# A thread keeps no more than this between samples; what a larger one needs is freed with it.
_KEPT_BYTES = 64 << 20
_LINE_BYTES = 64


class Scratch(threading.local):
    """One buffer a thread. What `take` lends is overwritten by the thread's next `take`."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Undefined bytes, (num_bytes,), that begin where a line of the CPU's cache does, as torch's own do."""
        if num_bytes > _KEPT_BYTES:
            return _aligned(num_bytes)
        if num_bytes > len(self._buffer):
            # A power of two: samples that grow a little do not each bring fresh pages.
            self._buffer = _aligned(max(1 << 20, 1 << (num_bytes - 1).bit_length()))
        return self._buffer[:num_bytes]

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Undefined float32 of `shape`."""
        return self.take(4 * prod(shape)).view(np.float32).reshape(shape)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + _LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % _LINE_BYTES
    return memory[first : first + num_bytes]
