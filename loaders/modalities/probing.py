"""Headers of members: from a scan of their first bytes if they are plain, else from a probe of the whole member.

From a prefix, decoders return wrong lengths silently, so a member that the scan cannot handle is read in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import pass_shortage
from orchdata.loaders.modalities.modality import Header, Heads, Modality
from orchdata.native.scan.status import FOUND, MORE

HEAD_BYTES: Final = 1 << 16
"""Number of bytes that are read before a member is read in full."""


def read_header(kind: type[Modality], size: int, read: Callable[[int], bytes], limits: Limits) -> Header:
    """Return the header of one member.

    Args:
        kind: its modality.
        size: bytes in the member.
        read: returns the first n bytes of the member.
        limits: for the probe; `count_header` checks the header against them.

    Raises:
        DecodeError: another format than its name says, or damaged.
        MemoryError: there may have been too little memory for the probe.
    """
    if size == 0:
        raise DecodeError("empty: 0 bytes")
    data = read(min(size, HEAD_BYTES))
    status, header = _scan_one(kind, size, data)
    if status == FOUND:
        return header
    if len(data) < size:
        data = read(size)
        if status == MORE:
            status, header = _scan_one(kind, size, data)
            if status == FOUND:
                return header
    if len(data) < size:
        raise DecodeError(f"cut: {len(data)} of {size} bytes")
    try:
        return kind.probe(data, limits)
    except Exception as error:
        pass_shortage(error)
        raise


def scan_heads(
    kind: type[Modality], buffer: NDArray[np.uint8], ranges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Scan headers of many members with their first bytes in a buffer.

    Args:
        buffer: uint8.
        ranges: int64 (n, 3): start of each member's content, number of its bytes there, and its full size.

    Returns:
        facts, int64 (n, num_facts), zeros where the scan failed; and the indices of those, for `read_header`.
    """
    facts = np.zeros((len(ranges), kind.num_facts), np.int64)
    status = np.empty(len(ranges), np.uint8)
    starts, available, sizes = np.ascontiguousarray(ranges.T)
    view = buffer.view()
    view.flags.writeable = False  # for numba, writable arrays are another type, and it would compile twice
    kind.scan(Heads(view, starts, available, sizes, status, facts))
    rest = np.flatnonzero(status != FOUND)
    facts[rest] = 0
    return facts, rest


def _scan_one(kind: type[Modality], size: int, data: bytes) -> tuple[int, Header]:
    """Return status and header of a member that begins with `data`."""
    facts, rest = np.zeros((1, kind.num_facts), np.int64), np.empty(1, np.uint8)
    view: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    one = np.array([0, len(data), size], np.int64)
    kind.scan(Heads(view, one[:1], one[1:2], one[2:], rest, facts))
    return int(rest[0]), tuple(facts[0].tolist())
