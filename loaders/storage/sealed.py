"""Sealed files: a JSON head and a body of bytes, with checksums over every byte of both.

    magic, kind, format, lengths, crc32 of the head | head: JSON, crc32 of each MiB of the body | body

Nothing is parsed before its checksum is verified: a file that was cut, altered, or written in another format is
`Damaged`, and its owner writes it again. So files that are cheap to write again are not synced. crc32 detects every
change within 32 neighbouring bits, and all but one in 4 billion others, is fast, and runs without the interpreter's
lock. A note says that a large file was verified on this machine since it booted, so that it is read completely only
once: a hidden file in the same folder with path, inode, size, mtime and ctime; its own time is that of the last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from orchdata.loaders.pace import in_threads
from orchdata.loaders.storage.local import (
    Buffer,
    opened,
    read_into_at,
    read_small,
    record_use,
    remove,
    write_at,
    write_once,
)

BLOCK_BYTES = 1 << 20
ALIGNMENT = 64
_MAGIC = b"\x89orchdat"
_FIXED = struct.Struct("<8s4sIQQQ")  # magic, kind, format; bytes of the JSON, of the head, of the body
_CRC = struct.Struct("<I")
_PREFIX_BYTES = _FIXED.size + _CRC.size
_READ_BYTES = 16 << 10
"""Bytes of the first read: most files of a shard with one sample are shorter."""


class Damaged(ValueError):
    """The file has changed since it was written, or has another kind or format; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Head:
    """The verified head of a sealed file: its JSON; where its body is, and the crc32 of each block of it; and a digest
    of the head, and so of the whole content.
    """

    values: dict[str, Any]
    start: int
    size: int
    crcs: Sequence[int]
    digest: str


def seal(kind: bytes, format: int, values: Mapping[str, Any], body: Sequence[Buffer]) -> tuple[bytes, str]:
    """Return the bytes of a whole file, and its digest as in `Head`."""
    joined = b"".join(body)
    head, digest = head_for(kind, format, values, joined)
    return head + joined, digest


def head_for(kind: bytes, format: int, values: Mapping[str, Any], body: bytes) -> tuple[bytes, str]:
    """Return what a file has before its body, and its digest as in `Head`."""
    return _head(kind, format, values, len(body), _crcs_of(body))


def body_start(values: Mapping[str, Any], size: int) -> int:
    """Return the offset of a body of `size` bytes in a file with this head."""
    return len(_head(b"none", 0, values, size, [0] * -(-size // BLOCK_BYTES))[0])


def read_sealed(path: str | Path, kind: bytes, format: int) -> tuple[Head, memoryview]:
    """Return head and body of a file, both verified and read, so that later changes do not reach them; records its use.
    Raises Damaged; OSError if it cannot be read.
    """
    record_use(path)
    with opened(path) as fd:
        head = head_of(fd, kind, format)
        body = _pread(fd, head.start, head.size)
    if len(body) != head.size or _crcs_of(body) != list(head.crcs):
        raise Damaged("its content is not what was written")
    return head, body


def head_of(fd: int, kind: bytes, format: int) -> Head:
    """Return the verified head of an open file; of the body only the length is checked. Raises Damaged: of another kind
    or format, cut, or changed; OSError if it cannot be read.
    """
    return head_by(partial(_pread, fd), os.fstat(fd).st_size, kind, format)


def head_by(read: Callable[[int, int], Buffer], size: int, kind: bytes, format: int) -> Head:
    """Return the verified head of a file of `size` bytes, by a function that returns so many bytes from an offset on.
    Raises as `head_of`, and what reading raises.
    """
    first = bytes(read(0, min(size, _READ_BYTES)))
    if not first:
        raise Damaged("it is empty")
    if len(first) < _PREFIX_BYTES or first[: len(_MAGIC)] != _MAGIC:
        raise Damaged("it does not begin like such a file")
    fixed = first[: _FIXED.size]
    _, its_kind, its_format, json_bytes, head_bytes, body_bytes = _FIXED.unpack(fixed)
    if (its_kind, its_format) != (kind, format):
        raise Damaged(f"it is of kind {its_kind!r} and format {its_format}, not of {kind!r} and {format}")
    start = _PREFIX_BYTES + head_bytes
    # Checked before anything is read, so that no more memory is allocated than the file is long.
    if start + body_bytes != size:
        raise Damaged(f"it has {size} bytes, and should have {start + body_bytes}")
    content = first[_PREFIX_BYTES:start] if start <= len(first) else bytes(read(_PREFIX_BYTES, head_bytes))
    crc = _CRC.unpack_from(first, _FIXED.size)[0]
    blocks = -(-body_bytes // BLOCK_BYTES)
    if json_bytes + 4 * blocks != head_bytes or zlib.crc32(content, zlib.crc32(fixed)) != crc:
        raise Damaged("its head is not what was written")
    try:
        values = json.loads(content[:json_bytes])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its head is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Damaged("its head has no fields")
    crcs = struct.unpack_from(f"<{blocks}I", content, json_bytes)
    digest = blake2b(first[:_PREFIX_BYTES] + content, digest_size=16).hexdigest()
    return Head(values, start, body_bytes, crcs, digest)


def verify_body(fd: int, head: Head) -> None:
    """Read and check a large body, a block at a time on all CPUs. Raises Damaged, or OSError."""
    actual = _crcs_in(fd, head.start, head.size)
    for number, (crc, expected) in enumerate(zip(actual, head.crcs, strict=True)):
        if crc != expected:
            offset = head.start + number * BLOCK_BYTES
            raise Damaged(f"bytes {offset} to {offset + BLOCK_BYTES} are not what was written")


def finish(fd: int, kind: bytes, format: int, values: Mapping[str, Any], start: int, size: int) -> None:
    """Seal a file with a body of `size` bytes at `start`, its `body_start`: read it back, and write the head."""
    head, _ = _head(kind, format, values, size, _crcs_in(fd, start, size))
    write_at(fd, head, 0)


def _head(kind: bytes, format: int, values: Mapping[str, Any], size: int, crcs: Sequence[int]) -> tuple[bytes, str]:
    text = json.dumps(values, sort_keys=True).encode()
    checksums = struct.pack(f"<{len(crcs)}I", *crcs)
    # Padded with spaces, which JSON ignores and the checksum covers.
    text += b" " * (-(_PREFIX_BYTES + len(text) + len(checksums)) % ALIGNMENT)
    content = text + checksums
    fixed = _FIXED.pack(_MAGIC, kind, format, len(text), len(content), size)
    head = fixed + _CRC.pack(zlib.crc32(content, zlib.crc32(fixed))) + content
    return head, blake2b(head, digest_size=16).hexdigest()


def _pread(fd: int, offset: int, size: int) -> memoryview:
    """Read `size` bytes from `offset`, fewer at the end of the file."""
    try:
        view = memoryview(bytearray(size))
    except MemoryError:  # a sparse file may be longer than the memory
        raise Damaged(f"{size} bytes are to be read together, and there is no memory for them") from None
    return view[: read_into_at(fd, offset, view)]


def _crcs_of(body: Buffer) -> list[int]:
    if len(body) <= BLOCK_BYTES:
        return [zlib.crc32(body)] if len(body) else []
    view = memoryview(body)
    return [zlib.crc32(view[start : start + BLOCK_BYTES]) for start in range(0, len(body), BLOCK_BYTES)]


def _crcs_in(fd: int, start: int, size: int) -> list[int]:
    """Return the crc32 of each block of a large body. It is read, not mapped: a lost disk is an error, not a signal."""
    stop = start + size
    blocks = range(start, stop, BLOCK_BYTES)
    workers = min(8, os.cpu_count() or 1, len(blocks))

    def share(number: int) -> list[int]:
        buffer = memoryview(bytearray(min(size, BLOCK_BYTES)))
        return [zlib.crc32(buffer[: read_into_at(fd, at, buffer[: stop - at])]) for at in blocks[number::workers]]

    shares = in_threads(share, range(workers), workers)
    return [shares[number % workers][number // workers] for number in range(len(blocks))]


NOTE_SUFFIX = ".verified"
_MOST_BYTES = 64 << 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def is_noted(path: Path, status: os.stat_result) -> bool:
    """Return whether a note says that the file, with this status, was verified."""
    try:
        is_right = bool(_boot_id()) and read_small(_note(path), _MOST_BYTES) == _identity(path, status)
    except (OSError, ValueError):
        return False
    still_used(path)
    return is_right


def still_used(path: Path) -> None:
    """Record that a noted file is used; best effort."""
    record_use(_note(path))


def note(path: Path, status: os.stat_result) -> None:
    """Note that the file was verified, with this status before and after; best effort."""
    if not _boot_id():
        return
    with contextlib.suppress(OSError):
        write_once(_note(path), _identity(path, status))


def forget(path: Path) -> None:
    """Remove the note, so that the file is verified at its next use; best effort."""
    remove(_note(path))


def _identity(path: Path, status: os.stat_result) -> bytes:
    identity = {
        "path": os.path.abspath(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "boot_id": _boot_id(),
    }
    return json.dumps(identity).encode()


def _note(path: Path) -> Path:
    machine = hashlib.blake2b(_boot_id().encode(), digest_size=8).hexdigest()
    return path.with_name(f".{path.name}.{machine}{NOTE_SUFFIX}")


@cache
def _boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
