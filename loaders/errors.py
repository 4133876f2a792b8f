"""Every error that reading data can raise.

OrchdataError
├── DataError          one sample cannot be used: shard, key, field, reason
├── ShardError         a shard cannot be read at all (as a value it is a DataError with an empty key)
├── MissingIndexError  more than one rank, and no index to plan from
│   └── StaleIndexError  a shard is not the one that was indexed
├── StorageError       bytes could not be read, or kept in the cache, now: a full disk, a lost mount; no fault of data
├── StateError         a state that belongs to another dataset, recipe or order
└── TooManyFailures    the failure budget of an ErrorPolicy is spent

`FieldError` is the inner form of a DataError, raised where shard and key are not known;
whoever knows them turns it into a DataError with `FieldError.at`.

Whoever makes any exception over data a failure of those data lets `NOT_DATA` through first.
"""

from __future__ import annotations

import re


class OrchdataError(Exception):
    """Base of all errors about data; arguments of the wrong kind are plain ValueError or TypeError."""


class DataError(OrchdataError):
    """One sample that cannot be used. Picklable, comparable by its four fields."""

    def __init__(self, shard: str, key: str, field: str, reason: str) -> None:
        super().__init__(shard, key, field, reason)
        self.shard = shard
        self.key = key
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        if not self.key and not self.field:  # a whole shard
            return f"{self.shard}: {self.reason}"
        return f"{self.shard}: sample {self.key!r}, field {self.field!r}: {self.reason}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataError) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


class ShardError(OrchdataError):
    """A shard that cannot be read at all."""

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard = shard
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.shard}: {self.reason}"


class MissingIndexError(OrchdataError):
    """No index exists and this process may not build one; the message names the command that does."""


class StaleIndexError(ShardError):
    """A shard differs from the one that was indexed (size or header checksum)."""


class StorageError(OrchdataError):
    """Bytes that could not be read, or written to the cache folder, now, however often it was tried.

    Whether the data are good is not known: it is never counted as a failure of a sample, and never written to an index.

    Attributes:
        url: the file it is about.
        reason: what the system said, and of what.
        errno: the system's number, or None.
    """

    def __init__(self, url: str, reason: str, errno: int | None = None) -> None:
        super().__init__(url, reason, errno)
        self.url = url
        self.reason = reason
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"


class StateError(OrchdataError):
    """A state_dict that belongs to another dataset, recipe, order or batch size; names the difference."""


class TooManyFailures(OrchdataError):
    """More samples failed than the ErrorPolicy allows."""


NOT_DATA = (StorageError, StaleIndexError, MemoryError, ImportError)
"""What says nothing about the data it was met in."""


class FieldError(Exception):
    """A field that cannot be used, before its shard and key are known. Never reaches the user."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def at(self, shard: str, key: str) -> DataError:
        return DataError(shard, key, self.field, self.reason)


def as_field_error(error: Exception, doing: str) -> FieldError:
    """What an exception that nobody expected says of a sample that could not be `doing` ("measured", "decoded")."""
    if isinstance(error, FieldError):
        return error
    return FieldError("*", f"cannot be {doing}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def reason_kind(reason: str) -> str:
    """What reasons of one kind have in common: without quoted names and numbers (`UTF-8` and `MP3` are none)."""
    return _NUMBER.sub("N", _QUOTED.sub("'...'", reason))


_QUOTED = re.compile(r"'[^']*'(, '[^']*')*")
_NUMBER = re.compile(r"(?<![A-Z\d])(?<![A-Z]-)\d+(\.\d+)?")
