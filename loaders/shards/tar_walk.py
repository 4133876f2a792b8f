"""Walking a tar: archive -> names and offsets of its regular members, in batches with the first bytes of each.

The fast walk reads 4 KiB at each header and checks the headers in a kernel. It handles plain archives only: at the
first header that it does not support it raises `UnusualTar`, and `tarfile`, the reference, reads the whole archive.
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
from orchdata.loaders.storage.storage import Storage, StorageFile
from orchdata.native.scan import CONTENT, HEADER_BYTES, NUM_COLUMNS, TAR_END, TAR_MORE, TAR_UNUSUAL, scan_block

BLOCK_BYTES = 4096
BLOCKS = 512
_MEMBERS_OF_A_BLOCK = 2  # about as many are in a batch at most: small ones share a block

EXTENDED_HEADER_LIMIT = 1 << 20
"""Limit on PAX headers, long names and the map of one sparse member together (a map of some 50,000 segments); tarfile
would read any size that they claim, and take seconds for each 16 MiB."""

_ZEROS = bytes(HEADER_BYTES)
_TAIL_BYTES = 1 << 20
_NAMES_OF_A_BATCH = 1 << 20
_GLOBAL_RECORDS, _GLOBAL_BYTES = 1024, 1 << 16
_LONGEST_TARGET = 4096  # bytes of a path in Linux: a link cannot name a longer one
_SHOWN = 100
_NO_MEMBER = (tarfile.DIRTYPE, b"D", b"V")  # folders; folders of GNU's incremental archives, and volume labels
_RATIO_FREE_BYTES = 1 << 20


class UnusualTar(Exception):
    """The archive has a feature that the fast walk leaves to tarfile."""


class NotATar(Exception):
    """The file is not an archive; the message is the reason."""


@dataclass(frozen=True, slots=True)
class TarBatch:
    """Some consecutive regular members.

    Attributes:
        names: as tarfile decodes them (surrogates for bytes that are not UTF-8).
        offsets: of the content in the archive; for SPARSE of the first header.
        sizes: of the content.
        encodings: RAW or SPARSE.
        buffer: uint8 (num_bytes,), valid until the next batch is requested.
        heads: int64 (n, 3): the position in `buffer` of the first bytes of each content, their number, and its size.
        damage: the damage that ends the archive after these members.
        unread: index of a member -> why its content is not in the archive: links, devices, pipes.
    """

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    encodings: list[int]
    buffer: NDArray[np.uint8]
    heads: NDArray[np.int64]
    damage: str | None = None
    unread: Mapping[int, str] = field(default_factory=dict)


def walk_plain(file: Storage, digest: hashlib.blake2b, blocks: int = BLOCKS) -> Iterator[TarBatch]:
    """Walk a plain archive, with `blocks` reads for one batch at most. Raises UnusualTar for any other; `digest` is
    then useless.
    """
    read_into, total = file.read_into, file.size
    # No larger than the archive: clearing new memory would take most of the time for a small archive.
    buffer = np.empty(min(blocks, -(-total // BLOCK_BYTES)) * BLOCK_BYTES, np.uint8)
    view = buffer.data
    capacity = min(_MEMBERS_OF_A_BLOCK * blocks, total // HEADER_BYTES + 1)
    members, headers = np.zeros((capacity, NUM_COLUMNS), np.int64), np.empty((capacity, HEADER_BYTES), np.uint8)
    position, ended = 0, False
    while not ended:
        count, state = 0, TAR_MORE
        for start in range(0, len(view), BLOCK_BYTES):
            filled = read_into(position, view[start : start + BLOCK_BYTES])
            if filled < min(BLOCK_BYTES, total - position):
                raise UnusualTar("the file shrank while it was read")
            last = position + filled >= total
            count, position, state = scan_block(buffer, start, filled, position, last, members, headers, count)
            if state != TAR_MORE or position >= total:
                break
            if last:
                raise UnusualTar("ends inside a header")
        if state == TAR_UNUSUAL:
            raise UnusualTar("a header that is not plain")
        # The two zero blocks may be missing, if the writer was stopped.
        ended = state == TAR_END or position >= total
        digest.update(headers[:count].data)
        batch = _plain_batch(buffer, members[:count])
        content_end = batch.offsets[-1] + batch.sizes[-1] if count else 0
        damage = _overrun(total, content_end, position) if state != TAR_END else _data_after_end(file, position)
        yield replace(batch, damage=damage) if damage else batch


def _overrun(total: int, content_end: int, position: int) -> str | None:
    """Return the damage of an archive of `total` bytes if its last member, padded, should end at `position`."""
    if content_end > total:
        return f"the shard ends at byte {total}, inside a member that should reach {content_end}"
    return f"the shard ends at byte {total}, inside the padding of its last member" if position > total else None


def _data_after_end(file: Storage, position: int) -> str | None:
    """Return the damage after the zero block at `position` that ends the archive: only zeros may follow."""
    while position < file.size:
        data = file.read(position, min(_TAIL_BYTES, file.size - position))
        if not data:
            break  # the file shrank: `check_unchanged` notices
        rest = data.lstrip(b"\0")
        if rest:
            return (
                f"data after the end of the archive at byte {position + len(data) - len(rest)}: what follows is lost "
                "(joined archives are not supported: index each archive separately)"
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


class _Stream(StorageFile):
    """An archive as the file that tarfile expects; reads at most `limit` bytes for one member."""

    before_start = "a header points to {}"

    def __init__(self, file: Storage, limit: int, position: int) -> None:
        super().__init__(file, position)
        self._limit = self._left = limit

    def begin_member(self) -> None:
        self._left = self._limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise tarfile.ReadError(f"its extended headers claim more than {self._limit} bytes")
        self._left -= size
        return super().read(size)


def open_tarfile(file: Storage, *, limit: int, position: int = 0) -> tarfile.TarFile:
    """Open a storage with `tarfile` from `position` on. Raises tarfile's errors if it cannot read the first header."""
    stream = cast("IO[bytes]", _Stream(file, limit, position))
    return tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")


def walk_any(file: Storage, digest: hashlib.blake2b, blocks: int = BLOCKS) -> Iterator[TarBatch]:
    """Walk any archive with tarfile. Raises NotATar if it does not begin with a header."""
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
        members: list[_Member] = []
        damage = None
        name_length = 0
        while len(members) < blocks and name_length < _NAMES_OF_A_BATCH and not ended:
            info, damage = _next_member(file, archive)
            ended = info is None or damage is not None
            if info is not None:
                header = (info.name, info.type, info.offset, info.offset_data, info.size)
                digest.update(repr((*header, info.linkname) if info.linkname else header).encode())
                if info.type not in _NO_MEMBER:
                    name_length += len(info.name)
                    members.append(_member(info, files))
        yield _batch_of(file, members, damage)


_LARGEST = (1 << 62) - 1


class _Member(NamedTuple):
    """The part of a member that is kept: a TarInfo can have a megabyte of headers and map."""

    name: str
    offset: int
    size: int
    encoding: int
    unread: str | None = None


def _member(info: tarfile.TarInfo, files: dict[str, _Member]) -> _Member:
    """Return the member, and add it to `files` under its normalized path; a hard link is the file that it names."""
    path = posixpath.normpath(info.name)
    if info.isreg():
        sparse = info.issparse()
        encoding = SPARSE if sparse else RAW
        # A PAX record can claim any number; columns have 63 bits.
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
        return f"a link to {printable(shown)!r}: links are not read; write with `tar --hard-dereference -h`"
    kind = "a device" if info.isdev() and not info.isfifo() else "a pipe" if info.isfifo() else f"of type {info.type!r}"
    return f"{kind}, not a file: it is not read"


def _next_member(file: Storage, archive: tarfile.TarFile) -> tuple[tarfile.TarInfo | None, str | None]:
    """Return the next member, if any, and the damage there."""
    cast(_Stream, archive.fileobj).begin_member()
    try:
        info = archive.next()
    except NOT_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - damaged headers make tarfile raise several kinds
        pass_trouble(error)
        return None, f"damaged at byte {archive.offset}: {one_line(error)}"
    archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all members
    defaults = archive.pax_headers  # tarfile copies these for each member
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
    """Return the damage at the end that tarfile sees: at a header it cannot read it ends without an error."""
    block = file.read(offset, HEADER_BYTES)
    if not block:
        return None
    if block == _ZEROS:
        return _data_after_end(file, offset)
    if len(block) < HEADER_BYTES:
        return f"the shard ends at byte {file.size}, inside a header"
    return f"damaged at byte {offset}: not a tar header; what follows is lost"


def _batch_of(file: Storage, members: list[_Member], damage: str | None) -> TarBatch:
    """Read the first bytes of these members into a batch."""
    buffer = np.zeros(max(1, len(members)) * BLOCK_BYTES, np.uint8)
    view = buffer.data
    heads = np.zeros((len(members), 3), np.int64)
    for i, member in enumerate(members):
        start, size, available = i * BLOCK_BYTES, member.size, 0
        if member.encoding == RAW and member.unread is None:
            available = file.read_into(member.offset, view[start : start + min(BLOCK_BYTES, size)])
        heads[i] = start, available, size
    names, offsets, sizes, encodings = map(list, list(zip(*members, strict=True))[:4]) if members else ([], [], [], [])
    unread = {i: member.unread for i, member in enumerate(members) if member.unread is not None}
    return TarBatch(names, offsets, sizes, encodings, buffer, heads, damage, unread)


class SparseError(Exception):
    """A sparse member that cannot be read; the message is the reason."""


def read_sparse(file: Storage, offset: int, size: int, *, limits: Limits, count: int | None = None) -> memoryview:
    """Read the sparse member with its first header at `offset`, or its first `count` bytes. Sizes in the headers are
    checked against the limits before any allocation. Raises SparseError.
    """
    try:
        info: Any = open_tarfile(file, limit=EXTENDED_HEADER_LIMIT, position=offset).next()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise SparseError(f"damaged sparse member: {one_line(error)}") from error
    if info is None or info.size != size or info.sparse is None:
        raise SparseError("damaged sparse member: not the one that was indexed")
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


def _map_error(segments: Sequence[tuple[int, int]], size: int, limits: Limits) -> str | None:
    """Return the error in the map of a sparse member, which lists (start, length) of its stored segments."""
    end = stored = 0
    for start, length in segments:
        if not length:
            continue
        if start < end or length < 0:
            return f"damaged sparse member: its map has {length} bytes at {start}, after {end}"
        end = start + length
        stored += max(0, min(end, size) - start)  # like tarfile, ignore data beyond the size
    if size > max(_RATIO_FREE_BYTES, limits.decompression_ratio * stored):
        return (
            f"a sparse member of {size} bytes, {stored} of them stored, above "
            f"Limits.decompression_ratio={limits.decompression_ratio:g}"
        )
    return None
