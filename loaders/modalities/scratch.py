"""Scratch memory of a thread, reused from sample to sample: fresh pages cost more than decoding into them."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

# A thread keeps no more than this between samples; what a larger image needs is freed with it.
_KEPT_BYTES = 64 << 20


class Scratch(threading.local):
    """One buffer a thread. What `take` lends is overwritten by the thread's next `take`."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Undefined bytes, (num_bytes,)."""
        if num_bytes > _KEPT_BYTES:
            return np.empty(num_bytes, np.uint8)
        if num_bytes > len(self._buffer):
            # A power of two: images that grow a little do not each bring fresh pages.
            self._buffer = np.empty(max(1 << 20, 1 << (num_bytes - 1).bit_length()), np.uint8)
        return self._buffer[:num_bytes]
