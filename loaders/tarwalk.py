"""Walking a tar: archive -> names and places of its regular members, in batches with the first bytes of each.

The fast walk reads 4 KiB at each header and lets a kernel check them. It takes plain archives only; at the first thing
it does not know it raises `UnusualTar`, and the whole archive is read by `tarfile`, whose word is law.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from orchdata.loaders.errors import NOT_DATA
from orchdata.loaders.fields import RAW, SPARSE
from orchdata.loaders.storage import Storage
from orchdata.native.tarscan import (
    CONTENT,
    END,
    HEADER,
    HEADER_BYTES,
    MORE,
    NUM_COLUMNS,
    OFFSET,
    SIZE,
    UNUSUAL,
    scan_block,
)

BLOCK_BYTES = 4096
BLOCKS = 512
MEMBERS = 2 * BLOCKS
"""Members in a batch at most: small ones share a block."""

EXTENDED_HEADER_LIMIT = 16 << 20
"""No PAX header or long name is longer; tarfile would read any size that it claims."""

_ZEROS = bytes(HEADER_BYTES)


class UnusualTar(Exception):
    """The fast walk met something it leaves to tarfile."""


class NotATar(Exception):
    """There is no archive here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class TarBatch:
    """Some consecutive regular members.

    Attributes:
        names: as tarfile decodes them (surrogates for bytes that are not UTF-8).
        offsets: of the content in the archive; for SPARSE of the first header.
        sizes: of the content.
        encodings: RAW or SPARSE.
        buffer: uint8 (num_bytes,), valid until the next batch is asked for.
        starts, available: int64 (n,): first bytes of each content in `buffer`, and how many are there.
        damage: what ends the archive early, after these members.
    """

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    encodings: list[int]
    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    available: NDArray[np.int64]
    damage: str | None = None


def walk_plain(file: Storage, digest: hashlib.blake2b) -> Iterator[TarBatch]:
    """Walk a plain archive. Raises UnusualTar for anything else; `digest` then has to be thrown away."""
    buffer = np.empty(BLOCKS * BLOCK_BYTES, np.uint8)
    view = buffer.data
    members = np.zeros((MEMBERS, NUM_COLUMNS), np.int64)
    read_into, total = file.read_into, file.size
    position, ended = 0, False
    while not ended:
        count, state = 0, MORE
        for start in range(0, len(view), BLOCK_BYTES):
            filled = read_into(position, view[start : start + BLOCK_BYTES])
            last = position + filled >= total
            count, position, state = scan_block(buffer, start, filled, position, last, members, count)
            if state != MORE or position >= total:
                break
            if last:
                raise UnusualTar("ends inside a header")
        if state == UNUSUAL:
            raise UnusualTar("a header that is not plain")
        # Perhaps without the two zero blocks, as a writer that was stopped leaves it.
        ended = state == END or position >= total
        content_end = int(members[count - 1, OFFSET] + members[count - 1, SIZE]) if count else 0
        damage = _overrun(total, content_end, position) if state != END else None
        yield _plain_batch(buffer, members[:count], total, damage, digest)


def _overrun(total: int, content_end: int, position: int) -> str | None:
    """What is wrong with an archive of `total` bytes whose last member, padded, should end at `position`."""
    if content_end > total:
        return f"the shard ends at byte {total}, inside a member that should reach {content_end}"
    return f"the shard ends at byte {total}, inside the padding of its last member" if position > total else None


def _plain_batch(
    buffer: NDArray[np.uint8], members: NDArray[np.int64], total: int, damage: str | None, digest: hashlib.blake2b
) -> TarBatch:
    digest.update(sliding_window_view(buffer, HEADER_BYTES)[members[:, CONTENT] - HEADER_BYTES].tobytes())
    names: list[str] = []
    view = buffer.data
    for name, length, prefix, prefix_length in members[:, 1:5].tolist():
        text = str(view[name : name + length], "utf-8", "surrogateescape")
        if prefix_length:
            text = str(view[prefix : prefix + prefix_length], "utf-8", "surrogateescape") + "/" + text
        names.append(text)
    starts, offsets, sizes = (np.ascontiguousarray(members[:, i]) for i in (CONTENT, OFFSET, SIZE))
    in_block = (members[:, HEADER] // BLOCK_BYTES + 1) * BLOCK_BYTES - starts
    available = np.clip(np.minimum(in_block, total - offsets), 0, sizes)  # blocks are full but for the archive's end
    encodings = [RAW] * len(names)
    return TarBatch(names, offsets.tolist(), sizes.tolist(), encodings, buffer, starts, available, damage)


class _Stream:
    """A storage as the seekable binary file that tarfile wants; refuses to read more than `limit` in one go."""

    def __init__(self, file: Storage, limit: int, position: int = 0) -> None:
        self._file = file
        self._limit = limit
        self._position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._limit:
            raise tarfile.ReadError(f"an extended header claims {size} bytes")
        data = self._file.read(self._position, size)
        self._position += len(data)
        return data

    def seek(self, position: int) -> int:
        if position < 0:
            raise tarfile.ReadError(f"a header points to {position}")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position


def open_tarfile(file: Storage, *, limit: int, position: int = 0) -> tarfile.TarFile:
    """`tarfile` over a storage from `position` on. Raises what tarfile raises for a first header it cannot read."""
    stream = cast("IO[bytes]", _Stream(file, limit, position))
    return tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")


def walk_any(file: Storage, digest: hashlib.blake2b) -> Iterator[TarBatch]:
    """Walk any archive as tarfile reads it. Raises NotATar when the first header is none."""
    try:
        archive = open_tarfile(file, limit=EXTENDED_HEADER_LIMIT)
    except NOT_DATA:
        raise
    except Exception as error:  # damaged headers make tarfile raise several kinds
        raise NotATar(_reason(error)) from error
    ended = False
    while not ended:
        found: list[tarfile.TarInfo] = []
        damage = None
        while len(found) < BLOCKS and not ended:
            info, damage = _next_member(file, archive)
            ended = info is None or damage is not None
            if info is not None:
                digest.update(repr((info.name, info.type, info.offset, info.offset_data, info.size)).encode())
                if info.isreg():
                    found.append(info)
        yield _batch_of(file, found, damage)


def _next_member(file: Storage, archive: tarfile.TarFile) -> tuple[tarfile.TarInfo | None, str | None]:
    """The next member, if any, and what is wrong with the archive there."""
    try:
        info = archive.next()
    except NOT_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - damaged headers make tarfile raise several kinds
        return None, f"damaged at byte {archive.offset}: {_reason(error)}"
    archive.members = []  # type: ignore[attr-defined]  # it keeps all
    if info is None:
        return None, _silent_end(file, archive.offset)
    if info.size < 0 or archive.offset <= info.offset:
        return None, f"damaged at byte {info.offset}: a member of {info.size} bytes"
    content_end = info.offset_data + info.size
    if info.isreg() and not info.issparse() and content_end > file.size:
        return info, _overrun(file.size, content_end, content_end)
    return info, None


def _silent_end(file: Storage, offset: int) -> str | None:
    """What is at the end that tarfile sees. It ends without a word at a header it cannot read."""
    block = file.read(offset, HEADER_BYTES)
    if not block or block == _ZEROS:
        return None
    if len(block) < HEADER_BYTES:
        return f"the shard ends at byte {file.size}, inside a header"
    return f"damaged at byte {offset}: not a tar header; what follows is lost"


def _batch_of(file: Storage, found: list[tarfile.TarInfo], damage: str | None) -> TarBatch:
    """The batch of these members, their first bytes read."""
    sparse = [info.issparse() for info in found]
    offsets = [info.offset if is_sparse else info.offset_data for info, is_sparse in zip(found, sparse, strict=True)]
    sizes = [info.size for info in found]
    buffer = np.zeros(max(1, len(found)) * BLOCK_BYTES, np.uint8)
    view = buffer.data
    starts = np.arange(len(found), dtype=np.int64) * BLOCK_BYTES
    available = np.zeros(len(found), np.int64)
    for i, start in enumerate(starts.tolist()):
        if sizes[i] and not sparse[i]:
            available[i] = file.read_into(offsets[i], view[start : start + min(BLOCK_BYTES, sizes[i])])
    encodings = [SPARSE if is_sparse else RAW for is_sparse in sparse]
    return TarBatch([info.name for info in found], offsets, sizes, encodings, buffer, starts, available, damage)


def read_sparse(file: Storage, offset: int, size: int, *, limit: int) -> bytes:
    """The content of the sparse member whose first header is at `offset`. Raises tarfile.TarError if it is damaged."""
    archive = open_tarfile(file, limit=limit, position=offset)
    info: Any = archive.next()
    if info is None or info.size != size:
        raise tarfile.ReadError("another member than was indexed")
    reader = archive.extractfile(info)
    if reader is None:
        raise tarfile.ReadError("no content")
    return reader.read(size)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
