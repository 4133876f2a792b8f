"""Opening shards: path -> a shard that lists its members and reads them by position. Open shards are shared and few.

path --the user's container that claims it, or its suffix--> a Shard

Shards that changed since they were indexed are found by size and modification time, then by their headers.

shards of the index --stat--> same size and time: unchanged
                          --> another size: changed
                          --> same size, another time: a copy, or changed: compare the checksum of the headers

Named media are checked again before a run: the missing ones, and a sample of the others.

missing when indexed --does one exist now?--> if so, measure the shards with missing media again
there when indexed   --same size and modification time?--> if not, measure all shards that name media again
"""

from __future__ import annotations

import ast
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, suppress
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import (
    NOT_DATA,
    ContainerError,
    DataError,
    DecodeError,
    FieldError,
    ShardError,
    StaleIndexError,
    StorageError,
    pass_trouble,
)
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at, pass_shortage
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.pace import in_threads
from orchdata.loaders.shards import container
from orchdata.loaders.shards.arrow import ArrowShard
from orchdata.loaders.shards.cells import declared_kind, sniff
from orchdata.loaders.shards.columns import ParquetShard
from orchdata.loaders.shards.container import Container, ShardSource, identity_of, name_of
from orchdata.loaders.shards.fields import GZIP, NO_RULES, OWN_BYTES, FieldRules, Met, classify_renamed, printable
from orchdata.loaders.shards.lines import JsonLinesShard
from orchdata.loaders.shards.named_media import MISSING, MediaFolder
from orchdata.loaders.shards.shard import (
    NO_HEADER,
    Facts,
    FactsTable,
    Member,
    Recent,
    Rows,
    Shard,
    ShardInfo,
    facts_of,
    header_of,
    shard_failure,
)
from orchdata.loaders.shards.tar import TarShard, gunzip, open_decompressed
from orchdata.loaders.storage.cache import CacheFolder, copy_name
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.local import LocalFolder, is_folder, version
from orchdata.loaders.storage.paths import (
    ARROW_SUFFIXES,
    PARQUET_SUFFIXES,
    TAR_SUFFIXES,
    compression,
    is_compressed,
    media_root_of,
    suffix_of,
)
from orchdata.loaders.storage.remote.objects import in_order
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion, ReadBytes, Storage
from orchdata.loaders.watch import SCANNING, here

NO_CONTAINERS: Final[Mapping[str, Container]] = MappingProxyType({})
_TEXT_BYTES: Final = 64 << 20
_FILES: Final = 64
_OBJECTS: Final = 1024
"""Open shards: an object that is opened again costs no request, but the footer of a Parquet file does."""


def open_shard(
    url: str,
    *,
    limits: Limits,
    cache: CacheFolder,
    media_root: str | None = None,
    moved_media: bool = False,
    rules: FieldRules = NO_RULES,
    reads: ReadBytes | None = None,
    files: Files = PLAIN_FILES,
    known: FileVersion | None = None,
    packed: bool | None = None,
    whole: bool = False,
) -> Shard:
    """Open a shard by the user's container that claims it, or by its suffix. A compressed one is first decompressed
    into the cache, once. Raises ValueError for an unknown suffix; ShardError.

    Args:
        moved_media: whether the files below `media_root` were in another folder when the shard was indexed.
        reads: counts all bytes read from it, now and later, and from the files that it names.
        known, packed: of an object, from the index: then no request is made to open it.
        whole: whether all of it will be read, from its start to its end.
    """
    files = files.of(url)
    if rules.container is not None:
        is_local_folder = not is_remote(url) and is_folder(url)
        storage = LocalFolder(url) if is_local_folder else files.open(url, known, reads)
        return OpenedShard(rules.container, storage, rules, limits)
    suffix, file = suffix_of(url), files.open(url, known, reads)
    if suffix in PARQUET_SUFFIXES + ARROW_SUFFIXES:
        kind = ParquetShard if suffix in PARQUET_SUFFIXES else ArrowShard
        return kind(url, file, limits=limits, rules=rules.of_columns)

    # Decide by content whether a tar is compressed: webdataset also reads a gzipped .tar, and a plain .tar.gz.
    content: Storage = in_order(file) if whole else file
    file, is_new, is_tar = content, False, suffix in TAR_SUFFIXES
    if not is_tar and not is_compressed(url):
        packed = False
    elif packed is None:
        packed = compression(file.read(0, 4)) is not None
    if packed:
        try:
            copy, is_new = open_decompressed(file, limits=limits, cache=cache)
        finally:
            file.close()
        copy.count = None if reads is None else reads.cache
        content = copy
    if is_tar:
        shard: Shard = TarShard(url, content, limits=limits, names=rules.columns, key=rules.key)
    else:
        root, moved = media_root_of(url, media_root), moved_media
        how: dict[str, Any] = {"media_root": root, "moved_media": moved, "rules": rules, "reads": reads, "files": files}
        shard = JsonLinesShard(url, content, limits=limits, **how)
    shard.size, shard.version, shard.is_new, shard.packed = file.size, file.version, is_new, packed
    return shard


def open_indexed(
    url: str,
    indexed: ShardInfo,
    *,
    limits: Limits,
    cache: CacheFolder,
    record: UserFunction | None = None,
    containers: Mapping[str, Container] = NO_CONTAINERS,
    reads: ReadBytes | None = None,
    files: Files = PLAIN_FILES,
    compared: dict[str, str] | None = None,
) -> Shard:
    """Open a shard that was indexed before. Raises StaleIndexError if it has changed, and as `open_shard`.
    `compared`: url -> version whose content was found to be the indexed one; it is not read for that again.
    """
    rules = rules_of(indexed, containers, record)
    root = indexed.media_root or None
    how: dict[str, Any] = {"files": files, "moved_media": indexed.moved_media}
    if is_remote(url):
        how |= {"known": FileVersion(indexed.size, indexed.version), "packed": indexed.packed}
    try:
        shard = open_shard(url, limits=limits, cache=cache, media_root=root, rules=rules, reads=reads, **how)
    except StaleIndexError:
        raise
    except ShardError as error:
        now = files.version(url)  # of a changed shard this says nothing about the samples that were indexed
        if now is None or now == (indexed.size, indexed.version):
            raise
        reason = (
            f"was changed since it was indexed, and cannot be opened now: {error.reason}: run `orchdata index` again"
        )
        raise StaleIndexError(url, reason) from error
    try:
        compared = {} if compared is None else compared
        difference = describe_change(shard, indexed, compared.get(url))
        if difference is not None:
            if shard.is_new:  # the next process must compare its content too
                cache.remove_entry(copy_name(url, FileVersion(shard.size, shard.version)))
            raise StaleIndexError(url, f"{difference}: run `orchdata index` again")
        if not indexed.reach and shard.version != indexed.version:
            compared[url] = shard.version
    except BaseException:
        shard.close()
        raise
    return shard


def rules_of(indexed: ShardInfo, containers: Mapping[str, Container], record: UserFunction | None = None) -> FieldRules:
    """Return how the samples of an indexed shard are read. Raises ContainerError if its container is not given."""
    if indexed.container and indexed.container not in containers:
        raise ContainerError(f"{indexed.url} was indexed with a container of yours: pass the same containers= again")
    return FieldRules(indexed.columns, record, container=containers.get(indexed.container), key=indexed.key)


def by_identity(containers: Iterable[Container]) -> dict[str, Container]:
    """Return the user's containers by their identity, as an index stores it."""
    return {identity_of(container): container for container in containers}


class OpenShards:
    """Open shards, shared by threads; the least recently used are dropped, and close when the last thread that reads
    them is done.

    Args:
        containers: of the user's, by identity: a class of the main program has another name in worker processes.
        any_remote: whether any of them is an object of storage, which is read ahead.
        blank: rows that are never read.
        capacity: the number of shards that stay open; default: few files, and more objects, which take no descriptor.

    Attributes:
        reads: bytes read from all of them; callers that read members add to its `used`.
        texts: results that callers computed recently from texts that are used several times.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        cache: CacheFolder,
        containers: Mapping[str, Container] = NO_CONTAINERS,
        files: Files = PLAIN_FILES,
        any_remote: bool = False,
        blank: Set[int] = frozenset(),
        capacity: int | None = None,
    ) -> None:
        capacity = (_OBJECTS if any_remote else _FILES) if capacity is None else capacity
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.reads = ReadBytes()
        self.texts: Recent[Any] = Recent(_TEXT_BYTES)
        self._limits = limits
        self._cache = cache
        self._containers = containers
        self._files = files
        self.any_remote = any_remote
        self.blank = blank
        self._compared: dict[str, str] = {}
        self._shards: Recent[Shard] = Recent(capacity)  # dropped without close: other threads may be reading them

    def get(self, url: str, indexed: ShardInfo | None = None, record: UserFunction | None = None) -> Shard:
        """Return the open shard. When it is opened, it is compared with `indexed`, its entry in the index; `record`
        makes the records of files of records. Raises StaleIndexError if it has changed, and as `open_shard`.
        """

        def opened() -> tuple[Shard, int]:
            how: dict[str, Any] = {"limits": self._limits, "cache": self._cache, "reads": self.reads}
            how["files"] = self._files
            if indexed is None:
                return open_shard(url, rules=FieldRules(record=record), **how), 1
            how |= {"containers": self._containers, "compared": self._compared}
            return open_indexed(url, indexed, record=record, **how), 1

        how = ((), "", 0, "") if indexed is None else (indexed.columns, indexed.container, indexed.reach, indexed.key)
        return self._shards.made((url, *how, "" if record is None else record.id), opened)

    def close(self) -> None:
        """Close all. Shards requested later are opened again."""
        for shard in self._shards.drop():
            shard.close()


def describe_change(shard: Shard, indexed: ShardInfo, compared: str | None = None) -> str | None:
    """Describe how the shard differs from the indexed one; None if it is the same. May read all headers, but not of a
    version that was compared before.
    """
    if shard.size != indexed.size:
        return f"has {shard.size} bytes, {indexed.size} when it was indexed"
    # A copy of the same data has another modification time; equal headers show that it is a copy. For Parquet all bytes
    # are compared: a damaged page can crash the library that decodes it.
    # Of a shard whose beginning alone was indexed, nothing else is compared.
    if indexed.reach:
        return None if shard.version == indexed.version else "has another modification time than when it was indexed"
    is_unsure = shard.version not in (indexed.version, compared) or shard.is_new
    if is_unsure and shard.checksum() != indexed.checksum:
        kept = "" if shard.version != indexed.version else " and modification time (use `orchdata index --again`)"
        return f"was rewritten since it was indexed, with the same size{kept} and other content"
    return None


class OpenedShard(Shard):
    """An open shard of a container of the user's; closes its storage. Raises ShardError if the container's `open`
    failed.
    """

    def __init__(self, opener: Container, storage: Storage | LocalFolder, rules: FieldRules, limits: Limits) -> None:
        super().__init__(storage.url, storage, limits)
        self._name = name_of(opener)
        self._names = dict(rules.columns)
        self._stored = {new: old for old, new in rules.columns}
        self._met = Met(rules.columns)
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._shard: container.Shard = self._called("open()", lambda: opener.open(ShardSource(storage)))
        except BaseException:
            storage.close()
            raise
        self._finalizer = weakref.finalize(self, _close, self._shard, storage)
        self._finalizer.atexit = False

    def checksum(self) -> str:
        """Return the checksum of its whole content."""
        return self._file.checksum() if isinstance(self._file, LocalFolder) else super().checksum()

    def facts(self) -> Facts:
        """Read every sample once. Bad samples become rows with an error. Raises ShardError."""
        table, checksum = self._scan(), self.checksum()
        self._file.check_unchanged()
        return facts_of(self, table, checksum, ignored=table.ignored(), met=self._met.counts)

    def read_many(self, members: Sequence[Member]) -> list[bytes | memoryview]:
        """Read the members of one sample; the user's `read` is called once. Raises FieldError."""
        contents: list[bytes | memoryview] = []
        field = members[0][3]
        try:
            for (row, size, _, field), data in zip(members, self._read([row for row, *_ in members]), strict=True):
                content = self._content(field, data)
                if len(content) != size:
                    raise FieldError(
                        field,
                        f"{self._name}: read([{row}]) returns {len(content)} bytes now, and {size} bytes when it was "
                        "indexed: it must return the same each time. If the container was changed, raise its `version`",
                    )
                contents.append(content)
        except (FieldError, ShardError) as error:
            self._file.check_unchanged()  # a change of the file can look like damage
            raise error if isinstance(error, FieldError) else FieldError(field, error.reason) from error
        self._file.check_unchanged()
        return contents

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._finalizer()

    def _called(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function of the user's. Raises ShardError for an exception that may be about the data."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.url}: read after close")
            try:
                return function()
            except NOT_DATA:
                raise
            except Exception as error:
                pass_shortage(error)
                pass_trouble(error)
                said = error.reason if isinstance(error, ShardError) else " ".join(str(error).split())[:200]
                raise self._unfit(f"{what} raised {type(error).__name__}{f': {said}' if said else ''}") from error

    def _unfit(self, reason: str) -> ShardError:
        return ShardError(self.url, f"{self._name}: {reason}")

    def _read(self, rows: Sequence[int]) -> list[Any]:
        """Return what the user's function returns for some rows. Raises ShardError."""
        found: list[Any] = self._called(f"read({list(rows)})", lambda: list(self._shard.read(list(rows))))
        if len(found) != len(rows):
            raise self._unfit(f"read() returned {len(found)} values for {len(rows)} rows")
        return found

    def _content(self, field: str, data: Any) -> bytes:
        """Return a value as bytes, decompressed. Raises FieldError."""
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogatepass")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise FieldError(field, f"{self._name}: read() returned a {type(data).__name__}: return bytes, or a str")
        _, encoding = classify_renamed(self._stored.get(field, field).lower(), field.lower())
        return gunzip(bytes(data), field, self._limits) if encoding == GZIP else bytes(data)

    def _scan(self) -> FactsTable:
        given = self._called("facts()", lambda: self._shard.facts())
        try:
            keys, fields = (given.column(name).to_pylist() for name in ("key", "field"))
        except (AttributeError, KeyError):
            reason = f"facts() returned a {type(given).__name__}: return a table with the columns key and field"
            raise self._unfit(reason) from None
        if not keys:
            raise self._unfit("facts() has no rows: no samples")
        if bad := [each for each in (*keys, *fields) if not isinstance(each, str) or not each]:
            raise self._unfit(f"facts() gives the key or field {bad[0]!r:.80}: these are strings, and not empty")
        if len(keys) > self._limits.shard_rows:
            return shard_failure(f"more than {self._limits.shard_rows} fields, above Limits.shard_rows")
        found, current = Rows(self._limits), here()
        table = found.table
        reason = (
            f"{self._name}: samples {{}} and {{}} both have the key {{!r}}: give each sample of a shard a different "
        )
        reason += "key, and its rows one after the other"
        for sample, (key, group) in enumerate(groupby(range(len(keys)), keys.__getitem__)):
            rows, first = list(group), len(table)
            current.key = name = printable(key)
            current.fraction = SCANNING * rows[0] / len(keys)
            try:
                contents = self._read(rows)
            except ShardError as error:
                contents = [error] * len(rows)
            for row, data in zip(rows, contents, strict=True):
                self._add(table, sample, row, name, fields[row], data)
            names = [table.field[row] for row in rows]
            if twice := [name for name in names if names.count(name) > 1]:
                why = f"{self._name}: facts() gives two fields with the name {twice[0]!r}, after columns="
                table.fail_structure(rows[-1], why)
            found.end_sample(table.key[first], first, reason)
        current.key = None
        return table

    def _add(self, table: FactsTable, sample: int, row: int, key: str, stored: str, data: Any) -> None:
        if self._names:
            self._met.add([stored])
        name = printable(self._names.get(stored, stored))
        for what, given in (("key", key), ("field's name", name)):
            if (too_long := self._limits.name_error(what, given)) is not None:
                field = "" if what == "key" else shortened(name)
                table.append(sample, shortened(key) if what == "key" else key, field, error=too_long)
                return
        kind, size, header, error = OTHER, 0, NO_HEADER, None
        try:
            if isinstance(data, ShardError):
                raise FieldError(name, data.reason)
            content = self._content(name, data)
            size = len(content)
            kind, _ = classify_renamed(stored.lower(), name.lower())
            kind = kind if kind != OTHER else declared_kind(name, None)
            kind = kind if kind != OTHER else sniff(content)
            error = self._limits.size_error(size, is_text=kind == TEXT) if kind != OTHER else None
            if error is None and kind not in (TEXT, OTHER):
                header = header_of(kind, size, lambda count: content[:count], self._limits)
        except (FieldError, DecodeError) as problem:
            error = problem.reason
        except MemoryError as problem:
            raise measured_at(problem, self.url, key, name) from problem
        more: dict[str, Any] = {"kind": kind, "offset": row, "size": size, "header": header, "error": error}
        table.append(sample, key, name, encoding=OWN_BYTES, **more)


def _close(shard: container.Shard, storage: Storage | LocalFolder) -> None:
    with suppress(Exception):  # nothing is read afterwards
        getattr(shard, "close", lambda: None)()
    storage.close()


_NONE_LISTED: Final[Mapping[str, FileVersion]] = MappingProxyType({})
_THREADS = 16
"""Network file systems answer many requests at the same time."""
_SHARDS_PER_TASK = 1000
"""Shards that a thread checks in one task: a task per shard costs more than a stat of a local file."""
MOST_SHARDS = 1024
"""Most shards with compared headers: a data set that was copied is not read completely before training starts."""
MOST_BYTES = 4 << 30
"""Most bytes read from files without separate headers, which are compared completely."""


def find_changes(
    shards: Sequence[ShardInfo],
    *,
    limits: Limits,
    cache: CacheFolder,
    containers: Mapping[str, Container] = NO_CONTAINERS,
    listed: Mapping[str, FileVersion] = _NONE_LISTED,
) -> tuple[list[str], int]:
    """Check each local shard of an index once. A shard that cannot be checked now counts as unchanged. Objects are
    compared with a listing (`listed`), if there is one: each of their reads is of the version that was indexed.

    Returns the urls of shards that must be measured again; and how many with the same size and another time were not
    compared: each is checked when it is opened.
    """
    tasks = [shards[start : start + _SHARDS_PER_TASK] for start in range(0, len(shards), _SHARDS_PER_TASK)]
    touched = list(chain.from_iterable(in_threads(lambda task: list(_touched(task, listed)), tasks, _THREADS)))

    # Another size is certainly a change, and so is another etag. Of the others, compare as many as can be read in
    # reasonable time.
    is_sure = [size != shard.size or is_remote(shard.url) for shard, size in touched]
    changed = [shard for (shard, _), sure in zip(touched, is_sure, strict=True) if sure]
    unknown = [shard for (shard, _), sure in zip(touched, is_sure, strict=True) if not sure]
    compared, read_bytes = [], 0
    for shard in unknown[:MOST_SHARDS]:
        read_bytes += 0 if shard.url.endswith(".tar") else shard.size
        if read_bytes <= MOST_BYTES:
            compared.append(shard)
    differ = in_threads(lambda shard: _differs(shard, limits, cache, containers), compared, _THREADS)
    changed += [shard for shard, is_other in zip(compared, differ, strict=True) if is_other]
    return [shard.url for shard in changed], len(unknown) - len(compared)


def _touched(shards: Sequence[ShardInfo], listed: Mapping[str, FileVersion]) -> Iterator[tuple[ShardInfo, int]]:
    """Yield each shard with another size or version than in the index, and its size now."""
    for shard in shards:
        try:
            now = listed.get(shard.url) if is_remote(shard.url) else version(shard.url, retries=False)
        except StorageError:
            continue  # opening it later raises the error
        if now is not None and now != (shard.size, shard.version):
            yield shard, now.size


def _differs(indexed: ShardInfo, limits: Limits, cache: CacheFolder, containers: Mapping[str, Container]) -> bool:
    if indexed.reach:
        return True  # its beginning is measured again as fast as it is compared
    try:
        with closing(
            open_shard(
                indexed.url,
                limits=limits,
                cache=cache,
                media_root=indexed.media_root or None,
                rules=rules_of(indexed, containers),
            )
        ) as shard:
            return describe_change(shard, indexed) is not None
    except ShardError:
        return True  # it could be read when it was indexed: the build records what is wrong


MOST_FILES: Final = 1024
"""Most files that are checked, of the missing ones and of the others."""
_ROWS_PER_SHARD: Final = 8
_NAMED: Final = re.compile(rf"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): {MISSING}""")


class Indexed(Protocol):
    """The part of an index that is used here."""

    @property
    def shards(self) -> Sequence[ShardInfo]: ...

    def bad_rows(self) -> NDArray[np.int64]: ...
    def failure(self, row: int) -> DataError: ...
    def rows_of(self, shard: int) -> NDArray[np.int64]: ...
    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]: ...


def changed_media(index: Indexed, limits: Limits, record: UserFunction | None = None) -> list[str]:
    """Return the urls of shards with media that may have changed since they were indexed. Raises StorageError if a file
    cannot be checked now. Of objects and what they name, each read is of the indexed version.
    """
    bad, left = index.bad_rows(), MOST_FILES
    checked: list[str] = []
    missing: list[str] = []
    is_any_there = has_any_changed = False
    for number, shard in enumerate(index.shards):
        is_local = not (is_remote(shard.url) or is_remote(shard.media_root))
        if not shard.media_root or not is_local or shard.container or shard.moved_media:
            continue
        # Some of the missing files.
        rows, folder = index.rows_of(number), MediaFolder(shard.media_root)
        first, stop = np.searchsorted(bad, [rows[0], rows[-1] + 1]).tolist() if len(rows) else (0, 0)
        reasons = (index.failure(row).reason for row in bad[first : min(stop, first + left)].tolist())
        names = [str(ast.literal_eval(name[1])) for name in map(_NAMED.search, reasons) if name is not None]
        left -= len(names)
        missing += [shard.url] if names else []
        is_any_there = is_any_there or any(_is_there(folder, name) for name in names)
        # Some of the others.
        checked.append(shard.url)
        if not has_any_changed and len(checked) <= MOST_FILES // _ROWS_PER_SHARD:
            rows = np.setdiff1d(rows, bad, assume_unique=True)
            chosen = rows[:: max(1, len(rows) // _ROWS_PER_SHARD)][:_ROWS_PER_SHARD].tolist()
            has_any_changed = _has_changed(shard, map(index.read_spec, chosen), limits, record)
    return checked if has_any_changed else missing if is_any_there else []


def _is_there(folder: MediaFolder, name: str) -> bool:
    try:
        with folder.open(name):
            return True
    except DecodeError:
        return False


def _has_changed(
    shard: ShardInfo, samples: Iterable[Sequence[Member]], limits: Limits, record: UserFunction | None
) -> bool:
    """Return whether a file has changed that one of these samples of a shard names."""
    try:
        rules = FieldRules(shard.columns, record)
        opened = open_shard(shard.url, limits=limits, cache=CacheFolder(), media_root=shard.media_root, rules=rules)
        with closing(opened) as file:
            return isinstance(file, JsonLinesShard) and not all(map(file.names_same, samples))
    except ShardError:
        return False  # opening it later raises the error
