"""Walking a tar: archive -> names and places of its regular members, in batches with the first bytes of each.

The fast walk reads 4 KiB at each header and lets a kernel check them. It takes plain archives only; at the first thing
it does not know it raises `UnusualTar`, and the whole archive is read by `tarfile`, whose word is law.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import NOT_DATA, one_line, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.fields import RAW, SPARSE, printable
from orchdata.loaders.storage.storage import Storage
from orchdata.native.scan.tar import (
    CONTENT,
    END,
    HEADER_BYTES,
    MORE,
    NUM_COLUMNS,
    UNUSUAL,
    scan_block,
)

BLOCK_BYTES = 4096
BLOCKS = 512
MEMBERS = 2 * BLOCKS
"""Members in a batch at most: small ones share a block."""

EXTENDED_HEADER_LIMIT = 1 << 20
"""PAX headers, long names and the map of one sparse member are no longer together (a map of some 50,000 stretches);
tarfile would read any size that they claim, and take seconds for each 16 MiB."""

_ZEROS = bytes(HEADER_BYTES)
_TAIL_BYTES = 1 << 20
_NAMES_OF_A_BATCH = 1 << 20
_GLOBAL_RECORDS, _GLOBAL_BYTES = 1024, 1 << 16
_LONGEST_TARGET = 4096  # bytes of a path, in Linux: no file has another name to link to
_SHOWN = 100
_NO_MEMBER = (tarfile.DIRTYPE, b"D", b"V")  # folders; folders of GNU's incremental archives, and labels
_RATIO_FREE_BYTES = 1 << 20


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
        places: int64 (n, 3): where the first bytes of each content are in `buffer`, how many are there, and its size.
        damage: what ends the archive early, after these members.
        unread: index of a member -> why its content is not in the archive: links, devices, pipes.
    """

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    encodings: list[int]
    buffer: NDArray[np.uint8]
    places: NDArray[np.int64]
    damage: str | None = None
    unread: Mapping[int, str] = field(default_factory=dict)


def walk_plain(file: Storage, digest: hashlib.blake2b) -> Iterator[TarBatch]:
    """Walk a plain archive. Raises UnusualTar for anything else; `digest` then has to be thrown away."""
    read_into, total = file.read_into, file.size
    # No larger than the archive: fresh memory has to be cleared, which would take most of the time of a small one.
    buffer = np.empty(min(BLOCKS, -(-total // BLOCK_BYTES)) * BLOCK_BYTES, np.uint8)
    view = buffer.data
    capacity = min(MEMBERS, total // HEADER_BYTES + 1)
    members, headers = np.zeros((capacity, NUM_COLUMNS), np.int64), np.empty((capacity, HEADER_BYTES), np.uint8)
    position, ended = 0, False
    while not ended:
        count, state = 0, MORE
        for start in range(0, len(view), BLOCK_BYTES):
            filled = read_into(position, view[start : start + BLOCK_BYTES])
            if filled < min(BLOCK_BYTES, total - position):
                raise UnusualTar("the file shrank while it was read")
            last = position + filled >= total
            count, position, state = scan_block(buffer, start, filled, position, last, members, headers, count)
            if state != MORE or position >= total:
                break
            if last:
                raise UnusualTar("ends inside a header")
        if state == UNUSUAL:
            raise UnusualTar("a header that is not plain")
        # Perhaps without the two zero blocks, as a writer that was stopped leaves it.
        ended = state == END or position >= total
        digest.update(headers[:count].data)
        batch = _plain_batch(buffer, members[:count])
        content_end = batch.offsets[-1] + batch.sizes[-1] if count else 0
        damage = _overrun(total, content_end, position) if state != END else _behind_end(file, position)
        yield replace(batch, damage=damage) if damage else batch


def _overrun(total: int, content_end: int, position: int) -> str | None:
    """What is wrong with an archive of `total` bytes whose last member, padded, should end at `position`."""
    if content_end > total:
        return f"the shard ends at byte {total}, inside a member that should reach {content_end}"
    return f"the shard ends at byte {total}, inside the padding of its last member" if position > total else None


def _behind_end(file: Storage, position: int) -> str | None:
    """What is wrong behind the zero block at `position`, which ends the archive: there has to be nothing but zeros."""
    while position < file.size:
        data = file.read(position, min(_TAIL_BYTES, file.size - position))
        if not data:
            break  # the file shrank, which its owner will see
        rest = data.lstrip(b"\0")
        if rest:
            return (
                f"data behind the end of the archive at byte {position + len(data) - len(rest)}: what follows is lost "
                "(joined archives are not read: index each by itself)"
            )
        position += len(data)
    return None


def _plain_batch(buffer: NDArray[np.uint8], members: NDArray[np.int64]) -> TarBatch:
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    view = buffer.data
    for name, length, prefix, prefix_length, offset, _, _, size in members.tolist():
        text = str(view[name : name + length], "utf-8", "surrogateescape")
        if prefix_length:
            text = str(view[prefix : prefix + prefix_length], "utf-8", "surrogateescape") + "/" + text
        names.append(text)
        offsets.append(offset)
        sizes.append(size)
    return TarBatch(names, offsets, sizes, [RAW] * len(names), buffer, members[:, CONTENT:].copy())


class _Stream:
    """A storage as the seekable binary file that tarfile wants; refuses to read more than `limit` for one member."""

    def __init__(self, file: Storage, limit: int, position: int = 0) -> None:
        self._file = file
        self._limit = self._left = limit
        self._position = position

    def begin_member(self) -> None:
        self._left = self._limit

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"its extended headers claim more than {self._limit} bytes")
        self._left -= size
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
        pass_trouble(error)
        raise NotATar(one_line(error)) from error
    ended = False
    files: dict[str, _Member] = {}
    while not ended:
        found: list[_Member] = []
        damage = None
        name_length = 0
        while len(found) < BLOCKS and name_length < _NAMES_OF_A_BATCH and not ended:
            info, damage = _next_member(file, archive)
            ended = info is None or damage is not None
            if info is not None:
                place = (info.name, info.type, info.offset, info.offset_data, info.size)
                digest.update(repr((*place, info.linkname) if info.linkname else place).encode())
                if info.type not in _NO_MEMBER:
                    name_length += len(info.name)
                    found.append(_member(info, files))
        yield _batch_of(file, found, damage)


_LARGEST = (1 << 62) - 1


class _Member(NamedTuple):
    """What is kept of a member: a TarInfo may hold a megabyte of headers and map."""

    name: str
    offset: int
    size: int
    encoding: int
    unread: str | None = None


def _member(info: tarfile.TarInfo, files: dict[str, _Member]) -> _Member:
    """The member, noted in `files` under its normal path; a hard link is the earlier file that it names."""
    path = posixpath.normpath(info.name)
    if info.isreg():
        sparse = info.issparse()
        encoding = SPARSE if sparse else RAW
        # A PAX record may say any number, and columns hold 63 bits.
        member = _Member(info.name, info.offset if sparse else info.offset_data, min(info.size, _LARGEST), encoding)
    else:
        target = files.get(posixpath.normpath(info.linkname)) if info.islnk() else None
        if target is None:
            return _Member(info.name, info.offset_data, 0, RAW, _unread(info))
        member = target._replace(name=info.name)
    if len(path) <= _LONGEST_TARGET:
        files[path] = member
    return member


def _unread(info: tarfile.TarInfo) -> str:
    if info.islnk() or info.issym():
        shown = info.linkname if len(info.linkname) <= _SHOWN else info.linkname[:_SHOWN] + "..."
        return f"a link to {printable(shown)!r}, which is not read: write with `tar --hard-dereference -h`"
    kind = "a device" if info.isdev() and not info.isfifo() else "a pipe" if info.isfifo() else f"of type {info.type!r}"
    return f"{kind}, not a file: not read"


def _next_member(file: Storage, archive: tarfile.TarFile) -> tuple[tarfile.TarInfo | None, str | None]:
    """The next member, if any, and what is wrong with the archive there."""
    cast(_Stream, archive.fileobj).begin_member()
    try:
        info = archive.next()
    except NOT_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - damaged headers make tarfile raise several kinds
        pass_trouble(error)
        return None, f"damaged at byte {archive.offset}: {one_line(error)}"
    archive.members = []  # type: ignore[attr-defined]  # it keeps all
    defaults = archive.pax_headers  # which it copies for each member
    if len(defaults) > _GLOBAL_RECORDS or sum(len(k) + len(v) for k, v in defaults.items()) > _GLOBAL_BYTES:
        return None, (
            f"damaged before byte {archive.offset}: global headers of more than {_GLOBAL_RECORDS} records "
            f"or {_GLOBAL_BYTES} characters; what follows is lost"
        )
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
    if not block:
        return None
    if block == _ZEROS:
        return _behind_end(file, offset)
    if len(block) < HEADER_BYTES:
        return f"the shard ends at byte {file.size}, inside a header"
    return f"damaged at byte {offset}: not a tar header; what follows is lost"


def _batch_of(file: Storage, found: list[_Member], damage: str | None) -> TarBatch:
    """The batch of these members, their first bytes read."""
    buffer = np.zeros(max(1, len(found)) * BLOCK_BYTES, np.uint8)
    view = buffer.data
    places = np.zeros((len(found), 3), np.int64)
    for i, member in enumerate(found):
        start, size, available = i * BLOCK_BYTES, member.size, 0
        if size and member.encoding == RAW:
            available = file.read_into(member.offset, view[start : start + min(BLOCK_BYTES, size)])
        places[i] = start, available, size
    names, offsets, sizes, encodings = map(list, list(zip(*found, strict=True))[:4]) if found else ([], [], [], [])
    unread = {i: member.unread for i, member in enumerate(found) if member.unread is not None}
    return TarBatch(names, offsets, sizes, encodings, buffer, places, damage, unread)


class SparseError(Exception):
    """A sparse member that cannot be read; the message is the reason."""


def read_sparse(file: Storage, offset: int, size: int, *, limits: Limits, count: int | None = None) -> memoryview:
    """The content of the sparse member whose first header is at `offset`, or its first `count` bytes.

    Nothing is allocated before what the headers say was held against the limits. Raises SparseError.
    """
    try:
        info: Any = open_tarfile(file, limit=EXTENDED_HEADER_LIMIT, position=offset).next()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise SparseError(f"damaged sparse member: {one_line(error)}") from error
    if info is None or info.size != size or info.sparse is None:
        raise SparseError("damaged sparse member: another one than was indexed")
    reason = limits.size_error(size, is_text=False) or _map_error(info.sparse, size, limits)
    if reason is not None:
        raise SparseError(reason)
    out = memoryview(bytearray(size if count is None else min(count, size)))
    stored = info.offset_data
    for start, length in info.sparse:
        wanted = min(length, max(0, len(out) - start))
        if wanted and file.read_into(stored, out[start : start + wanted]) < wanted:
            raise SparseError(f"damaged sparse member: the shard ends at byte {file.size}, inside its data")
        stored += length
    return out.toreadonly()


def _map_error(stretches: Sequence[tuple[int, int]], size: int, limits: Limits) -> str | None:
    """What is wrong with the map of a sparse member: (start, length) of the stretches that are stored."""
    end = stored = 0
    for start, length in stretches:
        if not length:
            continue
        if start < end or length < 0:
            return f"damaged sparse member: its map has {length} bytes at {start}, after {end}"
        end = start + length
        stored += max(0, min(end, size) - start)  # as tarfile does, what lies beyond is left out
    if size > max(_RATIO_FREE_BYTES, limits.decompression_ratio * stored):
        return (
            f"a sparse member of {size} bytes, {stored} of them stored, above "
            f"Limits.decompression_ratio={limits.decompression_ratio:g}"
        )
    return None
