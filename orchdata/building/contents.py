"""Shards as an index describes them, what their samples are loaded by, and batches of a `collate_fn` from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.building.collate import SampleAssembler
from orchdata.building.step import Assembler
from orchdata.loaders.errors import DataError, FieldError, StaleIndexError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample, Wanted, read_ahead
from orchdata.loaders.recipe import Recipe, load_required
from orchdata.loaders.samples.measure import MeasuredPart, decoded_bytes
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.watch import Watch


@dataclass(frozen=True, kw_only=True)
class IndexedShards:
    """Shards as an index describes them."""

    index: Index  # pickles as its path
    build_id: str  # of the index when the spec was created: a rebuilt one would result in other batches
    recipes: tuple[Recipe, ...]  # of each source; the first defines the tensors
    seed: int = 0  # of the generators that decoding draws from
    containers: Mapping[str, Container] = field(default_factory=dict)  # of the user's, by identity, of all sources
    files: Files = PLAIN_FILES  # where the shards are
    blank: frozenset[int] = frozenset()  # rows that are delivered as failed, and never read

    @cached_property
    def any_remote(self) -> bool:
        """Whether any shard, or its media, is in object storage."""
        return any(is_remote(shard.url) or is_remote(shard.media_root) for shard in self.index.shards)

    @property
    def recipe(self) -> Recipe:
        return self.recipes[0]

    def recipe_of(self, row: int) -> Recipe:
        """Return the recipe of a sample."""
        return self.recipes[self.index.source_of(row)]

    def open(self) -> OpenShards:
        """Return the shards; each one is opened later. Raises StaleIndexError, and as `load_required`."""
        if self.index.build_id != self.build_id:
            raise StaleIndexError(
                str(self.index.path), "the index was rebuilt after this loader was created: create the loader again"
            )
        for recipe in self.recipes:
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
class SampleContent:
    """Batches of a user's `collate_fn` from decoded samples of shards."""

    shards: IndexedShards
    collate_fn: Callable[..., Any]
    preloads: ClassVar = ("orchdata.dataset.preload",)

    def open(self, watch: Watch) -> Assembler:
        shards = self.shards.open()
        load = shard_loader(self.shards.index, shards, self.shards.recipe_of)

        def ahead(rows: Iterable[int]) -> object:
            wanted = (Wanted(row, kept=True) for row in rows)
            return read_ahead(self.shards.index, shards, self.shards.recipe_of, wanted)

        return SampleAssembler(
            loader=load,
            watch=watch,
            refuse=shard_refusal(self.shards.index),
            collate_fn=self.collate_fn,
            reads=shards.reads,
            seed=self.shards.seed,
            ahead=ahead,
        )

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


TOKEN_BYTES = 48
"""A token of text: its id twice, its label, and three positions, int64 each."""

_NAMED = 3


def shard_loader(index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe]) -> Callable[..., Sample]:
    """Return (row, of: Pass) -> decoded `Sample` of an index; `recipe_of` returns the recipe for a row."""

    def load(row: int, of: Pass = Pass()) -> Sample:  # noqa: B008 - a frozen value
        stored, recipe = StoredSample(index, shards, row), recipe_of(row)
        try:
            return stored.decode(recipe, of)
        except FieldError as error:
            stored.refuse_moved(error)
            raise error.at(stored.shard, stored.key) from error.__cause__
        except MemoryError as error:
            raise out_of_memory(error, index, recipe, np.array([row]), row) from error
        except DataError:
            raise
        except Exception as error:  # any exception of a decoder fails the sample
            raise as_field_error(error, "decoded").at(stored.shard, stored.key) from error

    return load


def shard_refusal(index: Index) -> Callable[[int, str], Exception]:
    """Return (row of an index, reason) -> the failure of that sample."""
    return lambda row, reason: DataError(index.shard_of(row).url, index.key(row), "*", f"its worker {reason}")


def sample_bytes(index: Index, recipe: Recipe, row: int) -> int:
    """Return the bytes that one sample takes in a batch and while it is decoded."""
    numbers = index.part_range(row)
    members = index.members(row)
    parts = [
        MeasuredPart(index.modality_of(part), index.member_of(part, len(members)), size)
        for part, size in zip(numbers, index.sizes(numbers, recipe), strict=True)
    ]
    return decoded_bytes(parts, members, recipe) + TOKEN_BYTES * int(index.llm_tokens[row])


def out_of_memory(
    error: MemoryError, index: Index, recipe: Recipe, rows: NDArray[np.int64], row: int | None = None
) -> MemoryError:
    """Return an error with the largest samples of a microbatch, and the one that was being decoded."""
    sizes = {int(each): sample_bytes(index, recipe, int(each)) for each in rows}
    largest = sorted(sizes, key=lambda each: (-sizes[each], each))[:_NAMED]
    named = "; ".join(f"{index.shard_of(each).url}: {index.called(each)}, {sizes[each]} bytes" for each in largest)
    where = "" if row is None else f" at {index.called(row)} of {index.shard_of(row).url}"
    return MemoryError(
        f"not enough memory{where} for a microbatch of {len(sizes)} samples, {sum(sizes.values())} bytes by the index "
        f"({error}); the largest: {named}. Lower batch_size, cap Balance(max_tokens=...), or leave such samples out "
        "with Limits.sample_decoded_bytes or quarantine="
    )
