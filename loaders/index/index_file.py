"""An index as a file that a user names: written by `orchdata index --out`, found by its digest, fetched once a node.

    Index --names below the common root of the paths--> FILE or URL --head--> IndexFile --copied--> index/<digest>.index

It has the rows and columns of the index, so that it is the same file whoever writes it of the same data.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from orchdata.loaders.errors import DamagedIndexError, MissingIndexError, StaleIndexError
from orchdata.loaders.index.index import KIND, Index, Place, content_fingerprint
from orchdata.loaders.index.table import TABLE_FORMAT, TableSize, TableWriter, Totals, sum_totals
from orchdata.loaders.recipe import digest
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.local import Buffer, opened, remove, replaced, status_of, write_at
from orchdata.loaders.storage.remote.objects import COPIED_AHEAD, in_order
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.sealed import body_start, finish, head_by, head_of
from orchdata.loaders.storage.storage import FileVersion

_READ_BYTES: Final = 4 << 20
_ATTEMPTS: Final = 3
_OUTAGE_SECONDS: Final = 50.0
"""As `Files.limited` takes it: 0.6 of it."""
_OPEN: Final = re.compile(r"[*?\[{\\]")
_SHARE: Final = re.compile(r"([0-9]{1,6}/[0-9]{1,6})?")


class IndexFile(NamedTuple):
    """A file with an index, as it was when the first rank looked at it."""

    url: str
    size: int
    version: str
    digest: str  # of its head, which has the checksums of its body
    root: str  # the folder that its shards were in, with a final "/"
    recipe: str  # fingerprint of the recipe that it was made under
    share: str  # the part of an index that it is, as "1/3"; "": it is whole
    verdicts: int  # as in `versions`, of the release that made it
    counts: int


def look(url: str, files: Files) -> IndexFile:
    """Return what a file is now; its head alone is read.

    Raises MissingIndexError; DamagedIndexError if it was not written as a file; StorageError.
    """
    version = files.version(url)
    if version is None:
        raise MissingIndexError(f"there is no index {url}")
    with closing(files.open(url, version)) as file:
        try:
            head = head_by(file.read, version.size, KIND, TABLE_FORMAT)
        except ValueError as error:
            raise DamagedIndexError(url, str(error)) from error
    made: list[Any] = [head.values.get(name) for name in ("root", "made_under", "share", "verdicts", "counts")]
    if [*map(type, made)] != [str, str, str, int, int] or not _SHARE.fullmatch(made[2]):
        raise DamagedIndexError(url, "it was not written by `orchdata index --out`")
    return IndexFile(url, *version, head.digest, *made)


def opened_copy(file: IndexFile, files: Files, place: Place) -> Index:
    """Return the index of a file, from the node's copy, which is made if it is missing.

    Raises DamagedIndexError if the file was replaced or damaged since it was looked at; StorageError.
    """
    cache = CacheFolder()
    path = cache.root / "index" / f"{file.digest}.index"
    for attempt in range(_ATTEMPTS):
        _make(file, files, cache, path)
        try:
            return Index(path, place=place)
        except FileNotFoundError:  # pruned before it was opened
            continue
        except DamagedIndexError as error:
            remove(path)  # the node's copy has changed on its disk, or the file never was an index
            if attempt == _ATTEMPTS - 1:
                raise DamagedIndexError(file.url, error.reason) from error
    raise DamagedIndexError(str(path), "it is removed again and again")


def fetched(file: IndexFile, files: Files, place: Place) -> Index:
    """As `opened_copy`, but an outage may last half a minute: there may be another way to the file."""
    return opened_copy(file, files.read_by(timeout=_OUTAGE_SECONDS), place)


def root_of(paths: Sequence[str]) -> str:
    """Return the folder, with a final "/", that all paths and patterns are in, as far as they name one."""
    folders = []
    for path in paths:
        found = _OPEN.search(path)
        fixed = path.rstrip("/") if found is None else path[: found.start()]
        folders.append(fixed.rpartition("/")[0].split("/"))
    common = itertools.takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))
    return "/".join(names[0] for names in common) + "/"


def write_index_file(
    indexes: Sequence[Index], url: str, files: Files, *, root: str, recipe: str, rules: Sequence[int], share: str = ""
) -> None:
    """Write an index, or one of the shards of several (of one recipe), as a file. It appears when it is complete.

    `root` is the folder that all shards are in; `recipe`, `share` and `rules` as in `IndexFile`. Raises ValueError if
    a shard is not in the folder, or comes twice; StorageError.
    """
    shards = [shard for index in indexes for shard in index.shards]
    for shard in shards:
        if not shard.url.startswith(root) or shard.reach:
            raise ValueError(f"{shard.url} is not in {root}, or indexed in part: the index cannot be written as a file")
    if twice := [url for url, times in Counter(shard.url for shard in shards).items() if times > 1]:
        raise ValueError(f"{twice[0]} is in two of the indexes that are to be merged")
    named = [replace(shard, url=shard.url[len(root) :], media_root="." if shard.media_root else "") for shard in shards]
    columns = [index.own for index in indexes if index.own is not None]
    is_same = len(columns) == len(indexes) and all(each.schema == columns[0].schema for each in columns)

    def write(path: Path) -> None:
        merge_tables(
            path,
            named,
            indexes,
            fingerprint=recipe,
            modalities=indexes[0].modalities,
            recipe=indexes[0].recipe,
            build_id=indexes[0].build_id if len(indexes) == 1 else digest([index.build_id for index in indexes]),
            own=pa.concat_batches(columns) if is_same else None,
            root=root,
            made_under=recipe,
            share=share,
            verdicts=rules[0],
            counts=rules[1],
        )
        for index in indexes:
            index.check_unchanged()

    if not is_remote(url):
        write(Path(url))
        return
    cache = CacheFolder()
    cache.make("index")
    path = cache.root / "index" / f"{digest([url, recipe, os.getpid()])}.out"
    try:
        write(path)
        with opened(path) as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            files.objects.put(url, data)
    finally:
        remove(path)


class Source(Protocol):
    """Rows of an index: the costs of a shard, or an index; its packed columns are read when they are written."""

    @property
    def size(self) -> TableSize: ...
    @property
    def fields(self) -> Sequence[str]: ...
    @property
    def totals(self) -> Totals: ...
    def body(self) -> Buffer: ...


def merge_tables(
    path: Path,
    shards: Sequence[ShardInfo],
    tables: Sequence[Source],
    *,
    fingerprint: str,
    modalities: Sequence[str],
    recipe: Mapping[str, Any],
    build_id: str = "",
    own: pa.RecordBatch | None = None,
    **values: Any,
) -> None:
    """Write the index of shards, made of their tables, or of indexes, to `path`. Raises StorageError.

    `build_id` recognizes whether it was made from the same tables; `own` and `values` are as of `write_index`.
    """
    rows = (np.diff(each.shard_rows) if isinstance(each, Index) else [each.size.rows] for each in tables)
    values |= {
        "fingerprint": content_fingerprint(shards, fingerprint),
        "build_id": build_id,
        "recipe": recipe,
        "shards": [shard.as_list() for shard in shards],
        "shard_rows": np.cumsum(np.concatenate([[0], *rows])).tolist(),
        "modalities": list(modalities),
    }
    write_index(path, tables, values, own)


def write_index(
    path: Path, sources: Sequence[Source], values: Mapping[str, Any], own: pa.RecordBatch | None = None
) -> None:
    """Write the rows of sources, one after another, as an index; it gets its name when it is complete.

    Memory is bounded by one source and a few dozen MiB for any number of samples. `values` are those of the head that
    are not read from the sources; `own` are the user's own columns, after the table. Raises StorageError.
    """
    names = dict.fromkeys(name for source in sources for name in source.fields)
    fields = {name: number for number, name in enumerate(names)}
    size = TableSize.sum([source.size for source in sources])
    totals = sum_totals([source.totals for source in sources])
    values = {**values, "fields": list(names), "totals": totals, "size": asdict(size)}
    after = memoryview(b"")
    if own is not None:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, own.schema) as writing:
            writing.write_batch(own)
        after = memoryview(stream.getvalue())
        values["own"] = len(after)
    length, number = size.num_bytes + len(after), 0
    start = body_start(values, length)
    with replaced(path) as fd:
        writer = TableWriter(fd, start, size)
        for source in sources:
            writer.append(source.body(), source.size, number, [fields[name] for name in source.fields])
            number += len(source.shards) if isinstance(source, Index) else 1
        writer.flush()
        write_at(fd, after, start + size.num_bytes)
        finish(fd, KIND, TABLE_FORMAT, values, start, length)


def _make(file: IndexFile, files: Files, cache: CacheFolder, path: Path) -> None:
    """Make a node's copy, if there is none: one of its ranks does, and the others wait."""
    if status_of(path) is not None:
        return
    cache.make("index")
    with cache.lock("index", str(path)):
        if status_of(path) is not None:  # another rank has made it
            return
        with replaced(path) as fd:
            at = 0
            try:
                opened_now = files.open(file.url, FileVersion(file.size, file.version))
                with closing(in_order(opened_now, COPIED_AHEAD)) as source:
                    while at < file.size and (data := source.read(at, min(_READ_BYTES, file.size - at))):
                        write_at(fd, data, at)
                        at += len(data)
                is_same = at == file.size and head_of(fd, KIND, TABLE_FORMAT).digest == file.digest
            except (StaleIndexError, ValueError):
                is_same = False
            if not is_same:
                raise DamagedIndexError(
                    file.url, "it was replaced or cut since the first rank looked at it: start again"
                )
