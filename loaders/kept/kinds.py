"""All kinds of kept files, in one table. A kind has a folder of its own, below the cache folder.

A new kind of file is one entry here: then it is listed and pruned, and what killed processes leave of it is removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from orchdata.loaders.storage.node.entries import SUM_SUFFIX
from orchdata.loaders.versions import (
    COSTS_FORMAT,
    FACTS_FORMAT,
    FIELDS_FORMAT,
    SIZES_FORMAT,
    TABLE_FORMAT,
    TEXTS_FORMAT,
)

_DIGEST: Final = re.compile("[0-9a-f]{32,64}$")
LOCKS: Final = "locks"
"""The folder of locks: never removed, because a process may just be waiting for one."""


class Sealed(NamedTuple):
    """A kind of sealed files.

    Attributes:
        format: of this release.
        shards: head of a file -> the shards that it is of.
    """

    format: int
    shards: Callable[[Mapping[str, Any]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of kept files.

    Attributes:
        folder: its name in the cache folder.
        content: what they have, for people.
        suffixes: of their names, after a digest; other files in the folder are not ours.
        sealed: what their first bytes may say, see `storage.sealed`; none: they are other files.
        companions: suffixes of files next to one, besides its mark.
        claims: the file in `LOCKS` on which a writer claims the path of what it writes, and reads after that.
        is_held: whether processes that are running need the file, and hold it.
    """

    folder: str
    content: str
    suffixes: tuple[str, ...]
    sealed: Mapping[bytes, Sealed] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    claims: str | None = None
    is_held: bool = False

    def has(self, name: str) -> bool:
        """Whether a file of this name may be of the kind: what does not say itself what it is must have a digest."""
        return name.endswith(self.suffixes) if self.sealed else self.names(name)

    def names(self, name: str) -> bool:
        """Whether orchdata gives files of the kind such a name."""
        return name.endswith(self.suffixes) and is_digest(name)


def is_digest(name: str) -> bool:
    """Return whether a file has a name as orchdata gives it: a digest, and a suffix.

    A folder of the user's own may have the name of a folder of kept files, such as `shards`.
    """
    return _DIGEST.search(name.partition(".")[0]) is not None


def _of_url(head: Mapping[str, Any]) -> list[str]:
    return [head["url"]]


def _of_facts(head: Mapping[str, Any]) -> list[str]:
    return [head["meta"]["url"]]


def _of_first(name: str) -> Callable[[Mapping[str, Any]], list[str]]:
    return lambda head: [head[name][0]]


def _of_shards(head: Mapping[str, Any]) -> list[str]:
    return [shard[0] for shard in head["shards"]]


def _of_none(_: Mapping[str, Any]) -> list[str]:
    return []


KINDS: Final = (
    Kind(
        folder="facts",
        content="places and headers of members",
        suffixes=(".facts", ".headers"),
        sealed={b"fact": Sealed(FACTS_FORMAT, _of_facts), b"head": Sealed(FACTS_FORMAT, _of_first("meta"))},
    ),
    Kind(
        folder="texts",
        content="counts of texts",
        suffixes=(".texts",),
        sealed={b"text": Sealed(TEXTS_FORMAT, _of_first("meta"))},
    ),
    Kind(
        folder="sizes",
        content="sizes of parts that are counted from their bytes",
        suffixes=(".sizes",),
        sealed={b"size": Sealed(SIZES_FORMAT, _of_first("meta"))},
    ),
    Kind(
        folder="costs",
        content="costs of a shard under a recipe",
        suffixes=(".costs",),
        sealed={b"cost": Sealed(COSTS_FORMAT, _of_url)},
        claims="index",
    ),
    Kind(
        folder="fields",
        content="values of index_fields",
        suffixes=(".fields", ".merged"),
        sealed={b"flds": Sealed(FIELDS_FORMAT, _of_first("shard")), b"merg": Sealed(FIELDS_FORMAT, _of_none)},
        claims="fields",
        is_held=True,
    ),
    Kind(
        folder="index",
        content="indexes",
        suffixes=(".index",),
        sealed={b"indx": Sealed(TABLE_FORMAT, _of_shards)},
        claims="index",
        is_held=True,
    ),
    Kind(
        folder="item_costs",
        content="costs of map-style items",
        suffixes=(".costs",),
        sealed={b"item": Sealed(1, _of_none)},
    ),
    Kind(folder="arrays", content="arrays of loaders with workers", suffixes=(".int64",), is_held=True),
    Kind(folder="shards", content="decompressed shards", suffixes=(".tar",), companions=(SUM_SUFFIX,)),
    Kind(folder="copies", content="copies of shards of object storage", suffixes=(".copy",), companions=(SUM_SUFFIX,)),
    Kind(folder="packing", content="which models keep packed samples apart", suffixes=(".json",)),
)
