"""Opening shards: path -> a shard that lists its members and reads them by position. Open shards are shared and few.

A cache of the most recently used values.

The containers of the library: which paths each claims, how it opens them.

A path --claims--> one container --open--> a Shard. Containers of the user's are asked first, see `open.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar

from orchdata.loaders.errors import ContainerError, ShardError, StaleIndexError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.arrow import ArrowShard
from orchdata.loaders.shards.container import Container, identity_of
from orchdata.loaders.shards.fields import NO_RULES, FieldRules
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.own_shard import OpenedShard
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.shards.tar import TarShard, copy_name, open_decompressed
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.local import LocalFolder
from orchdata.loaders.storage.paths import (
    ARROW_SUFFIXES,
    PARQUET_SUFFIXES,
    RECORD_SUFFIXES,
    TAR_SUFFIXES,
    compression,
    is_compressed,
    media_root_of,
    suffix_of,
)
from orchdata.loaders.storage.remote.objects import in_order
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import CountedFile, FileVersion, ReadBytes, Storage

NO_CONTAINERS: Final[Mapping[str, Container]] = MappingProxyType({})
_TEXT_BYTES: Final = 64 << 20
_FILES: Final = 64
_OBJECTS: Final = 1024
"""Open shards: an object that is opened again costs no request, but the footer of a Parquet file does."""

_Key = tuple[str, tuple[tuple[str, str], ...], str, int, str, str]
"""A shard's path, its renamed fields, its container, its reach, where its keys end, and the id of its function."""


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
    into the cache, once.

    Args:
        moved_media: whether the files below `media_root` were in another folder when the shard was indexed.
        rules: names of fields, the function that makes records, and the container.
        reads: counts all bytes read from it, now and later, and from the files below `media_root` that it names.
        files: where the shard is.
        known, packed: size and version of an object, and whether it is compressed, from the index: then no request is
            made to open it.
        whole: whether all of it will be read, from its start to its end.

    Raises:
        ValueError: unknown suffix.
        ShardError: it cannot be opened, or cannot be decompressed within the limits.
    """
    files = files.of(url)
    if rules.container is not None:
        storage = LocalFolder(url) if files.is_folder(url) else files.open(url, known, reads)
        return OpenedShard(rules.container, storage, rules, limits)
    context = OpenContext(
        limits=limits, cache=cache, media_root=media_root, moved_media=moved_media, reads=reads, files=files
    )
    container = builtin_of(url)
    file = files.open(url, known, reads)
    whole = whole and isinstance(container, TarContainer | RecordContainer)
    return container.open(in_order(file) if whole else file, context, rules, packed)


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

    Args:
        containers: of the user's, by identity.
        compared: url -> version whose content was found to be the indexed one; it is not read for that again.
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
                cache.remove_entry(copy_name(url, shard.size, shard.version))
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
    """Open shards, shared by threads; the least recently used are dropped.

    A dropped shard closes when the last thread that reads it is done.

    Args:
        limits, cache: for opening.
        containers: of the user's, by identity: a class of the main program has another name in worker processes.
        files: where the shards are.
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
        self._capacity = capacity
        self._lock = threading.Lock()
        self._shards: OrderedDict[_Key, Shard] = OrderedDict()
        self._opening: dict[_Key, threading.Lock] = {}
        self._compared: dict[str, str] = {}

    def get(self, url: str, indexed: ShardInfo | None = None, record: UserFunction | None = None) -> Shard:
        """Return the open shard. When it is opened, it is compared with `indexed`, its entry in the index.

        Args:
            record: the recipe's function, which makes the records of files of records.

        Raises:
            StaleIndexError: it has changed since it was indexed.
            ShardError, ValueError: as `open_shard`.
        """
        how = ((), "", 0, "") if indexed is None else (indexed.columns, indexed.container, indexed.reach, indexed.key)
        key = url, *how, "" if record is None else record.id
        if (shard := self._find(key)) is not None:
            return shard
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # opening may decompress for minutes: only threads that want the same shard wait
            try:
                return self._find(key) or self._open(key, indexed, record)
            finally:
                with self._lock:
                    self._opening.pop(key, None)

    def close(self) -> None:
        """Close all. Shards requested later are opened again."""
        with self._lock:
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:
            shard.close()

    def _open(self, key: _Key, indexed: ShardInfo | None, record: UserFunction | None) -> Shard:
        opening: dict[str, Any] = {"limits": self._limits, "cache": self._cache, "reads": self.reads}
        if indexed is None:
            shard = open_shard(key[0], rules=FieldRules(record=record), files=self._files, **opening)
        else:
            how: dict[str, Any] = {"containers": self._containers, "files": self._files, "compared": self._compared}
            shard = open_indexed(key[0], indexed, record=record, **how, **opening)
        with self._lock:
            self._shards[key] = shard
            while len(self._shards) > self._capacity:
                self._shards.popitem(last=False)  # without close: other threads may be reading it
        return shard

    def _find(self, key: _Key) -> Shard | None:
        with self._lock:
            shard = self._shards.get(key)
            if shard is not None:
                self._shards.move_to_end(key)
            return shard


def describe_change(shard: Shard, indexed: ShardInfo, compared: str | None = None) -> str | None:
    """Describe how the shard differs from the indexed one; None if it is the same. May read all headers.

    Args:
        compared: the version of it whose content was compared before.
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


Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by name, shared by threads; the least recently used are dropped. Each value is created in one thread only.

    Args:
        room: bytes that all cached values may take. A larger value is not cached.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, name: Hashable) -> Value | None:
        """Return the value if it is cached."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            self._entries.move_to_end(name)
            return entry[0]

    def made(self, name: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """Return the value; if it is not cached, `make` returns it with its size. Exceptions of `make` pass."""
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with making:
            if (cached := self.get(name)) is not None:
                return cached
            try:
                value, size = make()
                self._keep(name, value, size)
                return value
            finally:
                with self._lock:
                    self._making.pop(name, None)

    def _keep(self, name: Hashable, value: Value, size: int) -> None:
        with self._lock:
            if size > self._room:
                return
            self._entries[name] = value, size
            taken = sum(each for _, each in self._entries.values())
            while taken > self._room:
                _, (_, dropped) = self._entries.popitem(last=False)
                taken -= dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenContext:
    """What a shard may need besides its file.

    Attributes:
        limits: of the recipe.
        cache: folder for files that can be made again.
        media_root: folder of files that shards name; None for none.
        moved_media: whether these files were in another folder when the shard was indexed.
        reads: counts bytes; what is read from the shard's own file is counted already. None: nothing is counted.
        files: opens other files, and objects of storage.
    """

    limits: Limits
    cache: CacheFolder
    media_root: str | None = None
    moved_media: bool = False
    reads: ReadBytes | None = None
    files: Files = PLAIN_FILES


class Builtin(Protocol):
    """A container of the library, with shards that read by position."""

    def claims(self, path: str) -> bool:
        """Return whether it reads a path."""

    def open(self, source: Storage, context: OpenContext, rules: FieldRules, packed: bool | None = None) -> Shard:
        """Open a shard. Raises ShardError.

        Args:
            packed: whether it is compressed; None: its first bytes say so.
        """


@dataclass(frozen=True)
class _BySuffix:
    """A container that claims files by suffix. Which of the suffixes a path has is decided by the longest one."""

    suffixes: tuple[str, ...]

    def claims(self, path: str) -> bool:
        try:
            return suffix_of(path) in self.suffixes
        except ValueError:
            return False


@dataclass(frozen=True)
class TarContainer(_BySuffix):
    """Tars, plain or compressed."""

    suffixes: tuple[str, ...] = TAR_SUFFIXES

    def open(self, source: Storage, context: OpenContext, rules: FieldRules, packed: bool | None = None) -> Shard:
        # Decide by content whether a tar is compressed: webdataset also reads a gzipped .tar, and a plain .tar.gz.
        content, stored = _decompressed(source, context, packed)
        return TarShard(source.url, content, limits=context.limits, names=rules.columns, key=rules.key, **stored)


@dataclass(frozen=True)
class ParquetContainer(_BySuffix):
    """Parquet files."""

    suffixes: tuple[str, ...] = PARQUET_SUFFIXES

    def open(self, source: Storage, context: OpenContext, rules: FieldRules, packed: bool | None = None) -> Shard:
        return ParquetShard(source.url, source, limits=context.limits, rules=rules.of_columns)


@dataclass(frozen=True)
class ArrowContainer(_BySuffix):
    """Arrow files, as Hugging Face's `datasets` saves them."""

    suffixes: tuple[str, ...] = ARROW_SUFFIXES

    def open(self, source: Storage, context: OpenContext, rules: FieldRules, packed: bool | None = None) -> Shard:
        return ArrowShard(source.url, source, limits=context.limits, rules=rules.of_columns)


@dataclass(frozen=True)
class RecordContainer(_BySuffix):
    """JSON Lines, JSON arrays, CSV, TSV and plain text, plain or compressed."""

    suffixes: tuple[str, ...] = RECORD_SUFFIXES

    def open(self, source: Storage, context: OpenContext, rules: FieldRules, packed: bool | None = None) -> Shard:
        content, stored = source, _Stored(size=source.size, version=source.version, is_new=False, packed=False)
        if is_compressed(source.url):
            content, stored = _decompressed(source, context, packed)
        return JsonLinesShard(
            source.url,
            content,
            limits=context.limits,
            media_root=media_root_of(source.url, context.media_root),
            moved_media=context.moved_media,
            rules=rules,
            reads=context.reads,
            files=context.files,
            **stored,
        )


BUILTIN_CONTAINERS: Final[tuple[Builtin, ...]] = (
    TarContainer(),
    ParquetContainer(),
    ArrowContainer(),
    RecordContainer(),
)


def builtin_of(path: str) -> Builtin:
    """Return the container that claims a path. Raises ValueError for an unknown suffix."""
    suffix_of(path)
    return next(each for each in BUILTIN_CONTAINERS if each.claims(path))


class _Stored(TypedDict):
    """The shard as stored, if it is read from a decompressed copy: arguments of its reader."""

    size: int
    version: str
    is_new: bool
    packed: bool


def _decompressed(file: Storage, context: OpenContext, packed: bool | None) -> tuple[Storage, _Stored]:
    """Return the file, or its decompressed copy in the cache folder if its first bytes say that it is compressed."""
    stored = _Stored(size=file.size, version=file.version, is_new=False, packed=False)
    if packed is None:
        packed = compression(file.read(0, 4)) is not None
    if not packed:
        return file, stored
    try:
        content, is_new = open_decompressed(file, limits=context.limits, cache=context.cache)
    finally:
        file.close()
    counted = content if context.reads is None else CountedFile(content, context.reads.cache)
    return counted, _Stored(size=stored["size"], version=stored["version"], is_new=is_new, packed=True)
