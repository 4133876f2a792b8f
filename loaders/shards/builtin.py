"""The containers of the library: which paths each claims, how it opens them.

A path --claims--> one container --open--> a Shard. Containers of the user's are asked first, see `open.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypedDict

from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.arrow.shard import ArrowShard
from orchdata.loaders.shards.compressed import open_decompressed
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.counted import CountedFile, ReadBytes
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.storage.suffixes import (
    ARROW_SUFFIXES,
    PARQUET_SUFFIXES,
    RECORD_SUFFIXES,
    TAR_SUFFIXES,
    compression,
    is_compressed,
    media_root_of,
    suffix_of,
)


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
