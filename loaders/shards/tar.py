"""Tar shards: facts of every member from its headers, and reading members by position."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from orchdata.loaders.errors import FieldError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import starts_with
from orchdata.loaders.shards.facts_table import Facts, shard_failure
from orchdata.loaders.shards.fields import GZIP, RAW, SPARSE
from orchdata.loaders.shards.shard import Beginning, beginning_of, facts_of
from orchdata.loaders.shards.tar_scan import TarScan
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
from orchdata.loaders.storage.coalesce import Run, read_run, runs_of
from orchdata.loaders.storage.storage import Storage

Bytes = bytes | memoryview
T = TypeVar("T")

_FIRST_BLOCKS = 64  # headers in a batch where only the first samples are wanted

COALESCE_GAP_BYTES = 8192
"""Members of a sample with smaller gaps are read with one call, including the headers between them."""


class TarShard:
    """A tar archive, plain or already decompressed. `read` and `read_many` are safe from many threads.

    Args:
        url: as the user gave it, for errors and facts.
        file: the readable archive.
        limits: applied by `facts` and `read`.
        names, key: as in FieldRules.
        size, version: of the shard as stored, if that is another file (a compressed one).
        is_new: whether that file was decompressed now, so that no one has compared its content with an index.
        packed: whether the shard is compressed.
    """

    def __init__(
        self,
        url: str,
        file: Storage,
        *,
        limits: Limits,
        names: Sequence[tuple[str, str]] = (),
        key: str = "",
        size: int | None = None,
        version: str | None = None,
        is_new: bool = False,
        packed: bool = False,
    ) -> None:
        self.url = url
        self.size = file.size if size is None else size
        self.version = file.version if version is None else version
        self.is_new = is_new
        self.packed = packed
        self._file = file
        self._limits = limits
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
            scan, checksum = self._walked(lambda batches: self._scan().run(batches))
            table, met = scan.table, scan.met
            # Scaled to bytes of the stored shard: an estimate for a compressed one.
            lost_bytes = -(-scan.lost_bytes * self.size // self._file.size)
        except NotATar as error:
            head = self._file.read(0, 8)
            table = shard_failure(str(error) if not head else f"not a tar ({error}): starts with {starts_with(head)}")
            checksum, met = self._digest(hashlib.blake2b(digest_size=16)), {}
        ignored = table.ignored()
        return facts_of(self, table, checksum, ignored=ignored, met=met, lost_bytes=lost_bytes)

    def begin(self, most: int) -> Beginning:
        """Walk the archive up to the sample after the first `most`. Bad data become rows with an error."""
        try:
            scan, _ = self._walked(lambda batches: self._scan(most).run(batches), _FIRST_BLOCKS)
            table, met = scan.table, scan.met
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

    def read(self, offset: int, size: int, encoding: int, field: str) -> Bytes:
        """Read one member, as described in the facts; gzipped text is decompressed.

        Raises FieldError for content that is damaged, cut or above a limit.
        """
        if size > self._limits.member_bytes:
            raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
        if encoding == SPARSE:
            try:
                data: Bytes = read_sparse(self._file, offset, size, limits=self._limits)
            except SparseError as error:
                self._file.check_unchanged()  # a change of the file can look like damage
                raise FieldError(field, str(error)) from error
        else:
            data = self._file.read(offset, size)
        self._file.check_unchanged()
        if len(data) < size:
            raise FieldError(field, f"cut: {len(data)} of {size} bytes are in the shard")
        return gunzip(data, field, self._limits) if encoding == GZIP else data

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[Bytes]:
        """Read the members (offset, size, encoding, field) of one sample; neighbours are read with one call.

        Views of one read share its memory. Raises FieldError as `read` does.
        """
        results: list[Bytes | None] = [None] * len(members)
        spans = [(offset, size) for offset, size, _, _ in members]
        for run in _runs(members, self._limits.member_bytes):
            if len(run.members) == 1:
                results[run.members[0]] = self.read(*members[run.members[0]])
                continue
            contents = read_run(self._file.read, run, spans)
            self._file.check_unchanged()
            for i, content in zip(run.members, contents, strict=True):
                _, size, _, field = members[i]
                if len(content) < size:
                    raise FieldError(field, f"cut: {len(content)} of {size} bytes are in the shard")
                results[i] = content
        return [content for content in results if content is not None]

    def is_text(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def is_json(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> object:
        # The map of a sparse member says what is read of it.
        return self._file.expect([(offset, size) for offset, size, encoding, _ in members if encoding != SPARSE])

    def close(self) -> None:
        self._file.close()


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


def _runs(members: Sequence[tuple[int, int, int, str]], member_bytes: int) -> list[Run]:
    """Group members to read together. A member that is not RAW, or above the limit, is a run of its own."""
    alone = {i: None for i, (_, size, encoding, _) in enumerate(members) if encoding != RAW or size > member_bytes}
    near = [i for i in range(len(members)) if i not in alone] if alone else range(len(members))
    runs = [
        Run([near[i] for i in run.members], run.start, run.stop)
        for run in runs_of([members[i][:2] for i in near], gap_bytes=COALESCE_GAP_BYTES)
    ]
    return runs + [Run([i], members[i][0], members[i][0] + members[i][1]) for i in alone]


def bytes_read_together(members: Sequence[tuple[int, int, int, str]]) -> int:
    """Return the bytes that `TarShard.read_many` reads for members of one sample: the members and gaps between them."""
    largest = max((size for _, size, _, _ in members), default=0)
    return sum(run.stop - run.start for run in _runs(members, largest))
