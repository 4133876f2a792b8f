"""Compressed tars: .tar.gz and .tar.zst -> a plain tar in the cache folder, made once, with limits on decompression.

Any framing is read: gzip with several members, zstd with several or skippable frames, with or without content sizes.
"""

from __future__ import annotations

import errno
import hashlib
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import zstandard

from orchdata.loaders.errors import ShardError, StorageError
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import says_memory
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.remote.file import in_order
from orchdata.loaders.storage.remote.urls import identity
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.storage.suffixes import compression

_READ_BYTES = 1 << 20
_OUT_BYTES = 1 << 20
# zstandard returns the whole output of an input together: 1 KiB can contain 32 MiB (blocks of 128 KiB in 4 bytes).
_ZSTD_IN_BYTES = 1 << 10
_RATIO_FREE_BYTES = 1 << 20


class _Damaged(Exception):
    """The compressed stream is damaged; the message is the reason."""


def _pieces_of(file: Storage) -> Iterator[tuple[int, bytes]]:
    file = in_order(file)
    return _gunzip(file) if compression(file.read(0, 4)) == "gzip" else _unzstd(file)


class Decompressed(NamedTuple):
    """The decompressed content of a shard, and whether it was decompressed now."""

    file: LocalFile
    is_new: bool


def open_decompressed(file: Storage, *, limits: Limits, cache: CacheFolder) -> Decompressed:
    """Return the decompressed content of a .tar.gz or .tar.zst as a file in the cache.

    The entry belongs to (url, size, version), and must not be older than the shard: one that changes is decompressed
    again, also if it keeps size and modification time.

    Raises:
        ShardError: the stream is damaged, cut, or above Limits.decompressed_bytes or Limits.decompression_ratio;
            the cache keeps nothing of it.
        StorageError: it cannot be read, or the cache cannot be written or is too small for it.
        StaleIndexError: it changed while it was read.
    """
    name = copy_name(file.url, file.size, file.version)
    is_new = False

    def make(out: IO[bytes], cap: int) -> None:
        nonlocal is_new
        written, is_new = 0, True
        try:
            for consumed, piece in _pieces_of(file):
                written += len(piece)
                _check(file, written, consumed, limits, cap)
                out.write(piece)
        except _Damaged as error:
            raise ShardError(file.url, f"cannot be decompressed: {error}") from error
        finally:
            file.check_unchanged()  # a change of the file can look like damage

    while True:
        path = cache.entry(name, make, changed_ns=file.changed_ns)
        try:
            return Decompressed(LocalFile(path, url=file.url, follow=False), is_new)
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # these: evicted just now, or replaced by a link
                raise


def copy_name(url: str, size: int, version: str) -> str:
    """Return the name of a shard's decompressed copy in the cache folder."""
    name = "\0".join((identity(url), str(size), version))
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _check(file: Storage, written: int, consumed: int, limits: Limits, cap: int) -> None:
    if written > limits.decompressed_bytes:
        raise ShardError(file.url, f"decompresses to more than Limits.decompressed_bytes={limits.decompressed_bytes}")
    if written > cap:
        reason = f"decompresses to more than the cache folder may contain, {cap} bytes (CacheFolder.max_bytes)"
        raise StorageError(file.url, reason, errno.EFBIG)
    if written - _RATIO_FREE_BYTES > limits.decompression_ratio * consumed:
        ratio = written / max(1, consumed)
        raise ShardError(
            file.url,
            f"decompresses {ratio:.0f} to 1, above Limits.decompression_ratio={limits.decompression_ratio:g}",
        )


def _chunks(file: Storage, size: int) -> Iterator[bytes]:
    offset = 0
    while data := file.read(offset, size):
        offset += len(data)
        yield data


def _gunzip(file: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes consumed so far, decompressed piece of at most _OUT_BYTES) over all members."""
    consumed = 0
    stream = zlib.decompressobj(wbits=31)
    fresh = True  # between two members
    for data in _chunks(file, _READ_BYTES):
        while data:
            if fresh:
                data = data.lstrip(b"\0")  # padding of tape tools
                if not data:
                    break
                stream, fresh = zlib.decompressobj(wbits=31), False
            try:
                piece = stream.decompress(data, _OUT_BYTES)
            except zlib.error as error:
                raise _Damaged(f"gzip data damaged near byte {consumed}: {error}") from error
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail
            consumed += len(data) - len(rest)
            yield consumed, piece
            fresh = stream.eof
            if not fresh and not rest and len(piece) == _OUT_BYTES:
                # All input is consumed, but zlib may still have output.
                while piece := stream.decompress(b"", _OUT_BYTES):
                    yield consumed, piece
                fresh = stream.eof
            data = rest
    if not fresh:
        raise _Damaged(f"the gzip data are cut at byte {file.size}")


def _unzstd(file: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes consumed so far, decompressed piece) over all frames."""
    consumed = 0
    pending = b""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` writes
    stream: zstandard.ZstdDecompressionObj | None = None
    for data in _chunks(file, _READ_BYTES):
        at = 0
        while at < len(data):
            window = pending + data[at : at + _ZSTD_IN_BYTES]
            at += _ZSTD_IN_BYTES
            pending = b""
            while window:
                if stream is None:
                    stream = decompressor.decompressobj()
                try:
                    piece = stream.decompress(window)
                except zstandard.ZstdError as error:
                    if says_memory(error):  # for a window size that the format allows
                        raise MemoryError(f"the zstd data cannot be decompressed: {error}") from error
                    raise _Damaged(f"zstd data damaged near byte {consumed}: {error}") from error
                rest = stream.unused_data if stream.eof else b""
                consumed += len(window) - len(rest)
                yield consumed, piece
                if stream.eof:
                    stream = None
                window = rest
    if stream is not None:
        raise _Damaged(f"the zstd data are cut at byte {file.size}")
