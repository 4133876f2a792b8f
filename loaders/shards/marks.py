"""Marks: 8 bytes that tell whether a member of a tar is the one that was indexed, in another place of the same data.

A mark is of the 512 bytes of the header in front of a content, and of the first 512 bytes of the content. A scan of a
tar has both in memory. A sample of a tar that no one has compared is read with that header, and its mark is compared.

    Proof (offset, size, mark) --with_proof--> what to read --proven--> contents, or the mark differs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.shards.fields import RAW
from orchdata.native.scan.marks import MARKED_BYTES, NO_MARK, mark_members

Bytes = bytes | memoryview
Spec = tuple[int, int, int, str]
"""(offset, size, encoding, field), as of `Shard.read_many`."""

MARK_BYTES: Final = 8
_STEPS: Final = np.arange(1, 2 * MARKED_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Proof(NamedTuple):
    """The member by which a sample is recognized: the place of its content, and its mark."""

    offset: int
    size: int
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


def with_proof(members: Sequence[Spec], proof: Proof) -> list[Spec]:
    """Return what to read in place of members, so that `proven` can compare the mark: a header more, in one range."""
    whole = _position(members, proof)
    if whole is None:
        return [*members, (proof.offset - MARKED_BYTES, MARKED_BYTES + min(proof.size, MARKED_BYTES), RAW, "*")]
    offset, size, encoding, field = members[whole]
    wider = offset - MARKED_BYTES, size + MARKED_BYTES, encoding, field
    return [*members[:whole], wider, *members[whole + 1 :]]


def proven(members: Sequence[Spec], proof: Proof, contents: Sequence[Bytes]) -> list[Bytes] | None:
    """Return the contents of members, read as `with_proof` says; None if the mark of the proof differs."""
    whole = _position(members, proof)
    marked = contents[-1 if whole is None else whole]
    if mark_of(marked) != proof.mark:
        return None
    if whole is None:
        return list(contents[:-1])
    return [*contents[:whole], memoryview(marked)[MARKED_BYTES:], *contents[whole + 1 :]]


def _position(members: Sequence[Spec], proof: Proof) -> int | None:
    """Return which of the members is the one of the proof and is read as it is stored; None if none is."""
    wanted = proof.offset, proof.size, RAW
    return next((at for at, member in enumerate(members) if member[:3] == wanted), None)


__all__ = ["MARKED_BYTES", "MARK_BYTES", "NO_MARK", "Proof", "mark_of", "marks_in", "proven", "with_proof"]
