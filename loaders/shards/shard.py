"""A shard: what every container of samples answers, and what the index keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchdata.loaders.shards.facts_table import Facts


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard as it was indexed.

    Attributes:
        size: bytes as stored.
        checksum: of size and headers.
        version: `Storage.version`.
        lost_samples: that damage hides, where the shard tells how many it had; they have no row.
        lost_bytes: behind damage, whose samples are not known.
        media_root: folder that the files lie below which its records name; empty for shards that hold their media.
    """

    url: str
    size: int
    checksum: str
    version: str = ""
    lost_samples: int = 0
    lost_bytes: int = 0
    media_root: str = ""

    def as_list(self) -> list[Any]:
        """JSON-safe; the same as arguments make the same again."""
        return [getattr(self, name) for name in ShardInfo.__slots__]


class Shard(Protocol):
    """An open shard. Reading is positional and safe from many threads.

    Attributes:
        url: as the user gave it.
        size: bytes as stored.
        version: of the content as stored, as `Storage.version`.
    """

    url: str
    size: int
    version: str

    def facts(self) -> Facts:
        """Its facts, from a full pass. Bad data are rows with an error, never an exception."""
        ...

    def checksum(self) -> str:
        """Of its size and headers (Parquet: its whole content), as in its facts."""
        ...

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes | memoryview:
        """Content of one member, found where its row of the facts says. Raises FieldError(field, reason)."""
        ...

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Members (offset, size, encoding, field) of one sample, in the order given. Raises FieldError."""
        ...

    def close(self) -> None:
        """Give its file back, once reads under way have ended. Reading afterwards is a ValueError."""
        ...
