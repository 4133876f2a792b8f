"""The interface of an open shard, and the entry that the index stores for each shard."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from orchdata.loaders.compact import Names
from orchdata.loaders.shards.facts_table import Facts, FactsMeta, FactsTable
from orchdata.loaders.storage.remote.urls import is_remote


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard at the time it was indexed.

    Attributes:
        size: bytes as stored.
        checksum: of size and headers.
        version: `Storage.version`.
        lost_samples: number of samples lost to damage, if the shard records its total; they have no row.
        lost_bytes: bytes after damage; the samples in them are unknown.
        media_root: folder of the media files that its records name; empty for shards that contain their media.
        columns: (old name, new name) of each renamed field.
        container: digest of the description of the user's container that opens it; empty: by its suffix.
        reach: bytes of its content that were read, decompressed, if only its beginning was indexed. The checksum is
            then of what the facts of these samples say. 0: all of it was indexed.
        packed: whether an object of storage is compressed; of files this is not recorded, but read from them.
        moved_media: whether the files that its records name were in another folder when it was indexed. Their versions
            are then unknown: sizes and headers are compared.
        key: as in FieldRules.
    """

    url: str
    size: int
    checksum: str
    version: str = ""
    lost_samples: int = 0
    lost_bytes: int = 0
    media_root: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    container: str = ""
    reach: int = 0
    packed: bool = False
    moved_media: bool = False
    key: str = ""

    def as_list(self) -> list[Any]:
        """Return JSON-safe values for `of_list`. The last ones are left out if they are empty."""
        *values, columns, container, reach, packed, moved, key = (getattr(self, name) for name in ShardInfo.__slots__)
        more = [[list(pair) for pair in columns], container, reach, packed, moved, key]
        while more and not more[-1]:
            more.pop()
        return [*values, *more]

    @classmethod
    def of_list(cls, values: Sequence[Any]) -> ShardInfo:
        """Return the entry that `as_list` described."""
        names = list(ShardInfo.__slots__)
        given = dict(zip(names, values, strict=False))
        return cls(**given | {"columns": tuple((old, new) for old, new in given.get("columns", ()))})


class Shard(Protocol):
    """An open shard. Reading is positional and safe from many threads.

    Attributes:
        url: as the user gave it.
        size: bytes as stored.
        version: of the content as stored, as `Storage.version`.
        is_new: whether it is read from a copy that was decompressed now, which no one has compared with an index.
        packed: whether it is compressed.
    """

    url: str
    size: int
    version: str
    is_new: bool
    packed: bool

    def facts(self) -> Facts:
        """Read the whole shard and return its facts. Bad data become rows with an error, never an exception."""
        ...

    def checksum(self) -> str:
        """Return the checksum of its size and headers (Parquet: of its whole content), as in its facts."""
        ...

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes | memoryview:
        """Read one member at the position given in its row of the facts. Raises FieldError(field, reason)."""
        ...

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read members (offset, size, encoding, field) of one sample, in the order given. Raises FieldError."""
        ...

    def is_text(self, field: str, encoding: int) -> bool:
        """Return whether a field is text in this container, such as a column of strings; else it is bytes."""
        ...

    def is_json(self, field: str, encoding: int) -> bool:
        """Return whether a field is JSON in this container, such as a column of numbers; its bytes are UTF-8 then."""
        ...

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> object:
        """Begin to read members, as of `read_many`, that are read soon, if that saves time. Keep the result until they
        were read.
        """
        ...

    def close(self) -> None:
        """Close its file after running reads have finished. Later reads raise ValueError."""
        ...


def facts_of(shard: Shard, table: FactsTable, checksum: str, **more: Any) -> Facts:
    """Return the facts of a shard that was scanned; `more` are further fields of FactsMeta."""
    url, size, version = shard.url, shard.size, shard.version
    more["packed"] = shard.packed and is_remote(url)
    return Facts(table, FactsMeta(url=url, size=size, version=version, checksum=checksum, **more))


class Beginning(NamedTuple):
    """The first samples of a shard.

    Attributes:
        facts: of these samples; the checksum is of their rows, and not of the shard.
        is_whole: whether the shard has no others.
        reach: how far the shard was read, above 0, as `ShardInfo.reach`.
    """

    facts: Facts
    is_whole: bool
    reach: int


def beginning_of(shard: Shard, table: FactsTable, most: int, *, is_whole: bool, reach: int, **more: Any) -> Beginning:
    """Return a beginning with the first `most` samples of a table; `more` are further fields of FactsMeta."""
    stop = bisect_left(table.sample, most)
    if stop < len(table):
        columns = {each.name: getattr(table, each.name)[:stop] for each in fields(table) if each.name != "errors"}
        columns["field"] = Names(columns["field"])
        table = replace(table, **columns, errors={row: reason for row, reason in table.errors.items() if row < stop})
    rows = hashlib.blake2b(digest_size=16)
    for column in fields(table):
        values = getattr(table, column.name)
        listed = values if isinstance(values, dict) else list(values)
        rows.update(repr(listed).encode("utf-8", "backslashreplace"))
    facts = facts_of(shard, table, rows.hexdigest(), ignored=table.ignored(), **more)
    return Beginning(facts, is_whole, max(1, reach))
