"""Where indexes are stored: shards and a recipe -> the file of their index, without reading any shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchdata.loaders import versions
from orchdata.loaders.index.index import Index, absolute, digest
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.versions import TABLE_FORMAT

_SOURCE = "record_source"


def open_index(
    urls: Sequence[str],
    recipe: Recipe,
    *,
    cache: CacheFolder | None = None,
    reading: Reading = PLAIN,
) -> Index | None:
    """Open the index that `build_index` made of these shards under the recipe. Return None if there is none.

    No shard is read.

    Args:
        urls: paths of the shards, expanded, in order.
        recipe: that the costs must belong to.
        cache: stores indexes; default: the folder that the environment names.
        reading: as passed to `build_index`.

    Raises:
        DamagedIndexError: it has changed since it was written.
        StorageError: it cannot be read now.
        FunctionError: it was made with another function that had the same id.
    """
    try:
        index = Index(index_path(urls, recipe.count_fingerprint(), cache or CacheFolder(), reading))
    except FileNotFoundError:
        return None
    index.check_urls([absolute(url) for url in urls])
    check_function_of(index, recipe)
    return index


def stored_description(recipe: Recipe) -> dict[str, Any]:
    """Return what an index stores of its recipe: its description, and a digest of its function's source text."""
    source = {} if recipe.record is None else {_SOURCE: recipe.record.digest}
    return recipe.describe() | source


def check_function_of(index: Index, recipe: Recipe) -> None:
    """Raise FunctionError if the index was made with another function that had the same id."""
    refuse_other_source(str(index.recipe.get(_SOURCE) or ""), recipe)


def refuse_other_source(before: str, recipe: Recipe) -> None:
    """Raise FunctionError if the function of a recipe has another source text than one with its id had.

    Args:
        before: digest of that one's source text; "" if it had none.
    """
    if recipe.record is not None and before and recipe.record.digest and before != recipe.record.digest:
        raise recipe.record.unfit(
            f"has the record_id {recipe.record.id!r} of the function that these shards were indexed with, and another "
            "source text: give it another record_id. If both return the same, build the index again with `orchdata "
            "index --again`"
        )


def index_path(
    urls: Sequence[str],
    recipe: str,
    cache: CacheFolder,
    reading: Reading = PLAIN,
    *,
    first: int = 0,
) -> Path:
    """Return the path of the index of these shards under a recipe fingerprint; no shard is read.

    Args:
        first: of the index of so many samples at the beginning; 0: of all.
    """
    only = [{"first": first}] if first else []
    name = digest([TABLE_FORMAT, versions.rules(), recipe, [absolute(url) for url in urls], *reading.identity(), *only])
    return cache.root / "index" / f"{name}.index"
