"""Reading ahead: what the samples of a step need of objects of storage is asked for before any of them is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from orchdata.loaders.errors import ShardError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import Spec, StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.remote.urls import is_remote


class Wanted(NamedTuple):
    """What a step reads of a row, as the arguments of `StoredSample.read`."""

    row: int
    text: bool = True
    parts: Sequence[int] | None = None
    kept: bool = False
    whole: bool = False


def read_ahead(
    index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe], wanted: Iterable[Wanted]
) -> list[object]:
    """Begin to read what is wanted of objects of storage. Keep the result until it was read.

    What fails here fails again when the sample is read, and is raised there.
    """
    if not shards.any_remote:
        return []
    by_shard: dict[tuple[str, str], tuple[ShardInfo, Recipe, list[Spec]]] = {}
    for row, text, parts, kept, whole in wanted:
        info = index.shard_of(row)
        if not is_remote(info.url) or info.packed:  # a compressed one is fetched whole when it is opened
            continue
        recipe = recipe_of(row)
        key = info.url, "" if recipe.record is None else recipe.record.id
        ranges = StoredSample(index, shards, row, whole=whole).ranges(recipe, text=text, parts=parts, kept=kept)
        by_shard.setdefault(key, (info, recipe, []))[2].extend(ranges)
    ahead: list[object] = []
    for info, recipe, ranges in by_shard.values():
        try:
            ahead.append(shards.get(info.url, info, recipe.record).expect(ranges))
        except ShardError:
            continue
    return ahead
