"""BuildSpec: everything that the steps of a rank depend on, as a value; `open()` returns a Builder.

    BuildSpec --pickle--> another process --open()--> Builder --StepTask--> the same batches, bit for bit

Open resources (shards, memory, locks, counters) are in a Builder: one per process, for all its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from torch.utils.data import default_collate, default_convert

from orchdata.building.assembler import Assembler, StatefulSource
from orchdata.building.collate import (
    MapAssembler,
    SampleAssembler,
    map_loader,
    map_many,
    map_refusal,
    shard_loader,
    shard_refusal,
    stateful_source,
)
from orchdata.building.media_pages import PageSource, recipe_of
from orchdata.building.memory import Memory
from orchdata.building.shard_content import PackedAssembler
from orchdata.building.step import Builder
from orchdata.building.windows import WindowAssembler
from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.first_calls import settle_first_calls
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
from orchdata.order.steps import StepTask
from orchdata.planning.layout import Layout, window_length
from orchdata.planning.make_plan import PlanSpec


class Content(Protocol):
    """The data of batches, and how batches are made of it: a value."""

    def open(self, watch: Watch) -> Assembler:
        """Return what makes batches in this process.

        Args:
            watch: records each sample while it is loaded.
        """

    def name_of(self, row: int) -> str:
        """Return a sample's name for messages."""


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Everything a rank's steps depend on, apart from their `StepTask`."""

    plan: PlanSpec
    rank: int
    content: Content

    @property
    def reads_far(self) -> bool:
        """Whether any shard is in object storage, whose answers take longer than a read of a file."""
        return isinstance(self.content, ShardContent | SampleContent) and self.content.shards.any_remote

    def open(self, *, watch: Watch | None = None, allocate: Callable[[StepTask], Memory] | None = None) -> Builder:
        """Return the builder of steps in this process, one for all its threads.

        Args:
            watch: records each sample while it is loaded.
            allocate: see `Builder`.

        Raises:
            StaleIndexError: the index was rebuilt after the spec was created.
            PackageError: a package that the recipe needs is missing or broken.
            StorageError: the index cannot be loaded now.
        """
        settle_first_calls()
        return Builder(self.plan, self.rank, self.content.open(watch or Watch()), allocate)


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


@dataclass(frozen=True, kw_only=True)
class MapContent:
    """Batches of a `collate_fn` (default: torch's) from the items of a map-style data set.

    Attributes:
        num_rows: the number of items when the spec was created.
        batched: whether collate_fn gets a list; else one item.
        skip_errors: whether an item that cannot be loaded is a failure, and its exception is not raised.
    """

    dataset: Any
    num_rows: int
    collate_fn: Callable[..., Any] | None
    batched: bool
    skip_errors: bool

    @property
    def stateful(self) -> StatefulSource | None:
        """Returns and restores the data set's own state; None if it has none."""
        return stateful_source(self.dataset)

    def open(self, watch: Watch) -> Assembler:
        return MapAssembler(
            self.dataset,
            load=map_loader(self.dataset, skip_errors=self.skip_errors),
            watch=watch,
            refuse=map_refusal(self.dataset, skip_errors=self.skip_errors),
            load_many=map_many(self.dataset) if self.batched and not self.skip_errors else None,
            collate_fn=self.collate_fn or (default_collate if self.batched else default_convert),
            batched=self.batched,
            num_map_rows=self.num_rows,
        )

    def name_of(self, row: int) -> str:
        return f"item {row} of {type(self.dataset).__name__}"
