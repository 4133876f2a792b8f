"""Where indexes are stored: shards and a recipe -> the file of their index, without reading any shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchdata.loaders.index.index import Index, absolute, digest
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.paths import is_there
from orchdata.loaders.versions import RULES, TABLE_FORMAT


def open_index(
    urls: Sequence[str], recipe: Recipe, *, cache: CacheFolder | None = None, media_root: str | None = None
) -> Index | None:
    """Open the index that `build_index` made of these shards under the recipe. Return None if there is none.

    No shard is read.

    Args:
        urls: paths of the shards, expanded, in order.
        recipe: that the costs must belong to.
        cache: stores indexes; default: the folder that the environment names.
        media_root: as passed to `build_index`.

    Raises:
        DamagedIndexError: it has changed since it was written.
        StorageError: it cannot be read now.
    """
    try:
        index = Index(index_path(urls, recipe.fingerprint(), cache or CacheFolder(), media_root))
    except FileNotFoundError:
        return None
    index.check_urls([absolute(url) for url in urls])
    return index


def index_path(
    urls: Sequence[str],
    recipe: str,
    cache: CacheFolder,
    media_root: str | None = None,
    *,
    table_format: int = TABLE_FORMAT,
) -> Path:
    """Return the path of the index of these shards under a recipe fingerprint; no shard is read."""
    root = [] if media_root is None else [media_root]
    name = digest([table_format, RULES, recipe, [absolute(url) for url in urls], *root])
    return cache.root / "index" / f"{name}.index"


def is_outdated(
    urls: Sequence[str], recipe: Recipe, *, cache: CacheFolder | None = None, media_root: str | None = None
) -> bool:
    """Return whether the only index of these shards under the recipe has an earlier format, which cannot be read."""
    fingerprint, cache = recipe.fingerprint(), cache or CacheFolder()

    def exists(table_format: int) -> bool:
        return is_there(str(index_path(urls, fingerprint, cache, media_root, table_format=table_format)))

    return not exists(TABLE_FORMAT) and any(map(exists, range(1, TABLE_FORMAT)))
