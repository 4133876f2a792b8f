"""Places: names of shards -> the indexes in the cache folder of shards of the same names in other places.

The head of each index there is read: this is done where shards have no index, before all of them would be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchdata.loaders.index.index import KIND, basename, content_fingerprint
from orchdata.loaders.shards.container import container_of, identity_of
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.opening import names_in, opened, status_of
from orchdata.loaders.storage.sealed import head_of
from orchdata.loaders.storage.suffixes import media_root_of
from orchdata.loaders.versions import TABLE_FORMAT


class Elsewhere(NamedTuple):
    """An index of shards of the same names.

    Attributes:
        sizes: of the shards, in bytes.
    """

    path: Path
    sizes: list[int]


def indexes_elsewhere(urls: Sequence[str], recipe: str, reading: Reading, cache: CacheFolder) -> list[Elsewhere]:
    """Return the indexes of shards with these names in this order, the newest first; compared ones before others.

    Args:
        recipe: fingerprint of the recipe.
    """
    names = [basename(url) for url in urls]
    found: list[tuple[bool, float, Elsewhere]] = []
    folder = cache.root / "index"
    try:
        paths = [folder / name for name in names_in(folder) if name.endswith(".index")]
    except OSError:
        return []
    for path in paths:
        try:
            shards, changed = _shards_in(path, recipe), status_of(path)
        except (OSError, ValueError):
            continue  # damaged, of another release, or removed just now
        is_same = changed is not None and [basename(shard.url) for shard in shards] == names
        if is_same and all(_is_read_so(shard, url, reading) for shard, url in zip(shards, urls, strict=True)):
            assert changed is not None
            unproven = any(shard.unproven for shard in shards)
            found.append((unproven, -changed.st_mtime, Elsewhere(path, [shard.size for shard in shards])))
    return [each for _, _, each in sorted(found, key=lambda one: one[:2])]


def _shards_in(path: Path, recipe: str) -> list[ShardInfo]:
    """Return the shards of an index; none if it has another recipe or rules. Raises OSError, ValueError."""
    with opened(path) as fd:
        values = head_of(fd, KIND, TABLE_FORMAT).values
    shards = [ShardInfo.of_list(shard) for shard in values["shards"]]
    return shards if values["fingerprint"] == content_fingerprint(shards, recipe) else []


def _is_read_so(shard: ShardInfo, url: str, reading: Reading) -> bool:
    """Return whether a shard was indexed as it would be read in the new place, under this URL."""
    container = container_of(reading.containers, url) if reading.containers else None
    root = media_root_of(url, reading.media_root) if container is None else reading.media_root
    known = shard.columns, shard.container, shard.key, bool(shard.media_root), shard.reach
    name = "" if container is None else identity_of(container)
    return known == (reading.columns, name, reading.key, root is not None, 0)
