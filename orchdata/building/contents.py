"""What batches of shards are made of, as values: the shards of an index, and a layout or a collate_fn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from orchdata.building.assembler import Assembler
from orchdata.building.collate import SampleAssembler
from orchdata.building.media_pages import PageSource, recipe_of
from orchdata.building.shard_content import PackedAssembler
from orchdata.building.shard_samples import shard_loader, shard_refusal
from orchdata.building.windows import WindowAssembler
from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import read_ahead
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.watch import Watch
from orchdata.planning.layout import Layout, window_length


@dataclass(frozen=True, kw_only=True)
class IndexedShards:
    """Shards as an index describes them.

    Attributes:
        index: pickles as its path.
        build_id: of the index when the spec was created: a rebuilt one would result in other batches.
        recipe, of_sources: as of `PageSource`.
        seed: of the generators that decoding draws from.
        containers: of the user's, which open shards, by identity; of all sources of a mixture together.
        files: where the shards are.
        blank: rows that are delivered as failed, and never read.
    """

    index: Index
    build_id: str
    recipe: Recipe
    of_sources: tuple[Recipe, ...] = ()
    seed: int = 0
    containers: Mapping[str, Container] = field(default_factory=dict)
    files: Files = PLAIN_FILES
    blank: frozenset[int] = frozenset()

    @cached_property
    def any_remote(self) -> bool:
        """Whether any shard, or its media, is in object storage."""
        return any(is_remote(shard.url) or is_remote(shard.media_root) for shard in self.index.shards)

    def recipe_of(self, row: int) -> Recipe:
        """Return the recipe of a sample."""
        return recipe_of(self.index, self.recipe, self.of_sources, row)

    def open(self) -> OpenShards:
        """Return the shards; each one is opened later. Raises StaleIndexError, and as `load_required`."""
        if self.index.build_id != self.build_id:
            raise StaleIndexError(
                str(self.index.path), "the index was rebuilt after this loader was created: create the loader again"
            )
        for recipe in (self.recipe, *self.of_sources):
            load_required(recipe)
        return OpenShards(
            limits=self.recipe.limits,
            cache=CacheFolder(),
            containers=self.containers,
            files=self.files,
            any_remote=self.any_remote,
            blank=self.blank,
        )

    def name_of(self, row: int) -> str:
        return f"{self.index.called(row)} of {self.index.shard_of(row).url}"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """Batches of shards, packed or padded, or windows of concatenated documents.

    Attributes:
        encoders: modalities that every batch has, if necessary as a dummy.
    """

    shards: IndexedShards
    layout: Layout
    encoders: tuple[str, ...]

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        pages = PageSource(
            index=self.shards.index,
            recipe=self.shards.recipe,
            of_sources=self.shards.of_sources,
            layout=self.layout,
            encoders=self.encoders,
        )
        if window_length(self.layout) is not None:
            return WindowAssembler(source=pages, shards=shards, watch=watch)
        return PackedAssembler(source=pages, shards=shards, watch=watch, seed=self.shards.seed)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


@dataclass(frozen=True, kw_only=True)
class SampleContent:
    """Batches of a user's `collate_fn` from decoded samples of shards."""

    shards: IndexedShards
    collate_fn: Callable[..., Any]

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        load = shard_loader(self.shards.index, shards, self.shards.recipe_of)
        return SampleAssembler(
            load=load,
            watch=watch,
            refuse=shard_refusal(self.shards.index),
            collate_fn=self.collate_fn,
            reads=shards.reads,
            seed=self.shards.seed,
            ahead=partial(read_ahead, self.shards.index, shards, self.shards.recipe_of),
        )

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)
