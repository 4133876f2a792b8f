"""Where indexes are kept: shards and a recipe -> the file of their index, without a look at any shard."""

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
    """The index that `build_index` made of these shards under the recipe, or None where there is none.

    Looks at no shard.

    Args:
        urls: paths of the shards, expanded, in order.
        recipe: what the costs must belong to.
        cache: where indexes are kept; default: the folder that the environment names.
        media_root: as it was given to `build_index`.

    Raises:
        DamagedIndexError: it is not what was written.
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
    """Where the index of these shards under a recipe fingerprint is kept: no shard is looked at to know."""
    root = [] if media_root is None else [media_root]
    name = digest([table_format, RULES, recipe, [absolute(url) for url in urls], *root])
    return cache.root / "index" / f"{name}.index"


def is_outdated(
    urls: Sequence[str], recipe: Recipe, *, cache: CacheFolder | None = None, media_root: str | None = None
) -> bool:
    """Whether there is an index of these shards under the recipe, but of an earlier format, which is not read."""
    fingerprint, cache = recipe.fingerprint(), cache or CacheFolder()

    def is_kept(table_format: int) -> bool:
        return is_there(str(index_path(urls, fingerprint, cache, media_root, table_format=table_format)))

    return not is_kept(TABLE_FORMAT) and any(map(is_kept, range(1, TABLE_FORMAT)))
