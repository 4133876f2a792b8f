"""Sealed files: changed content is never returned."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchdata.loaders.storage import sealed
from orchdata.loaders.storage.atomic import replaced, write_at, write_whole
from orchdata.loaders.storage.sealed import (
    BLOCK_BYTES,
    Damaged,
    body_start,
    finish,
    head_of,
    opened,
    read_sealed,
    seal,
    verify_body,
)

KIND = b"test"
VALUES = {"name": "ä", "numbers": [1, 2, 3]}


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Alter each byte in two ways, cut at each length, write zeros at each offset, and append bytes."""
    for offset in range(len(content)):
        for mask in (1, 0xFF):
            yield f"byte {offset} ^ {mask}", content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :]
        yield f"cut to {offset}", content[:offset]
        zeros = content[:offset] + bytes(16) + content[offset + 16 :]
        if zeros[: len(content)] != content:
            yield f"zeros at {offset}", zeros[: len(content)]
    yield "longer", content + b"\0"


def test_head_and_body_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content, digest = seal(KIND, 3, VALUES, [b"some ", memoryview(b"bytes")])
    write_whole(path, content)
    head, body = read_sealed(path, KIND, 3)
    assert (head.values, bytes(body), head.digest) == (VALUES, b"some bytes", digest)
    assert head.start == body_start(VALUES, 10) and head.start % 8 == 0
    assert seal(KIND, 3, VALUES, [b"some bytez"])[1] != digest
    empty, _ = seal(KIND, 3, {}, [])
    write_whole(path, empty)
    assert bytes(read_sealed(path, KIND, 3)[1]) == b""


def test_no_damage_is_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content, _ = seal(KIND, 3, VALUES, [b"some bytes"])
    tried = 0
    for what, damaged in damages(content):
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            pytest.fail(f"{what}: {read_sealed(path, KIND, 3)}")
        tried += 1
    assert tried > 3 * len(content)


@pytest.mark.parametrize("kind, format", [(b"tset", 3), (KIND, 4)])
def test_another_kind_or_format_is_refused(tmp_path: Path, kind: bytes, format: int) -> None:
    write_whole(tmp_path / "x", seal(KIND, 3, VALUES, [b"body"])[0])
    with pytest.raises(Damaged, match=r"it is of kind b'test' and format 3"):
        read_sealed(tmp_path / "x", kind, format)


def test_lengths_that_lie_ask_for_no_memory(tmp_path: Path) -> None:
    fixed = sealed._FIXED.pack(sealed._MAGIC, KIND, 3, 1 << 40, 1 << 40, 1 << 60)
    (tmp_path / "x").write_bytes(fixed + sealed._CRC.pack(zlib.crc32(fixed)))
    with pytest.raises(Damaged, match="it has 44 bytes, and should have"):
        read_sealed(tmp_path / "x", KIND, 3)


def test_a_large_body_is_checked_block_by_block(tmp_path: Path) -> None:
    path, size = tmp_path / "x", 5 * BLOCK_BYTES + 17
    body = os.urandom(size)
    with replaced(path) as fd:
        start = body_start(VALUES, size)
        write_at(fd, body, start)
        assert os.pread(fd, 8, 0) == bytes(8)  # without its magic until it is complete
        finish(fd, KIND, 3, VALUES, start, size)
    assert path.read_bytes() == seal(KIND, 3, VALUES, [body])[0]
    assert bytes(read_sealed(path, KIND, 3)[1]) == body

    with opened(path) as fd:
        head = head_of(fd, KIND, 3)
        verify_body(fd, head)
    for block, offset in ((0, 0), (3, 3 * BLOCK_BYTES + 5), (5, size - 1)):
        content = bytearray(path.read_bytes())
        content[head.start + offset] ^= 64
        (tmp_path / "y").write_bytes(content)
        with opened(tmp_path / "y") as fd, pytest.raises(Damaged, match=f"bytes {head.start + block * BLOCK_BYTES} to"):
            verify_body(fd, head_of(fd, KIND, 3))
        with pytest.raises(Damaged, match="its content is not what was written"):
            read_sealed(tmp_path / "y", KIND, 3)


def test_a_file_cut_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, seal(KIND, 3, VALUES, [os.urandom(2 * BLOCK_BYTES)])[0])
    with opened(path) as fd:
        head = head_of(fd, KIND, 3)
        os.truncate(path, BLOCK_BYTES)
        with pytest.raises(Damaged):
            verify_body(fd, head)
