"""What every lane is given: samples as bytes, how to decode them, and how to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchdata.loaders.recipe import Recipe

# Not imported at the top: other lanes have this file too, and their memory is without the rest.
if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.index import Index
    from orchdata.loaders.shards.open import OpenShards

StoredRow = tuple[int, Mapping[int, bytes | memoryview]]
"""A row, and its bytes by member."""


class Samples(Protocol):
    """Samples by number: their bytes, and what these decode to."""

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Stored, of all samples together."""

    def read(self, number: int) -> Any:
        """The bytes of one sample, as `decode` takes them."""

    def decode(self, payload: Any) -> Any:
        """A sample in memory of its own."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A data set as the values that it is made of.

    Attributes:
        urls: its shards, of any kind.
        recipe: that they are seen through.
        media_root: of records that name files.
        storage_options: how objects of storage are read.
    """

    urls: tuple[str, ...]
    recipe: Recipe
    media_root: str | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def open(self) -> ShardDataset:
        """The data set."""
        from orchdata.dataset.shard_dataset import ShardDataset

        how: dict[str, Any] = {"media_root": self.media_root, "storage_options": self.storage_options}
        return ShardDataset(list(self.urls), self.recipe, **how)


class StoredSamples:
    """Rows of a data set's index.

    Args:
        shards: the data set.
        rows: of its index.
        num_bytes: that their members have.
    """

    def __init__(self, shards: Shards, rows: tuple[int, ...], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._shards = shards
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredSamples, (self._shards, self._rows, self.num_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _opened(self) -> tuple[Index, OpenShards]:
        from orchdata.loaders.required import load_required
        from orchdata.loaders.shards.open import OpenShards
        from orchdata.loaders.storage.cache import CacheFolder

        load_required(self._shards.recipe)
        dataset = self._shards.open()
        limits = self._shards.recipe.limits
        return dataset.index(), OpenShards(limits=limits, cache=CacheFolder(), files=dataset.files)

    def read(self, number: int) -> StoredRow:
        from orchdata.loaders.index.stored import StoredSample

        row = self._rows[number]
        return row, StoredSample(*self._opened, row).read(self._shards.recipe)

    def decode(self, payload: StoredRow) -> Any:
        from orchdata.loaders.generators import Pass
        from orchdata.loaders.index.stored import StoredSample
        from orchdata.loaders.samples.decode import decode_sample

        row, payloads = payload
        index, recipe = self._opened[0], self._shards.recipe
        stored = StoredSample(*self._opened, row)
        spans = partial(stored.spans, recipe, payloads)
        generator_of = partial(stored.generator, Pass())
        return decode_sample(stored.members, payloads, index.sizes(stored.parts, recipe), recipe, spans, generator_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a lane loads.

    Attributes:
        shards: of ours.
        samples: of the limits.
        batch_size: samples of a batch.
        workers: threads, or worker processes.
        seed: of the order, where a loader shuffles.
        cache: `ORCHDATA_CACHE`, with the index in it; None for the user's own.
        folder: for all files that are written.
    """

    shards: Shards
    samples: Samples
    batch_size: int
    workers: int
    seed: int
    cache: Path | None
    folder: Path
