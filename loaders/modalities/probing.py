"""Headers of members: by a scan of their first bytes where they are plain, else by a probe of the whole member.

A prefix gives decoders silently wrong lengths, so that whatever a scan leaves is read in full.
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
"""What is read of a member before it is read in full."""


def read_header(kind: type[Modality], size: int, read: Callable[[int], bytes], limits: Limits) -> Header:
    """The header of one member.

    Args:
        kind: what it is.
        size: bytes in the member.
        read: gives the first n bytes of the member.
        limits: for the probe; what is above them is for `count_header` to say.

    Raises:
        DecodeError: not what its name says, or damaged.
        MemoryError: or there may have been too little memory for the probe.
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
    kind: type[Modality], buffer: NDArray[np.uint8], places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Headers of many members whose first bytes are in a buffer.

    Args:
        buffer: uint8.
        places: int64 (n, 3): where each member's content starts, how many of its bytes are there, and its size.

    Returns:
        facts, int64 (n, num_facts), zeros where nothing was found; and the places where `read_header` has to look.
    """
    facts = np.zeros((len(places), kind.num_facts), np.int64)
    status = np.empty(len(places), np.uint8)
    starts, available, sizes = np.ascontiguousarray(places.T)
    view = buffer.view()
    view.flags.writeable = False  # numba takes writable arrays for another type, and would compile twice
    kind.scan(Heads(view, starts, available, sizes, status, facts))
    rest = np.flatnonzero(status != FOUND)
    facts[rest] = 0
    return facts, rest


def _scan_one(kind: type[Modality], size: int, data: bytes) -> tuple[int, Header]:
    """Status and header of a member that begins with `data`."""
    facts, rest = np.zeros((1, kind.num_facts), np.int64), np.empty(1, np.uint8)
    view: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    one = np.array([0, len(data), size], np.int64)
    kind.scan(Heads(view, one[:1], one[1:2], one[2:], rest, facts))
    return int(rest[0]), tuple(facts[0].tolist())
