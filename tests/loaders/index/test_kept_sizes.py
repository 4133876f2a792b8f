"""Sizes that modalities count from bytes are kept apart from all else: another recipe with the modality counts none."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fresh_index import content, in_new_cache
from own_modalities import Points, cloud
from shard_factory import jpeg, write_shard

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.index import kept as kept_module
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import ImagePreprocessor, Limits, Recipe, TextPreprocessor
from orchdata.loaders.shards.shard import FactsTable
from orchdata.loaders.storage.cache import CacheFolder

CALLS: list[int] = []
"""Bytes of each part that was counted in this process."""


@dataclass(frozen=True, kw_only=True)
class Clouds(Points):
    """Points that count their calls."""

    no_counts = frozenset({"scale"})

    scale: float = 1.0

    def count(self, data: bytes | memoryview, limits: Limits) -> od.PartSize:
        CALLS.append(len(data))
        size = super().count(data, limits)
        if size.positions > limits.sample_parts:
            raise DecodeError(f"{size.positions} points, above Limits.sample_parts={limits.sample_parts}")
        return size


@dataclass(frozen=True, kw_only=True)
class Labelled(Clouds):
    """Between its tokens stands text that depends on its size."""

    num_extents = 1
    no_counts = frozenset({"scale"})

    def count(self, data: bytes | memoryview, limits: Limits) -> od.PartSize:
        size = super().count(data, limits)
        return size._replace(extent=(size.tokens % 3,))

    def expand(self, size: od.PartSize) -> tuple[int | str, ...]:
        return "[", size.tokens, "]" * (1 + size.extent[0])


def samples() -> list[dict[str, Any]]:
    return [
        *({"__key__": f"p{n}", "npy": cloud(3 + n), "txt": b"<points> some points"} for n in range(6)),
        {"__key__": "two", "0.npy": cloud(5), "1.npy": cloud(9), "jpg": jpeg(60, 60), "txt": b"points and a picture"},
        {"__key__": "bad", "npy": b"no points", "txt": b"<points> damaged"},
        {"__key__": "half", "0.npy": cloud(4), "1.npy": b"no points", "txt": b"one good, one damaged"},
        {"__key__": "text", "txt": b"only text"},
    ]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    CALLS.clear()
    return write_shard(tmp_path / "a.tar", samples())


def counted(shard: str, recipe: Recipe) -> int:
    """How many parts are counted to build an index."""
    CALLS.clear()
    build_index([shard], recipe)
    return len(CALLS)


@pytest.mark.parametrize("kind", [Clouds, Labelled])
def test_another_recipe_counts_what_was_refused(shard: str, tmp_path: Path, kind: type[Clouds]) -> None:
    assert counted(shard, Recipe(points=kind())) == 11
    others = {
        "image": Recipe(points=kind(), image=ImagePreprocessor(max_tokens=9)),
        "text": Recipe(points=kind(), text=TextPreprocessor(max_tokens=300)),
        "no count": Recipe(points=kind(scale=2.0)),
        "limit": Recipe(points=kind(), limits=Limits(sample_tokens=1 << 25)),
    }
    for name, recipe in others.items():
        expected = in_new_cache(shard, recipe, tmp_path / name)
        number = counted(shard, recipe)
        assert number == (0 if name == "no count" else 2), name  # the damaged ones
        assert content(build_index([shard], recipe)) == expected


def test_recipes_with_other_modalities_in_turn_count_nothing_again(shard: str, tmp_path: Path) -> None:
    """Their codes of modalities differ."""
    recipes = [Recipe(points=Clouds()), Recipe(points=Clouds(), image=None), Recipe(points=Clouds(), audio=None)]
    assert counted(shard, recipes[0]) == 11
    for number, recipe in enumerate(recipes * 2):
        expected = in_new_cache(shard, recipe, tmp_path / str(number))
        for kept in (CacheFolder().root / "costs").iterdir():
            kept.unlink()
        assert counted(shard, recipe) == 2, number  # the damaged ones
        assert content(build_index([shard], recipe)) == expected


@pytest.mark.parametrize("change", ["parameter", "class", "content", "format", "cut", "missing", "rows"])
def test_what_does_not_hold_is_counted_again(
    shard: str, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, image = Clouds(), ImagePreprocessor(max_tokens=9)
    build_index([shard], Recipe(points=kind))
    (kept,) = (CacheFolder().root / "sizes").iterdir()
    if change == "parameter":
        kind = Clouds(group=2)
    elif change == "class":
        kind = Labelled()
    elif change == "content":
        write_shard(Path(shard), samples()[::-1])
    elif change == "format":
        monkeypatch.setattr(kept_module, "KEPT_FORMAT", 99)
    elif change == "cut":
        kept.write_bytes(kept.read_bytes()[:-20])
    elif change == "missing":
        kept.unlink()
    else:  # the next release finds other rows in the shard
        real = FactsTable.places_digest
        monkeypatch.setattr(FactsTable, "places_digest", lambda table: real(table) + " otherwise")
    recipe = Recipe(points=kind, image=image)
    assert counted(shard, recipe) == 11
    assert content(build_index([shard], recipe)) == in_new_cache(shard, recipe, tmp_path / "other")


def test_recipes_in_any_order_have_the_index_of_each(shard: str, tmp_path: Path) -> None:
    recipes = [
        Recipe(points=kind(group=group), limits=Limits(sample_parts=most), image=ImagePreprocessor(max_tokens=tokens))
        for kind in (Clouds, Labelled)
        for group in (3, 4)
        for most in (2, 6, 100)
        for tokens in (9, 100)
    ]
    random.Random(0).shuffle(recipes)
    for number, recipe in enumerate(recipes):
        expected = in_new_cache(shard, recipe, tmp_path / str(number))
        assert content(build_index([shard], recipe)) == expected, recipe


def test_processes_send_the_sizes_that_they_counted(shard: str) -> None:
    """A shard that several share, and one that is not divided."""
    recipe, other = Recipe(points=Clouds()), Recipe(points=Clouds(), image=ImagePreprocessor(max_tokens=9))
    first = build_index([shard], recipe, jobs=2)
    assert content(first) == content(build_index([shard], recipe, force=True))
    CALLS.clear()
    build_index([shard], other)
    assert len(CALLS) == 2
