"""Moving: an index of shards in one place -> an index of the same shards in another one, without reading a shard.

Rows and columns are the same. Paths and versions of the shards are those of the new place, and each shard is
`unproven`: its content is compared when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.index import KIND, Index, digest
from orchdata.loaders.shards.builtin import RecordContainer, TarContainer, builtin_of
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.atomic import replaced, write_at
from orchdata.loaders.storage.local import read_into_at
from orchdata.loaders.storage.opening import opened
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.sealed import BLOCK_BYTES, body_start, finish, head_of
from orchdata.loaders.storage.storage import FileVersion
from orchdata.loaders.storage.suffixes import is_compressed, media_root_of
from orchdata.loaders.versions import TABLE_FORMAT

_FEW: Final = 3


class CannotMove(Exception):
    """The index cannot serve another place; the message is the reason."""


def moved_shards(
    index: Index,
    urls: Sequence[str],
    versions: Mapping[str, FileVersion],
    media_root: str | None,
    is_packed: Callable[[str], bool],
) -> list[ShardInfo] | None:
    """Return the shards of an index in another place. None: files of this machine were copied on it, or an object was
    replaced, and both are indexed again.

    Args:
        urls: in the new place, with the names and sizes of the shards.
        versions: of each of them there.
        media_root: as of `Reading`, there.
        is_packed: whether a shard there is compressed; called where the index does not say so.

    Raises CannotMove.
    """
    unmarked = _unmarked(index)
    moved, refused = [], []
    for number, (shard, url) in enumerate(zip(index.shards, urls, strict=True)):
        if shard.reach or not shard.checksum:
            raise CannotMove(f"{shard.url} could not be read")
        version = versions[url].version
        root = ("" if shard.container else media_root_of(url, media_root)) or ""
        if root != shard.media_root:
            if shard.container:
                raise CannotMove(
                    f"the container of yours that reads {shard.url} reads files of another media_root, too"
                )
            if not (is_remote(root) or is_remote(shard.media_root)):
                return None
            shard = replace(shard, media_root=root, moved_media=True)
        if url == shard.url and version == shard.version:
            moved.append(shard)
            continue
        if url == shard.url or not (is_remote(url) or is_remote(shard.url)):
            return None
        packed = _may_be_packed(shard, bool(unmarked[number])) and (shard.packed or is_packed(url))
        if unmarked[number] and not packed and not shard.container and isinstance(builtin_of(shard.url), TarContainer):
            refused.append(shard.url)
        packed = packed and is_remote(url)
        moved.append(replace(shard, url=url, version=version, packed=packed, unproven=True))
    if refused:
        raise CannotMove(
            f"{len(refused):,} tars have samples without a mark, by which they are recognized (sparse members, or tars "
            f"that an earlier release scanned): {', '.join(refused[:_FEW])}{', ...' if len(refused) > _FEW else ''}"
        )
    return moved


def write_moved(index: Index, path: Path, shards: Sequence[ShardInfo]) -> None:
    """Write an index of the same rows in other shards. It appears when it is complete.

    Raises StorageError, and DamagedIndexError if the index has changed since it was opened.
    """
    with opened(index.path) as source:
        head = head_of(source, KIND, TABLE_FORMAT)
        listed = [shard.as_list() for shard in shards]
        is_same = listed == head.values["shards"]  # they are where they were, and the index was in another file
        build_id = index.build_id if is_same else digest([index.build_id, listed])
        values = {**head.values, "shards": listed, "build_id": build_id}
        start = body_start(values, head.size)
        with replaced(path) as fd:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            for number, expected in enumerate(head.crcs):
                at = number * BLOCK_BYTES
                block = buffer[: min(BLOCK_BYTES, head.size - at)]
                if read_into_at(source, head.start + at, block) < len(block) or zlib.crc32(block) != expected:
                    raise DamagedIndexError(str(index.path), "it was changed while it was copied")
                write_at(fd, block, start + at)
            finish(fd, KIND, TABLE_FORMAT, values, start, head.size)


def _unmarked(index: Index) -> NDArray[np.int64]:
    """Return the number of rows of each shard that have members and no mark, int64 (num_shards,)."""
    has_members = np.diff(index.member_offsets) > 0
    missing = has_members if index.marks is None else has_members & (index.marks == 0)
    return np.diff(np.concatenate([[0], np.cumsum(missing)])[index.shard_rows])


def _may_be_packed(shard: ShardInfo, has_unmarked: bool) -> bool:
    """Return whether a shard can be compressed: a plain tar has marks."""
    if shard.container:
        return False
    container = builtin_of(shard.url)
    if isinstance(container, TarContainer):
        return has_unmarked
    return isinstance(container, RecordContainer) and is_compressed(shard.url)
