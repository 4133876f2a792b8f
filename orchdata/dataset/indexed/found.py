"""The index of a data set: opened if it is there, else built, and what is said while that takes long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orchdata.dataset.indexed.nodes import Apart
from orchdata.loaders.amounts import counted, these
from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.first import build_first_index, open_first
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.locations import open_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.changes import find_changes
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.jsonl.media_changes import changed_media
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.storage import FileVersion
from orchdata.notices import warn_user
from orchdata.ranks.first_comer import done_by_first


class Wanted(NamedTuple):
    """The index that a data set needs.

    Attributes:
        urls, recipe, reading: what it is of.
        first: the number of the good samples at the beginning that suffice; None: all are needed.
        how_to_index: how it is built ahead, for errors.
        arguments: of the command that builds it.
        progress: as of `ShardDataset.index`.
    """

    urls: tuple[str, ...]
    recipe: Recipe
    reading: Reading
    first: int | None
    how_to_index: str
    arguments: str
    progress: Callable[[float, int], None] | None


def found_or_built(wanted: Wanted, num_ranks: int, rank: int | None, *, rebuild: bool) -> Index:
    """Return the index: the full one if it is there, even if the first samples suffice. Arguments are those of
    `ShardDataset.index`; raises as it does.
    """
    urls, recipe, reading, first = wanted.urls, wanted.recipe, wanted.reading, wanted.first
    problem = f"no index for {these(len(urls), 'shard')} under this recipe"
    is_full = first is None
    try:
        index = None if rebuild and is_full else open_index(urls, recipe, reading=reading)
        if index is not None and not rebuild:
            return index
        is_full = is_full or index is not None
        if first is not None and not is_full and not rebuild:
            index = open_first(urls, recipe, first, reading=reading)
            if index is not None:
                return index
    except DamagedIndexError as error:
        problem = f"the index of {these(len(urls), 'shard')} is damaged ({error.path}: {error.reason})"
    if not rebuild and num_ranks > 1 and rank is None:
        raise MissingIndexError(f"{problem}, and {num_ranks} ranks need one; {wanted.how_to_index}")
    if first is not None and not is_full:
        return build_first_index(urls, recipe, first, reading=reading, under_way=wanted.progress)
    return built(wanted, num_ranks, rank)


def built(wanted: Wanted, num_ranks: int, rank: int | None) -> Index:
    """Build the full index, or bring it up to date. Raises as `build_index`; MissingIndexError as `Apart.check`."""
    urls, recipe = wanted.urls, wanted.recipe
    reading = wanted.reading.looked_up(urls)
    apart = Apart(wanted.arguments) if num_ranks > 1 and any(map(is_remote, urls)) else None
    if apart is not None:
        apart.check()

    def under_way(done: float, total: int) -> None:
        if apart is not None:
            apart.check_others()
        if wanted.progress is not None:
            wanted.progress(done, total)

    return build_index(
        urls,
        recipe,
        reading=reading,
        share=(rank or 0, num_ranks),
        under_way=under_way,
    )


def has_changed(
    index: Index, recipe: Recipe, containers: Sequence[Container], listed: Mapping[str, FileVersion], *, warns: bool
) -> bool:
    """Return whether shards must be measured again, and warn about them. One rank looks for all.

    Args:
        listed: size and version of objects that were just listed.
    """

    def find() -> list[Any]:
        limits = recipe.limits
        changed, unsure = find_changes(
            index.shards, limits=limits, cache=CacheFolder(), containers=by_identity(containers), listed=listed
        )
        changed = list(dict.fromkeys([*changed, *changed_media(index, limits, recipe.record)]))
        return [len(changed), *changed[:1], unsure]

    number, *first, unsure = done_by_first(f"changes/{index.build_id}", find)
    if number and warns:
        others = f" and {number - 1} others" if number > 1 else ""
        warn_user(f"{first[0]}{others} changed since the index was built: measured again")
    if unsure and warns:
        warn_user(
            f"{counted(unsure, 'shard')} of the same size as when indexed, but with another time of change, like "
            "copies: each is compared when it is opened; `orchdata index` compares all of them now"
        )
    return bool(number)
