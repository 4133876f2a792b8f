"""Shards with parts of a user's modalities, and their index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from own_modalities import Points, Tracks
from shard_factory import RECIPE as PLAIN
from shard_factory import write_shard

import orchdata as od


def recipe_of(**held: Any) -> od.Recipe:
    return od.Recipe(**{"image": PLAIN.image, "audio": PLAIN.audio} | held)


RECIPE = recipe_of(points=Points(), tracks=Tracks())


def indexed(shard: str | Path, recipe: od.Recipe = RECIPE, **options: Any) -> Any:
    return od.ShardDataset(str(shard), recipe=recipe).index(**options)


def one_shard(folder: Path, *samples: dict[str, Any]) -> str:
    return write_shard(folder / "a.tar", [{"__key__": f"s{place}"} | sample for place, sample in enumerate(samples)])


def parts_of(index: Any, name: str, recipe: od.Recipe = RECIPE) -> list[od.PartSize]:
    parts, _ = index.parts_of(np.arange(index.num_samples), name)
    sizes: list[od.PartSize] = index.sizes(parts, recipe)
    return sizes


def reasons(index: Any) -> dict[str, tuple[str, str]]:
    """Key -> field and reason of each bad sample."""
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    return {failure.key: (failure.field, failure.reason) for failure in failures}


@dataclass(frozen=True, kw_only=True)
class Wide(Tracks):
    """Has more numbers in its extent than any built-in modality."""

    fields = ("wide",)
    slot = od.Slot()
    words = ()
    num_extents = 3

    def count_header(self, header: tuple[int, ...], limits: od.Limits) -> od.PartSize:
        (length,) = header
        return od.PartSize(length, length, extent=(length, 7, 9))


@dataclass(frozen=True, kw_only=True)
class Clouds(Points):
    slot = od.Slot(mark="")
