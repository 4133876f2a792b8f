"""What every lane is given: samples as bytes, how to decode them, and how to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchdata.loaders.recipe import Recipe

# Not imported at the top: other lanes have this file too, and their memory is without the rest.
if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset


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
