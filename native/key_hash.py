"""Keys -> 64-bit hashes: the same on every machine, for any neighbours in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

_PRIME, _START = np.uint64(0x100000001B3), np.uint64(0xCBF29CE484222325)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)


@kernel
def finished(value: np.uint64) -> np.uint64:
    """Mix 64 bits, as splitmix64 finishes."""
    value = (value ^ (value >> _SHIFT_A)) * _MIX_A
    value = (value ^ (value >> _SHIFT_B)) * _MIX_B
    return value ^ (value >> _SHIFT_C)


@kernel
def hash_keys(offsets: NDArray[np.int64], data: NDArray[np.uint8], seed: np.uint64, out: NDArray[np.uint64]) -> None:
    """Write FNV-1a of each string, with the seed mixed into the start and the finish of splitmix64.

    Args:
        offsets: int64 (n + 1,), the start of each in `data`, and the end of the last.
        data: uint8, their bytes.
        seed: another seed gives other hashes.
        out: uint64 (n,), written.
    """
    start = finished(_START ^ seed)
    for i in range(out.size):
        value = start
        for at in range(offsets[i], offsets[i + 1]):
            value = (value ^ np.uint64(data[at])) * _PRIME
        out[i] = finished(value)
