"""Sealed files: a JSON head and a body of bytes, with checksums over every byte of both.

    magic, kind, format, lengths, crc32 of the head | head: JSON, crc32 of each MiB of the body | body

Nobody parses what does not fit its checksum: a file that was cut, zeroed, altered in any byte, or written in another
format is `Damaged`, and whoever kept it makes it again. A crash can therefore leave nothing that is believed, so files
that are cheap to make again are not synced.

crc32 finds every change within 32 neighbouring bits, and any other but one in 4 billion. Measured against blake2b,
sha256 and adler32, it is the fastest of the standard library, and it runs without the interpreter's lock.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from orchdata.loaders.storage.atomic import Buffer, write_at
from orchdata.loaders.storage.shared.files import opened

BLOCK_BYTES = 1 << 20
ALIGNMENT = 64
_MAGIC = b"\x89orchdat"
_FIXED = struct.Struct("<8s4sIQQQ")  # magic, kind, format; bytes of the JSON, of the head, of the body
_CRC = struct.Struct("<I")
_PREFIX_BYTES = _FIXED.size + _CRC.size
_READ_BYTES = 16 << 10
"""Read at first: most files of one sample a shard are no longer."""


class Damaged(ValueError):
    """A file that is not what was written, or not of this kind and format; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """The verified head of a sealed file.

    Attributes:
        values: the JSON.
        start, size: where the body is, bytes.
        crcs: crc32 of each block of the body.
        digest: of the head, hex; as the head holds the checksums of the body, of the whole content.
    """

    values: dict[str, Any]
    start: int
    size: int
    crcs: Sequence[int]
    digest: str


def seal(kind: bytes, format: int, values: Mapping[str, Any], body: Sequence[Buffer]) -> tuple[bytes, str]:
    """A whole file, and its digest as in `Head`."""
    joined = b"".join(body)
    head, digest = _head(kind, format, values, len(joined), _crcs_of(joined))
    return head + joined, digest


def body_start(values: Mapping[str, Any], size: int) -> int:
    """Where the body of `size` bytes begins in a file with this head."""
    return len(_head(b"none", 0, values, size, [0] * -(-size // BLOCK_BYTES))[0])


def read_sealed(path: str | Path, kind: bytes, format: int) -> tuple[Head, memoryview]:
    """Head and body of a file, both verified; read, never mapped, so that no change to the file reaches them.

    Raises:
        Damaged: as `head_of`, or the body is not what was written.
        OSError: it cannot be read.
    """
    with opened(path) as fd:
        first = os.pread(fd, _READ_BYTES, 0)
        head = _read_head(fd, kind, format, first)
        body = memoryview(_pread(fd, head.start, head.size, first))
    if len(body) != head.size or _crcs_of(body) != list(head.crcs):
        raise Damaged("its content is not what was written")
    return head, body


def head_of(fd: int, kind: bytes, format: int) -> Head:
    """The verified head of an open file; of the body, only that it is as long as it was.

    Raises:
        Damaged: not a file of this kind and format, cut, or its head is not what was written.
        OSError: it cannot be read.
    """
    return _read_head(fd, kind, format, os.pread(fd, _READ_BYTES, 0))


def verify_body(fd: int, head: Head) -> None:
    """Read and check a large body, a block at a time on all CPUs. Raises Damaged, or OSError."""
    found = _crcs_in(fd, head.start, head.size)
    for number, (is_now, was) in enumerate(zip(found, head.crcs, strict=True)):
        if is_now != was:
            place = head.start + number * BLOCK_BYTES
            raise Damaged(f"bytes {place} to {place + BLOCK_BYTES} are not what was written")


def finish(fd: int, kind: bytes, format: int, values: Mapping[str, Any], start: int, size: int) -> None:
    """Seal a file whose body lies at `start`, the `body_start` of its `size`: read it back, and write the head."""
    head, _ = _head(kind, format, values, size, _crcs_in(fd, start, size))
    write_at(fd, head, 0)


def _head(kind: bytes, format: int, values: Mapping[str, Any], size: int, crcs: Sequence[int]) -> tuple[bytes, str]:
    text = json.dumps(values, sort_keys=True).encode()
    checksums = struct.pack(f"<{len(crcs)}I", *crcs)
    # Filled with spaces, which JSON ignores and the checksum covers.
    text += b" " * (-(_PREFIX_BYTES + len(text) + len(checksums)) % ALIGNMENT)
    content = text + checksums
    fixed = _FIXED.pack(_MAGIC, kind, format, len(text), len(content), size)
    head = fixed + _CRC.pack(zlib.crc32(content, zlib.crc32(fixed))) + content
    return head, blake2b(head, digest_size=16).hexdigest()


def _read_head(fd: int, kind: bytes, format: int, first: bytes) -> Head:
    if not first:
        raise Damaged("it is empty")
    if len(first) < _PREFIX_BYTES or first[: len(_MAGIC)] != _MAGIC:
        raise Damaged("it does not begin as such a file does")
    fixed = first[: _FIXED.size]
    _, its_kind, its_format, json_bytes, head_bytes, size = _FIXED.unpack(fixed)
    if (its_kind, its_format) != (kind, format):
        raise Damaged(f"it is of kind {its_kind!r} and format {its_format}, not of {kind!r} and {format}")
    start, there = _PREFIX_BYTES + head_bytes, os.fstat(fd).st_size
    # Before anything is read, so that no more memory is asked for than the file is long.
    if start + size != there:
        raise Damaged(f"it has {there} bytes, and should have {start + size}")
    content = bytes(_pread(fd, _PREFIX_BYTES, head_bytes, first))
    crc = _CRC.unpack_from(first, _FIXED.size)[0]
    blocks = -(-size // BLOCK_BYTES)
    if json_bytes + 4 * blocks != head_bytes or zlib.crc32(content, zlib.crc32(fixed)) != crc:
        raise Damaged("its head is not what was written")
    return Head(
        values=_values(content[:json_bytes]),
        start=start,
        size=size,
        crcs=struct.unpack_from(f"<{blocks}I", content, json_bytes),
        digest=blake2b(first[:_PREFIX_BYTES] + content, digest_size=16).hexdigest(),
    )


def _values(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its head is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Damaged("its head has no fields")
    return values


def _pread(fd: int, offset: int, size: int, first: bytes) -> Buffer:
    """`size` bytes from `offset`, fewer where the file ends; `first` are its first bytes."""
    if offset + size <= len(first):
        return first[offset : offset + size]  # a copy, so that what is kept of it keeps no more
    try:
        data = bytearray(size)
    except MemoryError:  # a file with holes may be longer than any memory
        raise Damaged(f"{size} bytes are to be read at once, and there is no memory for them") from None
    view, got = memoryview(data), 0
    while got < size and (more := os.preadv(fd, [view[got:]], offset + got)):
        got += more
    return view[:got]


def _crcs_of(body: Buffer) -> list[int]:
    if len(body) <= BLOCK_BYTES:
        return [zlib.crc32(body)] if len(body) else []
    view = memoryview(body)
    return [zlib.crc32(view[start : start + BLOCK_BYTES]) for start in range(0, len(body), BLOCK_BYTES)]


def _crcs_in(fd: int, start: int, size: int) -> list[int]:
    """crc32 of each block of a large body. By read and not by mapping: a lost disk is an error, not a signal."""
    blocks = range(start, start + size, BLOCK_BYTES)
    workers = max(1, min(8, os.cpu_count() or 1, len(blocks)))

    def share(number: int) -> list[int]:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        return [zlib.crc32(buffer[: _fill(fd, buffer, at, start + size)]) for at in blocks[number::workers]]

    with ThreadPoolExecutor(workers, thread_name_prefix="orchdata-verify") as pool:
        shares = list(pool.map(share, range(workers)))
    return [shares[number % workers][number // workers] for number in range(len(blocks))]


def _fill(fd: int, buffer: memoryview, offset: int, stop: int) -> int:
    wanted, got = min(len(buffer), stop - offset), 0
    while got < wanted and (more := os.preadv(fd, [buffer[got:wanted]], offset + got)):
        got += more
    return got
