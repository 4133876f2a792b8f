"""Marks of tar members: the kernel and its twin agree, and every bit counts."""

from __future__ import annotations

import numpy as np
import pytest

from orchdata.loaders.shards.marks import MARKED_BYTES, NO_MARK, mark_of, marks_in

RNG = np.random.default_rng(0)


def kernel_mark(data: bytes, size: int, available: int | None = None) -> int:
    """The mark of a member with this header and content, in a buffer with other bytes around it."""
    padded = np.frombuffer(b"\xff" * 512 + data + b"\xee" * (64 - len(data) % 8), np.uint8)
    there = len(data) - MARKED_BYTES if available is None else available
    return int(marks_in(padded, np.array([[512 + MARKED_BYTES, there, size]], np.int64))[0])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 511, 512, 513, 5000])
def test_kernel_and_twin_agree(size: int) -> None:
    data = RNG.bytes(MARKED_BYTES + size)
    assert kernel_mark(data, size) == mark_of(data) == mark_of(data[: 2 * MARKED_BYTES]) != NO_MARK


def test_every_byte_of_header_and_first_bytes_counts() -> None:
    data = bytearray(RNG.bytes(MARKED_BYTES + 300))
    marks = {mark_of(bytes(data))}
    for at in range(len(data)):
        for change in (1, 128):
            data[at] ^= change
            marks.add(mark_of(bytes(data)))
            data[at] ^= change
    assert len(marks) == 1 + 2 * len(data)


def test_bytes_after_the_first_do_not_count() -> None:
    data = RNG.bytes(MARKED_BYTES + 600)
    assert mark_of(data) == mark_of(data[:-1] + b"?")
    assert mark_of(data) != mark_of(data[:1000] + b"?" + data[1001:])


def test_order_and_length_count() -> None:
    header = bytes(MARKED_BYTES)
    assert len({mark_of(header + bytes(count)) for count in range(20)}) == 20
    first, second = RNG.bytes(8), RNG.bytes(8)
    assert mark_of(header + first + second) != mark_of(header + second + first)


def test_a_content_that_is_not_there_has_no_mark() -> None:
    assert kernel_mark(RNG.bytes(MARKED_BYTES + 300), 300, available=299) == NO_MARK
