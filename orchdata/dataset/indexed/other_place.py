"""The same data in another place: an index of shards of the same names and sizes serves there, without indexing again.

new URLs --names--> an index in the cache folder --one rank lists: sizes, versions--> the same rows, new URLs --> Index
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DamagedIndexError, DataError, StaleIndexError
from orchdata.loaders.index.index import Index, digest
from orchdata.loaders.index.locations import check_function_of, index_path, open_index
from orchdata.loaders.index.moved.move import CannotMove, moved_shards, write_moved
from orchdata.loaders.index.moved.places import indexes_elsewhere
from orchdata.loaders.index.stored import StoredSample, read_ahead
from orchdata.loaders.index.wanted import Wanted
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.compressed import compression
from orchdata.loaders.shards.open import OpenShards, by_identity
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LOCAL
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion
from orchdata.notices import warn_user
from orchdata.ranks.first_comer import done_by_first

_COMPARED: Final = 8
"""Samples that are compared before an index serves another place."""


def moved_index(urls: tuple[str, ...], recipe: Recipe, reading: Reading) -> tuple[Index | None, Reading]:
    """Return an index that was made of these shards in another place; None if there is none, or it cannot serve.

    Also return how the shards are read, with their sizes and versions if they were looked up.

    Raises StorageError, and FunctionError as `open_index`.
    """
    cache = CacheFolder()
    fingerprint = recipe.count_fingerprint()
    elsewhere = indexes_elsewhere(urls, fingerprint, reading, cache)
    if not elsewhere:
        return None, reading
    versions, reading = _looked_up(urls, reading)
    sizes = [versions[url].size if url in versions else None for url in urls]
    opened = (_opened(each.path) for each in elsewhere if each.sizes == sizes)
    index = next((found for found in opened if found is not None), None)
    if index is None:
        return None, reading
    check_function_of(index, recipe)
    path = index_path(urls, fingerprint, cache, reading)
    with closing(Claims(cache.file("locks", "index"))) as claims, claims.claim(str(path), go_on=lambda: True):
        try:
            if (moved := open_index(urls, recipe, cache=cache, reading=reading)) is not None:
                return moved, reading  # another rank of this node has written it
            is_packed: Callable[[str], bool] = lambda url: _is_packed(url, versions[url], reading)  # noqa: E731
            shards = moved_shards(index, urls, versions, reading.media_root, is_packed)
            if shards is None or _are_others(index, shards, urls, recipe, reading):
                return None, reading
            write_moved(index, path, shards)
            return open_index(urls, recipe, cache=cache, reading=reading), reading
        except CannotMove as error:
            warn_user(f"the index of these shards in another place cannot serve here, and they are indexed: {error}")
        except DamagedIndexError as error:
            warn_user(f"the index of these shards in another place is damaged, and they are indexed: {error}")
    return None, reading


def _are_others(
    index: Index, shards: Sequence[ShardInfo], urls: tuple[str, ...], recipe: Recipe, reading: Reading
) -> bool:
    """Return whether the data are others that have the same names and sizes: some samples are compared, and none of
    them is the same. One rank compares for all.
    """
    # Samples of tars have marks, and records name files: both are compared whenever a sample is read.
    has_mark = np.zeros(index.num_rows, np.bool_) if index.marks is None else index.marks != 0
    has_media = np.diff(index.part_offsets) > 0
    is_unproven = np.array([shard.unproven and not shard.packed for shard in shards])[index.shard]
    has_moved_media = np.array([shard.moved_media for shard in shards])[index.shard]
    rows = np.flatnonzero((has_mark & is_unproven) | (has_media & has_moved_media))
    chosen = rows[np.linspace(0, len(rows) - 1, min(_COMPARED, len(rows))).astype(np.int64)].tolist()
    if not chosen:
        return False

    def compare() -> bool:
        index.shards = tuple(shards)  # no one else has this object
        how: dict[str, Any] = {"containers": by_identity(reading.containers), "files": reading.files}
        with closing(OpenShards(limits=recipe.limits, cache=CacheFolder(), any_remote=True, **how)) as at:
            samples = [StoredSample(index, at, row) for row in chosen]
            ahead = read_ahead(index, at, lambda _: recipe, [Wanted(each.row, sample=each) for each in samples])
            is_same = any(_is_same(sample, recipe) for sample in samples)
            del ahead
        return not is_same

    return bool(done_by_first(f"compared/{digest([index.build_id, list(urls), reading.media_root])}", compare))


def _is_same(sample: StoredSample, recipe: Recipe) -> bool:
    """Return whether a sample is the one that was indexed. Raises StorageError."""
    try:
        sample.read(recipe)
    except (StaleIndexError, DataError):
        return False
    return True


def _opened(path: Path) -> Index | None:
    """Return an index; None if it is damaged, or was removed."""
    try:
        return Index(path)
    except (FileNotFoundError, DamagedIndexError):
        return None


def _looked_up(urls: tuple[str, ...], reading: Reading) -> tuple[dict[str, FileVersion], Reading]:
    """Return size and version of each shard that exists. One rank looks at objects for all ranks of the job, so that
    all read the same versions.
    """
    remote = [url for url in urls if is_remote(url)]
    found: dict[str, FileVersion] = {}
    if remote:

        def look() -> list[Any]:
            files = reading.looked_up(remote).files
            return [None if (file := files.version(url)) is None else list(file) for url in remote]

        listed = done_by_first(f"place/{digest(remote)}", look)
        found = {url: FileVersion(*file) for url, file in zip(remote, listed, strict=True) if file is not None}
        reading = replace(reading, files=reading.files.knowing(found))
    local: Mapping[str, FileVersion | None] = {url: LOCAL.version(url) for url in urls if not is_remote(url)}
    return found | {url: file for url, file in local.items() if file is not None}, reading


def _is_packed(url: str, version: FileVersion, reading: Reading) -> bool:
    with closing(reading.files.open(url, version)) as file:
        return compression(file.read(0, 4)) is not None
