"""Marks: 8 bytes that tell whether a member of a tar is the one that was indexed, in another place of the same data.

A mark is of the 512 bytes of the header in front of a content, and of the first 512 bytes of the content. A scan of a
tar has both in memory. The mark of a sample joins those of all members that it uses. A sample of a tar that no one has
compared is read with these headers, and its mark is compared.

    Proof (places, mark) --with_proof--> what to read --proven--> contents, or the mark differs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.shards.fields import RAW
from orchdata.native.scan.marks import MARKED_BYTES, NO_MARK, mark_members

Bytes = bytes | memoryview
Spec = tuple[int, int, int, str]
"""(offset, size, encoding, field), as of `Shard.read_many`."""

MARK_BYTES: Final = 8
JOIN: Final = 0x9E3779B97F4A7C15
"""Odd factor by which the marks of members are joined in their order."""
_STEPS: Final = np.arange(1, 2 * MARKED_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Proof(NamedTuple):
    """The members by which a sample is recognized: places of their contents in the tar, in order, and their mark."""

    pieces: tuple[tuple[int, int], ...]
    mark: int


def marks_in(buffer: NDArray[np.uint8], heads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the marks of members in a buffer, int64 (n,); NO_MARK where their first bytes are not there.

    Args:
        heads: as of `TarBatch`.
    """
    marks = np.empty(len(heads), np.uint64)
    mark_members(buffer[: buffer.size // 8 * 8].view(np.uint64), heads, marks)
    return marks.view(np.int64)


def mark_of(data: Bytes) -> int:
    """Return the mark of one member, without a kernel.

    Args:
        data: its header, and all or the first 512 bytes of its content.
    """
    data = memoryview(data)[: 2 * MARKED_BYTES]
    words = np.frombuffer(bytes(data) + bytes(-len(data) % 8), np.uint64)
    keyed = words + _STEPS[: words.size]
    total = ((keyed & _LOW) * (keyed >> _HALF) + ((words << _HALF) | (words >> _HALF))).sum(keepdims=True)
    total += np.uint64(len(data) - MARKED_BYTES)
    total = (total ^ (total >> np.uint64(30))) * _MIX_A
    total = (total ^ (total >> np.uint64(27))) * _MIX_B
    total ^= total >> np.uint64(31)
    return int(total.view(np.int64)[0]) or 1


def joined_mark(marks: Iterable[int]) -> int:
    """Return the mark of a sample, of those of its members in the order of the tar. All of them must have one."""
    total = 0
    for mark in marks:
        total = (total * JOIN + mark) % (1 << 64)
    return (total - (1 << 64) if total >> 63 else total) or 1


def with_proof(members: Sequence[Spec], proof: Proof) -> list[Spec]:
    """Return what to read in place of members, so that `proven` can compare the mark: each with the header in front of
    it, and the first bytes of those that are not read, or not as they are stored.
    """
    places, wanted = _positions(members, proof), list(members)
    for (offset, size), at in zip(proof.pieces, places, strict=True):
        if at is None:
            wanted.append((offset - MARKED_BYTES, MARKED_BYTES + min(size, MARKED_BYTES), RAW, "*"))
        else:
            _, _, encoding, field = members[at]
            wanted[at] = offset - MARKED_BYTES, size + MARKED_BYTES, encoding, field
    return wanted


def proven(members: Sequence[Spec], proof: Proof, contents: Sequence[Bytes]) -> list[Bytes] | None:
    """Return the contents of members, read as `with_proof` says; None if the mark of the proof differs."""
    places, found = _positions(members, proof), list(contents[: len(members)])
    others, marks = iter(contents[len(members) :]), []
    for at in places:
        marked = next(others) if at is None else contents[at]
        marks.append(mark_of(marked))
        if at is not None:
            found[at] = memoryview(marked)[MARKED_BYTES:]
    return found if joined_mark(marks) == proof.mark else None


def _positions(members: Sequence[Spec], proof: Proof) -> list[int | None]:
    """Return which of the members each piece of a proof is, if it is read as it is stored."""
    read = {member[:3]: at for at, member in reversed(list(enumerate(members)))}
    return [read.get((offset, size, RAW)) for offset, size in proof.pieces]


__all__ = [
    "JOIN",
    "MARKED_BYTES",
    "MARK_BYTES",
    "NO_MARK",
    "Proof",
    "joined_mark",
    "mark_of",
    "marks_in",
    "proven",
    "with_proof",
]
