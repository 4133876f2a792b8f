"""What an index has, and what it has if nothing was kept before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.table import Columns
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder


def content(index: Index) -> dict[str, Any]:
    return {name: getattr(index, name).tolist() for name in Columns.__slots__} | {"totals": index.totals}


def whole(index: Index) -> dict[str, Any]:
    """Its content, with the shards that it is of."""
    return content(index) | {"shards": index.shards, "fields": index.fields}


def in_new_cache(shard: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    return content(build_index([shard], recipe, cache=CacheFolder(folder)))
