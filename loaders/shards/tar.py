"""Tar shards: facts of every member from its headers, in one pass, and reading members by position.

Compressed tars: .tar.gz and .tar.zst -> a plain tar in the cache folder, made once, with limits on decompression. Any
framing is read: gzip with several members, zstd with several or skippable frames, with or without content sizes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import sys
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError, ShardError, StorageError
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, says_memory
from orchdata.loaders.modalities.builtin import BUILTINS, NUM_FACTS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header, Modality, read_header, scan_heads, starts_with
from orchdata.loaders.shards.fields import GZIP, RAW, SPARSE, SPLITS, Met, classify_renamed, nfc, printable
from orchdata.loaders.shards.shard import (
    Beginning,
    Facts,
    FactsTable,
    Member,
    Shard,
    beginning_of,
    facts_of,
    shard_failure,
)
from orchdata.loaders.shards.tar_walk import (
    BLOCKS,
    NotATar,
    SparseError,
    TarBatch,
    UnusualTar,
    read_sparse,
    walk_any,
    walk_plain,
)
from orchdata.loaders.storage.cache import CacheFolder, copy_name
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.paths import compression
from orchdata.loaders.storage.remote.objects import in_order
from orchdata.loaders.storage.storage import Extent, FileVersion, Run, Storage, StorageFile, runs_of, views_of
from orchdata.loaders.watch import here

Bytes = bytes | memoryview
T = TypeVar("T")

_FIRST_BLOCKS = 64  # headers in a batch where only the first samples are wanted

COALESCE_GAP_BYTES = 8192
"""Members of a sample with smaller gaps are read with one call, including the headers between them."""


class TarShard(Shard):
    """A tar archive, plain or already decompressed. `read` and `read_many` are safe from many threads."""

    def __init__(
        self,
        url: str,
        file: Storage,
        *,
        limits: Limits,
        names: Sequence[tuple[str, str]] = (),
        key: str = "",
    ) -> None:
        super().__init__(url, file, limits)
        self._names = dict(names)
        self._key = key

    def checksum(self) -> str:
        """Return the checksum of size and headers, as in the facts; reads nothing else."""
        try:
            return self._walked(lambda batches: deque(batches, maxlen=0))[1]
        except NotATar:
            return self._digest(hashlib.blake2b(digest_size=16))

    def facts(self) -> Facts:
        """Walk the archive and read the media headers. Bad data become rows with an error, never an exception."""
        lost_bytes = max(1, self.size)
        try:
            (table, lost, met), checksum = self._walked(lambda batches: self._scan().run(batches))
            # Scaled to bytes of the stored shard: an estimate for a compressed one.
            lost_bytes = -(-lost * self.size // self._file.size)
        except NotATar as error:
            head = self._file.read(0, 8)
            table = shard_failure(str(error) if not head else f"not a tar ({error}): starts with {starts_with(head)}")
            checksum, met = self._digest(hashlib.blake2b(digest_size=16)), {}
        ignored = table.ignored()
        return facts_of(self, table, checksum, ignored=ignored, met=met, lost_bytes=lost_bytes)

    def begin(self, most: int) -> Beginning:
        """Walk the archive up to the sample after the first `most`. Bad data become rows with an error."""
        try:
            (table, _, met), _ = self._walked(lambda batches: self._scan(most).run(batches), _FIRST_BLOCKS)
        except NotATar as error:
            table, met = shard_failure(f"not a tar ({error})"), {}
        after = bisect_left(table.sample, most)
        is_whole = after == len(table)
        end = self._file.size if is_whole else max(table.offset[: after + 1])  # a link's content is further ahead
        return beginning_of(self, table, most, is_whole=is_whole, reach=end, met=met)

    def _scan(self, most: int = sys.maxsize) -> TarScan:
        return TarScan(self._file, self._limits, self._names, self._key, most)

    def _walked(self, consume: Callable[[Iterator[TarBatch]], T], blocks: int = BLOCKS) -> tuple[T, str]:
        """Pass all members to `consume`; return its result and the checksum. Raises NotATar."""
        if self._file.size == 0:
            raise NotATar("empty file")
        digest = hashlib.blake2b(digest_size=16)
        try:
            result = consume(walk_plain(self._file, digest, blocks))
        except UnusualTar:
            digest = hashlib.blake2b(digest_size=16)
            result = consume(walk_any(self._file, digest, blocks))
        finally:
            self._file.check_unchanged()  # a change of the file can look like damage
        return result, self._digest(digest)

    def _digest(self, headers: hashlib.blake2b) -> str:
        headers.update(str(self.size).encode())
        return headers.hexdigest()

    def ranges(self, members: Sequence[Member]) -> list[Extent]:
        # The map of a sparse member says what is read of it.
        return [(offset, size) for offset, size, encoding, _ in members if encoding != SPARSE]

    def read_many(self, members: Sequence[Member]) -> list[Bytes]:
        """Read the members of one sample; neighbours are read with one call, and share its memory; gzipped text is
        decompressed. Raises FieldError for content that is damaged, cut or above a limit.
        """
        results: list[Bytes] = [b""] * len(members)
        for run in _runs(members, self._limits.member_bytes):
            offset, size, encoding, field = members[run.members[0]]
            if size > self._limits.member_bytes:
                raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
            try:
                if encoding == SPARSE:
                    contents: list[Bytes] = [read_sparse(self._file, offset, size, limits=self._limits)]
                else:
                    contents = [self._file.read(run.start, run.stop - run.start)]
            except SparseError as error:
                self._file.check_unchanged()  # a change of the file can look like damage
                raise FieldError(field, str(error)) from error
            if len(run.members) > 1:
                contents = views_of(contents[0], run, [(offset, size) for offset, size, _, _ in members])
            self._file.check_unchanged()
            for i, content in zip(run.members, contents, strict=True):
                _, size, encoding, field = members[i]
                if len(content) < size:
                    raise FieldError(field, f"cut: {len(content)} of {size} bytes are in the shard")
                results[i] = gunzip(content, field, self._limits) if encoding == GZIP else content
        return results


def gunzip(data: Bytes, field: str, limits: Limits) -> bytes:
    """Decompress a gzipped text member, at most to Limits.text_bytes. Raises FieldError."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            text = stream.read(limits.text_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FieldError(field, f"damaged gzip: {error}") from error
    if len(text) > limits.text_bytes:
        raise FieldError(field, f"more than {limits.text_bytes} bytes decompressed, above Limits.text_bytes")
    return text


def _runs(members: Sequence[Member], member_bytes: int) -> list[Run]:
    """Group members to read together. A member that is not RAW, or above the limit, is a run of its own."""
    alone = {i: None for i, (_, size, encoding, _) in enumerate(members) if encoding != RAW or size > member_bytes}
    near = [i for i in range(len(members)) if i not in alone] if alone else range(len(members))
    runs = [
        Run([near[i] for i in run.members], run.start, run.stop)
        for run in runs_of([members[i][:2] for i in near], gap_bytes=COALESCE_GAP_BYTES)
    ]
    return runs + [Run([i], members[i][0], members[i][0] + members[i][1]) for i in alone]


def bytes_read_together(members: Sequence[Member]) -> int:
    """Return the bytes that `TarShard.read_many` reads for members of one sample: the members and gaps between them."""
    largest = max((size for _, size, _, _ in members), default=0)
    return sum(run.stop - run.start for run in _runs(members, largest))


_READ_BYTES = 1 << 20
_OUT_BYTES = 1 << 20
# zstandard returns the whole output of an input together: 1 KiB can contain 32 MiB (blocks of 128 KiB in 4 bytes).
_ZSTD_IN_BYTES = 1 << 10
_RATIO_FREE_BYTES = 1 << 20


class _Damaged(Exception):
    """The compressed stream is damaged; the message is the reason."""


def _pieces_of(file: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes consumed so far, decompressed piece of at most _OUT_BYTES for gzip) over all members or frames."""
    file = in_order(file)
    if compression(file.read(0, 4)) == "zstd":
        yield from _unzstd(file)
        return
    source = io.BufferedReader(StorageFile(file), _READ_BYTES)
    stream = gzip.GzipFile(fileobj=source)
    try:
        while piece := stream.read(_OUT_BYTES):
            yield source.tell(), piece
    except EOFError:
        raise _Damaged(f"the gzip data are cut at byte {file.size}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _Damaged(f"gzip data damaged near byte {source.tell()}: {error}") from error


def open_decompressed(file: Storage, *, limits: Limits, cache: CacheFolder) -> tuple[LocalFile, bool]:
    """Return the decompressed content of a .tar.gz or .tar.zst as a file in the cache, and whether it was decompressed
    now. The entry belongs to (url, size, version), and must not be older than the shard: one that changes is
    decompressed again, also if it keeps size and time.

    Raises:
        ShardError: the stream is damaged, cut, or above the limits; the cache keeps nothing of it.
        StorageError: it cannot be read, or the cache cannot be written or is too small for it.
        StaleIndexError: it changed while it was read.
    """
    name = copy_name(file.url, FileVersion(file.size, file.version))
    is_new = False

    def make(out: IO[bytes], cap: int) -> None:
        nonlocal is_new
        written, is_new = 0, True
        try:
            for consumed, piece in _pieces_of(file):
                written += len(piece)
                if written > limits.decompressed_bytes:
                    most = f"Limits.decompressed_bytes={limits.decompressed_bytes}"
                    raise ShardError(file.url, f"decompresses to more than {most}")
                if written > cap:
                    reason = f"more than the cache folder may contain, {cap} bytes (CacheFolder.max_bytes)"
                    raise StorageError(file.url, f"decompresses to {reason}", errno.EFBIG)
                if written - _RATIO_FREE_BYTES > limits.decompression_ratio * consumed:
                    most = f"Limits.decompression_ratio={limits.decompression_ratio:g}"
                    raise ShardError(file.url, f"decompresses {written / max(1, consumed):.0f} to 1, above {most}")
                out.write(piece)
        except _Damaged as error:
            raise ShardError(file.url, f"cannot be decompressed: {error}") from error
        finally:
            file.check_unchanged()  # a change of the file can look like damage

    while True:
        path = cache.entry(name, make, changed_ns=file.changed_ns)
        try:
            return LocalFile(path, url=file.url, follow=False), is_new
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # these: evicted just now, or replaced by a link
                raise


def _unzstd(file: Storage) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes consumed so far, decompressed piece) over all frames."""
    consumed = 0
    pending = b""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as `zstd --long=31` writes
    stream: zstandard.ZstdDecompressionObj | None = None
    for start in range(0, file.size, _READ_BYTES):
        data, at = file.read(start, _READ_BYTES), 0
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


class TarScan:
    """One pass over an archive: groups members into samples and reads their media headers. It ends where a sample
    begins after `most`.
    """

    def __init__(self, file: Storage, limits: Limits, names: Mapping[str, str], key: str, most: int) -> None:
        self._file = file
        self._limits = limits
        self._names = names
        self.met = Met(names.items())
        self._table = FactsTable()
        self._split = SPLITS[key]
        self._key = self._same_key = ""  # as written, and as it is compared
        self._key_error: str | None = None
        self._fields: set[str] = set()
        self._first_row: dict[str, int] = {}  # by key
        self._sample = -1
        self._classes: dict[str, tuple[int, int]] = {}
        self._nameless: list[str] = []
        self._regular = 0
        self._most = most

    def run(self, batches: Iterator[TarBatch]) -> tuple[FactsTable, int, dict[str, int]]:
        """Return facts, the number of bytes after damage, with unknown content, and `FactsMeta.met`."""
        damage: str | None = None
        end = 0
        for batch in batches:
            here().check()
            first_row = len(self._table)
            taken = self._group(batch)
            if len(self._table) > self._limits.shard_rows:
                reason = f"more than {self._limits.shard_rows} members, above Limits.shard_rows"
                return shard_failure(reason), self._file.size, self.met.counts
            self._scan_headers(batch, taken, first_row)
            if self._sample >= self._most:  # those before it are complete
                break
            damage = batch.damage
            if batch.offsets:
                end = max(end, batch.offsets[-1] + batch.sizes[-1])  # a link's content is further ahead
        table = self._table
        if not len(table):
            lost_bytes, reason = 0 if damage is None else self._file.size, "no samples: the archive has no files"
            if self._regular:
                more = ", ..." if self._regular > len(self._nameless) else ""
                reason = f"no samples: no member is named key.field ({', '.join(map(repr, self._nameless))}{more})"
            return shard_failure(damage or reason), lost_bytes, self.met.counts
        if damage is not None:
            # The archive ends inside this sample or right after it, so the sample may be incomplete.
            table.errors.pop(len(table) - 1, None)
            table.fail_structure(len(table) - 1, damage)
        # It is unknown how much is missing from an archive that ends early: at least one byte marks it as damaged.
        lost_bytes = 0 if damage is None else max(1, self._file.size - end)
        return table, lost_bytes, self.met.counts

    def _group(self, batch: TarBatch) -> NDArray[np.int64]:
        """Append the members of a batch that belong to samples; return their indices in the batch."""
        rows: list[tuple[int, str, str, int, int, int, int]] = []
        taken: list[int] = []
        structural: list[tuple[int, str]] = []
        first_row = len(self._table)
        limits, classes, unread, names = self._limits, self._classes, batch.unread, self._names
        # Most members pass these checks without a function call.
        largest, short = min(limits.member_bytes, limits.text_bytes), limits.short_name
        offsets, sizes, encodings = batch.offsets, batch.sizes, batch.encodings
        for i, name in enumerate(batch.names):
            is_ascii = name.isascii()
            split = self._split(name if is_ascii else printable(name))
            if split is None:
                continue
            key, field = split if is_ascii else map(nfc, split)
            if key[-1] == "/" and (field[:1] == "_" or field == "ds_store"):
                continue  # macOS adds `._a.png` to `a.png` in a folder, and `.DS_Store`
            stored, field = field, names.get(field, field)
            if names:
                self.met.add((stored,))
            row = first_row + len(taken)

            # A new key begins a new sample.
            if key != self._same_key:
                self._key, self._same_key = split[0], key
                self._sample += 1
                self._fields = {"__key__", "__url__"}  # reserved by webdataset: not allowed as fields
                self._key_error = limits.name_error("key", key) if len(key) > short else None
                earlier = row if self._key_error else self._first_row.setdefault(key, row)
                if earlier != row:
                    reason = f"key {key!r} comes back after other keys: a sample's members must be consecutive"
                    structural += [(earlier, reason), (row, reason)]

            # Errors of its names, and duplicates.
            key = self._key
            if self._key_error is not None or len(field) > short:
                too_long = self._key_error or limits.name_error("field's name", field)
                if too_long is not None:
                    structural.append((row, too_long))
                    key, field = (shortened(key) if self._key_error else key), shortened(field)
            if field in self._fields:
                structural.append((row, f"field {field!r} comes twice in sample {key!r}"))
            self._fields.add(field)

            # Its kind and size.
            kind, encoding = classes.get(stored) or classes.setdefault(stored, classify_renamed(stored, field))
            size = sizes[i]
            if unread and i in unread:
                structural.append((row, unread[i]))
            if size > largest and kind != OTHER:
                too_large = limits.size_error(size, is_text=kind == TEXT)
                if too_large is not None:
                    self._table.errors[row] = too_large
            rows.append((self._sample, key, field, kind, offsets[i], size, encodings[i] or encoding))
            taken.append(i)
        self._table.extend(rows)
        for row, reason in structural:
            self._table.fail_structure(row, reason)
        if not len(self._table):
            self._regular += len(batch.names)
            self._nameless += [printable(name) for name in batch.names[: 3 - len(self._nameless)]]
        return np.array(taken, np.int64)

    def _scan_headers(self, batch: TarBatch, taken: NDArray[np.int64], first_row: int) -> None:
        """Add the headers of the rows from `first_row` on, which are the members `taken` of the batch."""
        table = self._table
        kinds = np.array(table.kind[first_row:], np.uint8)
        if table.errors:
            kinds[[first_row + i in table.errors for i in range(taken.size)]] = OTHER
        headers = np.zeros((taken.size, NUM_FACTS), np.int64)
        for code, modality in enumerate(BUILTINS.values(), TEXT + 1):
            mine = np.flatnonzero(kinds == code)
            if not mine.size:
                continue
            found, rest = scan_heads(modality, batch.buffer, batch.heads[taken[mine]])
            current = here()
            for i in rest.tolist():  # the first bytes were not enough
                row = first_row + int(mine[i])
                current.key = table.key[row]
                try:
                    found[i] = self._read_header(modality, row)
                except DecodeError as error:
                    table.errors[row] = error.reason
                except MemoryError as error:
                    raise measured_at(error, self._file.url, table.key[row], table.field[row]) from error
            current.key = None
            headers[mine, : modality.num_facts] = found
        table.extend_headers(headers)

    def _read_header(self, modality: type[Modality], row: int) -> Header:
        table = self._table
        offset, size = table.offset[row], table.size[row]
        if table.encoding[row] == SPARSE:

            def read(count: int) -> bytes:
                return bytes(read_sparse(self._file, offset, size, limits=self._limits, count=count))

            try:
                return read_header(modality, size, read, self._limits)
            except SparseError as error:
                raise DecodeError(str(error)) from error
        return read_header(modality, size, lambda count: self._file.read(offset, count), self._limits)
