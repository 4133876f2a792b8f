"""The interface of an open shard, and the entry that the index stores for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchdata.loaders.shards.facts_table import Facts, FactsMeta, FactsTable


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

    def as_list(self) -> list[Any]:
        """Return JSON-safe values for `of_list`. The last two are left out if they are empty."""
        *values, columns, container = (getattr(self, name) for name in ShardInfo.__slots__)
        if columns or container:
            values.append([list(pair) for pair in columns])
        return [*values, container] if container else values

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
    """

    url: str
    size: int
    version: str
    is_new: bool

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

    def close(self) -> None:
        """Close its file after running reads have finished. Later reads raise ValueError."""
        ...


def facts_of(shard: Shard, table: FactsTable, checksum: str, **more: Any) -> Facts:
    """Return the facts of a shard that was scanned; `more` are further fields of FactsMeta."""
    url, size, version = shard.url, shard.size, shard.version
    return Facts(table, FactsMeta(url=url, size=size, version=version, checksum=checksum, **more))
