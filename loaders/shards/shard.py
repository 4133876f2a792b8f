"""The interface of an open shard, how shards are read, and the entry that the index stores for each shard.

The facts table: one row per member of a shard, in shard order. Filled by the readers, read by the index.

Columns: `sample` (ordinal in the shard), `key`, `field`, `kind` (a code of `modalities.builtin.KINDS`, 255 for any
other field), `offset` and `size` of the content (Parquet: row number, bytes), `encoding`, `header0` and `header1` (from
the probe of the kind; 0 if it has no probe), `error`.

An error on a row of kind 255 is structural (a duplicate field, a key that comes back, a damaged archive): it makes the
sample bad under every recipe. An error on a row of another kind concerns only that field.
A shard that cannot be read at all has one row: sample 0, key and field "", kind 255, and the reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from os import PathLike
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.compact import Names, RowsOfKeys, Strings
from orchdata.loaders.errors import ContainerError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, NUM_FACTS, OTHER
from orchdata.loaders.modalities.modality import Header, read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import Container, container_of, identity_of, name_of
from orchdata.loaders.shards.fields import RAW, FieldRules
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import Matching, Paths, expand_paths, media_root_of
from orchdata.loaders.storage.remote.urls import identity, is_remote
from orchdata.loaders.storage.storage import ContentDigest, Extent, Storage

Member = tuple[int, int, int, str]
"""Offset, size, encoding and field of a member, as its row of the facts has them."""


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


class Shard(ABC):
    """An open shard. Reading is positional and safe from many threads.

    Attributes:
        url: as the user gave it.
        size: bytes as stored.
        version: of the content as stored, as `Storage.version`.
        is_new: whether it is read from a copy that was decompressed now, which no one has compared with an index.
        packed: whether it is compressed.
    """

    is_new = False
    packed = False

    def __init__(self, url: str, file: Storage, limits: Limits) -> None:
        self.url, self.size, self.version = url, file.size, file.version
        self._file = file
        self._limits = limits

    @abstractmethod
    def facts(self) -> Facts:
        """Read the whole shard and return its facts. Bad data become rows with an error, never an exception."""

    def checksum(self) -> str:
        """Return the checksum of its size and content (tar: of its size and headers), as in its facts."""
        return ContentDigest(self._file).hexdigest()

    def ranges(self, members: Sequence[Member]) -> list[Extent]:
        """Return the ranges of its file that `read_many` reads for members, as far as these say it."""
        return []

    def expect(self, members: Sequence[Member]) -> object:
        """Have the storage begin to read members that are read soon, if that saves time. Keep the result until they
        were read.
        """
        ranges = self.ranges(members)
        return self._file.expect(ranges) if ranges else None

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes | memoryview:
        """Read one member at the position given in its row of the facts. Raises FieldError(field, reason)."""
        return self.read_many([(offset, size, encoding, field)])[0]

    @abstractmethod
    def read_many(self, members: Sequence[Member]) -> list[bytes | memoryview]:
        """Read members of one sample, in the order given. Raises FieldError."""

    def is_text(self, field: str) -> bool:
        """Return whether a field is text in this container, such as a column of strings; else it is bytes."""
        return False

    def is_json(self, field: str) -> bool:
        """Return whether a field is JSON in this container, such as a column of numbers; its bytes are UTF-8 then."""
        return False

    def close(self) -> None:
        """Close its file after running reads have finished. Later reads raise ValueError."""
        self._file.close()


Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by name, shared by threads; the least recently used are dropped. Each value is made in one thread only.
    They take `max_bytes` at most; one value that is larger stays too with `or_one`.
    """

    def __init__(self, max_bytes: int, *, or_one: bool = False) -> None:
        self.max_bytes = max_bytes
        self.cached_bytes = 0
        self._or_one = or_one
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
        if (cached := self.get(name)) is not None:
            return cached
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        with making:  # this may take minutes: only threads that want the same value wait
            if (cached := self.get(name)) is not None:
                return cached
            try:
                value, size = make()
                with self._lock:
                    # Two threads may make one value at a time, if it was dropped, or `make` failed, while one waits.
                    if (replaced := self._entries.pop(name, None)) is not None:
                        self.cached_bytes -= replaced[1]
                    if size <= self.max_bytes or self._or_one:
                        self._entries[name] = value, size
                        self.cached_bytes += size
                    while self.cached_bytes > self.max_bytes and len(self._entries) > 1:
                        self.cached_bytes -= self._entries.popitem(last=False)[1][1]
                return value
            finally:
                with self._lock:
                    self._making.pop(name, None)

    def drop(self, is_meant: Callable[[Any], bool] = lambda _: True) -> list[Value]:
        """Drop the values with these names, and return them."""
        with self._lock:
            dropped = [self._entries.pop(name) for name in list(self._entries) if is_meant(name)]
            self.cached_bytes -= sum(size for _, size in dropped)
        return [value for value, _ in dropped]


def facts_of(shard: Shard, table: FactsTable, checksum: str, **more: Any) -> Facts:
    """Return the facts of a shard that was scanned; `more` are further fields of FactsMeta."""
    url, size, version = shard.url, shard.size, shard.version
    more["packed"] = shard.packed and is_remote(url)
    return Facts(table, FactsMeta(url=url, size=size, version=version, checksum=checksum, **more))


class Beginning(NamedTuple):
    """The first samples of a shard: their facts, with a checksum of these rows; whether it has no others; and how far
    it was read, above 0, as `ShardInfo.reach`.
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


SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("field", pa.string(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("encoding", pa.uint8(), nullable=False),
        *(pa.field(f"header{i}", pa.int64(), nullable=False) for i in range(NUM_FACTS)),
        pa.field("error", pa.string()),
    ]
)
_STRINGS = ("key", "field")
_NUMBERS = tuple(field.name for field in SCHEMA if field.name not in (*_STRINGS, "error"))
_ROW = ("sample", "key", "field", "kind", "offset", "size", "encoding")
HEADERS = tuple(f"header{i}" for i in range(NUM_FACTS))
NO_HEADER: Header = (0,) * NUM_FACTS
OPTIONAL = ("met", "packed")
"""Attributes of FactsMeta that only some shards have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactsMeta:
    """The shard that facts belong to, and how it was scanned.

    Attributes:
        url: as given by the user.
        size: bytes of the shard as stored (a compressed shard: compressed).
        version: of its content, as `Storage.version`.
        checksum: of its size and its headers, hex.
        ignored: number of members of each ignored field.
        lost_samples: number of samples lost to damage that have no row, if the shard records its total.
        lost_bytes: bytes of the stored shard after damage; their content is unknown.
        media: state of the media files that its records name, as `JsonLinesShard.media_state`; empty if there are none.
        packed: whether an object of storage is compressed.
        met: name -> number of samples with a field of this name as stored, of the names that `columns=` has.
    """

    url: str
    size: int
    version: str
    checksum: str
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lost_samples: int = 0
    lost_bytes: int = 0
    media: str = ""
    met: Mapping[str, int] = dataclasses.field(default_factory=dict)
    packed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-safe dict: `FactsMeta(**values)` equals this one. Of `OPTIONAL`, empty values are left out."""
        return {name: value for name in FactsMeta.__slots__ if (value := getattr(self, name)) or name not in OPTIONAL}


@dataclass(slots=True)
class FactsTable:
    """Rows of facts, by column, as in SCHEMA; `errors` by row. No row has a Python object of its own: see
    `loaders.compact`.
    """

    sample: array[int] = dataclasses.field(default_factory=partial(array, "i"))
    key: Strings = dataclasses.field(default_factory=Strings)
    field: Names = dataclasses.field(default_factory=Names)
    kind: array[int] = dataclasses.field(default_factory=partial(array, "B"))
    offset: array[int] = dataclasses.field(default_factory=partial(array, "q"))
    size: array[int] = dataclasses.field(default_factory=partial(array, "q"))
    encoding: array[int] = dataclasses.field(default_factory=partial(array, "B"))
    header0: array[int] = dataclasses.field(default_factory=partial(array, "q"))
    header1: array[int] = dataclasses.field(default_factory=partial(array, "q"))
    errors: dict[int, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample)

    def append(
        self,
        sample: int,
        key: str,
        field: str,
        *,
        kind: int = OTHER,
        offset: int = 0,
        size: int = 0,
        encoding: int = RAW,
        header: Header = NO_HEADER,
        error: str | None = None,
    ) -> None:
        """Append one row."""
        if error is not None:
            self.errors[len(self.sample)] = error
        header0, header1 = header
        self.sample.append(sample)
        self.key.append(key)
        self.field.append(field)
        self.kind.append(kind)
        self.offset.append(offset)
        self.size.append(size)
        self.encoding.append(encoding)
        self.header0.append(header0)
        self.header1.append(header1)

    def extend(self, rows: Sequence[tuple[int, str, str, int, int, int, int]]) -> None:
        """Append rows of (sample, key, field, kind, offset, size, encoding); call `extend_headers` afterwards."""
        if rows:
            for name, values in zip(_ROW, zip(*rows, strict=True), strict=True):
                getattr(self, name).extend(values)

    def extend_headers(self, headers: NDArray[np.int64]) -> None:
        """Append the headers of the rows added since the last call, int64 (n, NUM_FACTS)."""
        for name, values in zip(HEADERS, headers.T, strict=True):
            getattr(self, name).frombytes(values.astype(np.int64).tobytes())

    def fail_structure(self, row: int, reason: str) -> None:
        """Make the sample of `row` bad under every recipe. A reason that is already recorded stays."""
        self.kind[row] = OTHER
        self.errors.setdefault(row, reason)

    def all_failed(self, reason: str) -> FactsTable:
        """Return a copy of the rows in which every sample is bad for this reason."""
        rows = range(len(self))
        return replace(self, kind=array("B", [OTHER]) * len(self), errors=dict.fromkeys(rows, reason))

    def ignored(self) -> dict[str, int]:
        """Count the rows without error of each ignored field."""
        if OTHER not in self.kind:
            return {}
        errors = self.errors
        other = [row for row, kind in enumerate(self.kind) if kind == OTHER and row not in errors]
        counts = Counter(name for row in other if (name := self.field[row]))
        return dict(sorted(counts.items()))

    def places_digest(self) -> str:
        """Return a digest of which bytes of the shard each row is, and of which sample: equal, if the rows are."""
        digest = hashlib.blake2b(digest_size=8)
        for column in (self.sample, self.offset, self.size, self.encoding):
            digest.update(np.asarray(column).astype(np.int64).data)
        return digest.hexdigest()

    def arrow(self) -> pa.Table:
        """Return an Arrow table of SCHEMA."""
        columns: dict[str, Any] = {name: pa.array(np.asarray(getattr(self, name))) for name in _NUMBERS}
        columns |= {name: getattr(self, name).arrow() for name in _STRINGS}
        columns["error"] = pa.nulls(len(self), pa.string())
        if self.errors:
            columns["error"] = pa.array(map(self.errors.get, range(len(self))), pa.string())
        return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    @staticmethod
    def of_arrow(table: pa.Table) -> FactsTable:
        """Build the rows from a table of SCHEMA."""
        result = FactsTable()
        for name in _NUMBERS:
            getattr(result, name).frombytes(table.column(name).to_numpy().tobytes())
        result.key = Strings.of_arrow(table.column("key"))
        result.field = Names.of_arrow(table.column("field"))
        if table.column("error").null_count < len(table):
            reasons = enumerate(table.column("error").to_pylist())
            result.errors = {row: reason for row, reason in reasons if reason is not None}
        return result


class Rows:
    """Collects the facts of a shard, a sample at a time. Two samples with one key are both bad."""

    def __init__(self, limits: Limits) -> None:
        self.table = FactsTable()
        self.limits = limits
        self._first_row = RowsOfKeys(self.table.key)

    def distinct(self, key: str, number: int) -> str:
        """Add the number to a key that an earlier sample has: each is a sample, also if its id comes twice."""
        while key in self._first_row:
            key = f"{key}#{number}"
        return key

    def end_sample(self, key: str, first: int, reason: str) -> None:
        """Note a sample that begins at row `first`; `reason` has places for two numbers of samples, and their key."""
        earlier = self._first_row.setdefault(key, first)
        if earlier != first:
            reason = reason.format(self.table.sample[earlier], self.table.sample[first], key)
            self.table.fail_structure(earlier, reason)
            self.table.fail_structure(first, reason)


def header_of(kind: int, size: int, read: Callable[[int], bytes], limits: Limits) -> Header:
    """Return the header of a member of a built-in modality, as in its facts. Raises as `read_header`."""
    found = read_header(BUILTINS[KINDS[kind]], size, read, limits)
    return (*found, *NO_HEADER[len(found) :])


class Facts(NamedTuple):
    """The facts of a shard, with their metadata."""

    table: FactsTable
    meta: FactsMeta

    def identity(self) -> list[str]:
        """Return what a value is bound to that is kept by rows of these facts: the same rows of the same shard."""
        meta = self.meta
        return [meta.url, str(meta.size), meta.version, meta.checksum, meta.media, self.table.places_digest()]


def shard_failure(reason: str) -> FactsTable:
    """Build the facts of a shard that cannot be read at all."""
    table = FactsTable()
    table.append(0, "", "", error=reason)
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How shards are read; part of the identity of their index.

    Attributes:
        media_root: folder of the media files that records name, as an absolute path; None: records name no files.
        columns: (old name, new name) of each field to rename, by old name.
        containers: of the user's, which are asked first.
        key: as in FieldRules.
        files: where the shards are; no part of the identity.
    """

    media_root: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    containers: tuple[Container, ...] = ()
    key: str = ""
    files: Files = field(default=PLAIN_FILES, compare=False)

    def identity(self) -> list[Any]:
        """Return what an index depends on besides shards and recipe, JSON-safe; empty for the default."""
        parts: list[Any] = [] if self.media_root is None else [self.media_root]
        parts += [{"columns": [list(pair) for pair in self.columns]}] if self.columns else []
        parts += [{"key": self.key}] if self.key else []
        return parts + ([{"containers": list(map(identity_of, self.containers))}] if self.containers else [])

    def rules(self, url: str, recipe: Recipe) -> FieldRules:
        """Return how the samples of a shard at an absolute path are read under a recipe. Raises ContainerError as
        `container_of`.
        """
        container = container_of(self.containers, url) if self.containers else None
        return FieldRules(self.columns, recipe.record, recipe.keep, container, self.key)

    def root_of(self, url: str, rules: FieldRules) -> str | None:
        """Return the folder of the media that a shard names; None if its kind names none."""
        return media_root_of(url, self.media_root) if rules.container is None else None

    def looked_up(self, urls: Sequence[str]) -> Reading:
        """Return how shards are read, with sizes and versions of those that are objects of storage, from few requests.
        Raises StorageError.
        """
        remote = [url for url in map(identity, urls) if is_remote(url)]
        return replace(self, files=self.files.looked_up(remote)) if remote else self

    def expand(self, paths: Paths, matching: Matching | None = None) -> list[str]:
        """Return one path per shard, as `expand_paths`; a file or folder that a container of the user's claims is one.
        Raises as `expand_paths`; ContainerError for a container that breaks the rules, or claims none of the paths.
        """
        matching = matching or self.files.matches
        if not self.containers:
            return expand_paths(paths, matching=matching)
        urls = _expanded(paths, self.containers, matching)
        used = _claiming(self.containers, urls)
        for each in self.containers:
            if not any(each is one for one in used):
                raise ContainerError(
                    f"{name_of(each)} claims none of the {len(urls)} paths (the first is {urls[0]}): let claims() "
                    "return True for the paths that it reads, or leave the container out"
                )
        return urls


def used_containers(containers: tuple[Container, ...], paths: Paths) -> tuple[Container, ...]:
    """Return the containers that claim some of the paths: of several data sets, each takes those that it needs. Raises
    as `Reading.expand`.
    """
    return _claiming(containers, _expanded(paths, containers, PLAIN_FILES.matches)) if containers else ()


def _expanded(paths: Paths, containers: tuple[Container, ...], matching: Matching) -> list[str]:
    return expand_paths(paths, own=lambda path: bool(_claiming(containers, [path])), matching=matching)


def _claiming(containers: tuple[Container, ...], urls: list[str]) -> tuple[Container, ...]:
    claiming = [container_of(containers, identity(url)) for url in urls]
    return tuple(each for each in containers if any(each is one for one in claiming))


PLAIN = Reading()


def listed_paths(paths: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """Return the given paths and patterns, one by one. Raises TypeError for anything else."""
    given: list[str | PathLike[str]] = []
    for path in [paths] if isinstance(paths, str | PathLike) or not isinstance(paths, Iterable) else paths:
        if not isinstance(path, str | PathLike):
            got = repr(path)[:100]
            if hasattr(paths, "__getitem__") and not isinstance(paths, list | tuple | dict):
                got = f"a {type(paths).__name__}: od.DataLoader takes a data set of torch or Hugging Face itself"
            raise TypeError(f"ShardDataset takes a path, a pattern or a list of these, got {got}")
        given.append(path)
    return given
