"""Marks of tar members: 64 bits of a member's header and of the first bytes of its content."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import inlined, kernel
from orchdata.native.key_hash import finished

NO_MARK = 0
MARKED_BYTES = 512
"""Most bytes of a content that its mark is of; and the bytes of the header before it, which count too."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_NONE, _ONE, _HALF, _LOW = np.uint64(NO_MARK), np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@inlined
def _summand(word: np.uint64, step: np.uint64) -> np.uint64:
    """Multiply the halves of the word plus a number of its position, and add the word: all of its bits count."""
    keyed = word + step
    return (keyed & _LOW) * (keyed >> _HALF) + ((word << _HALF) | (word >> _HALF))


@kernel
def mark_at(words: NDArray[np.uint64], start: int, available: int, size: int) -> np.uint64:
    """Return the mark of a member: a sum over words of 8 bytes, which differs with their order.

    Args:
        words: a buffer, in words. The header of the member is in front of its content.
        start: position of the content in the buffer, in bytes; a multiple of 8.
        available, size: bytes of the content that are in the buffer, and all of them; with too few there is NO_MARK.
    """
    count = min(size, MARKED_BYTES)
    if available < count:
        return _NONE
    first, num_words = (start - MARKED_BYTES) // 8, (MARKED_BYTES + count) // 8
    total, piece = np.uint64(0), words[first : first + num_words]
    for at in range(piece.size):
        total += _summand(piece[at], np.uint64(at + 1) * _STEP)
    rest = count % 8
    if rest:
        kept = _ALL >> np.uint64(64 - 8 * rest)
        total += _summand(words[first + num_words] & kept, np.uint64(num_words + 1) * _STEP)
    mark = finished(total + np.uint64(count))
    return mark if mark else _ONE


@kernel
def mark_members(words: NDArray[np.uint64], heads: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Write the mark of each member.

    Args:
        words: as of `mark_at`.
        heads: int64 (n, 3): start, available and size of each.
        out: uint64 (n,), written.
    """
    for i in range(out.size):
        out[i] = mark_at(words, heads[i, 0], heads[i, 1], heads[i, 2])
