"""Sizes that modalities count from bytes are kept apart from all else: another recipe with the modality counts none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fresh_index import content, in_new_cache
from hf_processors import processor, tokenizer
from own_modalities import Points, cloud
from shard_factory import chat, jpeg, omni_samples, write_shard

import orchdata as od
from orchdata.loaders import recipe as recipes
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.index import kept as kept_module
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor, Limits, Recipe, TextPreprocessor
from orchdata.loaders.shards.shard import FactsTable
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.text.preprocessor import FastTokenizer

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

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


@pytest.mark.slow
def test_processes_send_the_sizes_that_they_counted(shard: str) -> None:
    """A shard that several share, and one that is not divided."""
    recipe, other = Recipe(points=Clouds()), Recipe(points=Clouds(), image=ImagePreprocessor(max_tokens=9))
    first = build_index([shard], recipe, jobs=2)
    assert content(first) == content(build_index([shard], recipe, force=True))
    CALLS.clear()
    build_index([shard], other)
    assert len(CALLS) == 2


# Counts of texts are kept apart from all else: another recipe that reads texts alike calls no tokenizer.


class Words:
    """A tokenizer with one token a word, that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, text: str) -> list[int]:
        if "cannot" in text:
            raise ValueError("this text is refused")
        self.calls.append(text)
        return [1 + len(word) for word in text.split()]


def texts_and_media() -> list[dict[str, Any]]:
    long = " ".join(f"word{i}" for i in range(60))
    return [
        *omni_samples(16),
        {"__key__": "x0", "txt": long.encode()},
        {"__key__": "x1", "json": chat("what is it", long)},
        {"__key__": "x2", "0.jpg": jpeg(280, 140), "txt": b"<image> " + long.encode()},
        {"__key__": "x3", "0.jpg": jpeg(56, 56), "1.jpg": jpeg(84, 56), "txt": b"two pictures"},
        {"__key__": "x4", "json": b"{no json"},
        {"__key__": "x5", "txt": b""},
        {"__key__": "x6", "jpg": b"no image", "txt": b"a damaged picture"},
        {"__key__": "x7", "txt": b"cannot be tokenized"},
        {"__key__": "x8", "txt": b"\xff\xfe"},
    ]


@pytest.fixture
def text_shard(tmp_path: Path) -> str:
    return write_shard(tmp_path / "a.tar", texts_and_media())


def changed(text: TextPreprocessor, **more: Any) -> dict[str, Recipe]:
    """Recipes that read all texts alike."""

    def limited(**limits: Any) -> Recipe:
        return Recipe(text=text, limits=Limits(**limits), **more)

    return {
        "plain": Recipe(text=text, **more),
        "image tokens": Recipe(text=text, **{"image": ImagePreprocessor(max_tokens=9)} | more),
        "patches": Recipe(text=text, **{"image": ImagePreprocessor(patch_size=16, merge=1)} | more),
        "sound": Recipe(text=text, audio=AudioPreprocessor(tokens_per_second=50, conv_stride=1), **more),
        "pixels": limited(image_pixels=10_000),
        "more pixels": limited(image_pixels=30_000),
        "seconds": limited(audio_seconds=0.5),
        "tokens": limited(sample_tokens=40),
        "parts": limited(sample_parts=1),
        "decoded": limited(sample_decoded_bytes=200_000),
        "sample": limited(sample_bytes=2_000),
        "member": limited(member_bytes=1_500),
        "text": limited(text_bytes=300),
        "more text": limited(text_bytes=1 << 30),
    }


def overflowing(text: Callable[..., TextPreprocessor]) -> dict[str, Recipe]:
    return {
        f"{overflow} {most}": Recipe(text=text(max_tokens=most, overflow=overflow))
        for overflow in ("error", "truncate", "split")
        for most in (20, 33)
    }


def counting() -> tuple[Words, Callable[..., TextPreprocessor]]:
    words = Words()
    return words, lambda **options: TextPreprocessor(words, id="words", **options)


def test_no_change_of_media_or_limits_calls_the_tokenizer(text_shard: str, tmp_path: Path) -> None:
    words, text = counting()
    build_index([text_shard], Recipe(text=text()))
    assert len(words.calls) > 20
    for name, recipe in changed(text()).items():
        expected = in_new_cache(text_shard, recipe, tmp_path / name)
        words.calls.clear()
        assert content(build_index([text_shard], recipe)) == expected, name
        assert not words.calls, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [Limits(image_pixels=100), pytest.param(Limits(audio_seconds=0.1), marks=pytest.mark.slow)]
)
def test_a_lower_limit_of_media_tokenizes_no_column_of_text(tmp_path: Path, limits: Limits) -> None:
    """The size of its cells is not that of their texts."""
    path = str(tmp_path / "a.parquet")
    images = [{"bytes": jpeg(60, 60), "path": None}, None] * 4
    pq.write_table(pa.table({"text": [f"text {at}" for at in range(8)], "image": images}), path)
    words, text = counting()
    build_index([path], Recipe(text=text()))
    recipe = Recipe(text=text(), limits=limits)
    expected = in_new_cache(path, recipe, tmp_path / "other")
    words.calls.clear()
    assert content(build_index([path], recipe)) == expected
    assert not words.calls


@pytest.mark.parametrize(
    "value", [{"dtype": "float32"}, {"mean": (0, 0, 0)}, {"std": (1, 1, 1)}, {"resizer": "pillow"}]
)
def test_what_changes_no_count_needs_no_other_index(text_shard: str, value: dict[str, Any]) -> None:
    words, text = counting()
    first = build_index([text_shard], Recipe(text=text()))
    other = Recipe(text=text(), image=ImagePreprocessor(**value))
    assert other.fingerprint() != Recipe(text=text()).fingerprint()
    words.calls.clear()
    assert build_index([text_shard], other).path == first.path and not words.calls


@pytest.mark.slow_cases("fast")
@pytest.mark.parametrize("kind", ["words", "fast", "bytes"])
def test_recipes_in_any_order_have_the_texts_of_each(text_shard: str, tmp_path: Path, kind: str) -> None:
    """Also those that cannot use what others kept: shorter limits of texts, other pieces."""

    def text(**options: Any) -> TextPreprocessor:
        given = {"words": (Words(),), "fast": (tokenizer(),), "bytes": ()}[kind]
        return TextPreprocessor(*given, **{"id": "words"} if kind == "words" else {}, **options)

    recipes = list((changed(text()) | overflowing(text)).items())
    random.Random(0).shuffle(recipes)
    for name, recipe in recipes:
        expected = in_new_cache(text_shard, recipe, tmp_path / name)
        assert content(build_index([text_shard], recipe)) == expected, name


def test_other_pieces_tokenize_split_texts_alone(text_shard: str) -> None:
    words, text = counting()
    build_index([text_shard], Recipe(text=text(max_tokens=20, overflow="split")))
    words.calls.clear()
    index = build_index([text_shard], Recipe(text=text(max_tokens=33, overflow="split")))
    assert {index.key(int(row)) for row in index.piece.nonzero()[0]} == {"x0", "x1"}
    assert words.calls and all("word5" in call or "what is it" in call for call in words.calls)
    words.calls.clear()
    build_index([text_shard], Recipe(text=text(max_tokens=33, overflow="truncate")))
    assert not words.calls


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts that fast tokenizers get."""
    given: list[str] = []
    real = FastTokenizer.encode_batch

    def encode_batch(self: FastTokenizer, texts: Any, **options: Any) -> Any:
        given.extend(texts)
        return real(self, texts, **options)

    monkeypatch.setattr(FastTokenizer, "encode_batch", encode_batch)
    yield given


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "idefics3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llava_next", "smolvlm"))],
)
def test_a_processor_is_asked_again_where_an_image_changes_the_text(
    tmp_path: Path, texts: list[str], family: str
) -> None:
    """Idefics writes rows and columns of tiles between the tokens of an image."""
    images = [{"__key__": f"i{n}", "jpg": jpeg(60 + 90 * n, 60), "txt": b"a picture"} for n in range(6)]
    only = [{"__key__": f"t{n}", "txt": b"some text"} for n in range(3)]
    text_shard = write_shard(tmp_path / "hf.tar", [*images, *only])
    recipe = od.hf.recipe(processor(family))
    build_index([text_shard], recipe)
    texts.clear()
    other = Recipe(**recipe._given | recipe._parts | {"limits": Limits(image_pixels=10_000)})
    expected = in_new_cache(text_shard, other, tmp_path / "other")
    texts.clear()
    assert content(build_index([text_shard], other)) == expected
    assert not texts
    # Another image processor, of the same text.
    smaller = processor(family)
    smaller.image_processor.size = {
        name: max(1, value // 2) for name, value in dict(smaller.image_processor.size).items()
    }
    third = od.hf.recipe(smaller)
    assert third.count_fingerprint() != recipe.count_fingerprint()
    expected = in_new_cache(text_shard, third, tmp_path / "third")
    texts.clear()
    assert content(build_index([text_shard], third)) == expected
    assert "some text" not in "".join(texts)


@pytest.mark.parametrize("number", ["VERDICTS", "COUNTS"])
def test_texts_go_by_the_number_of_counts(text_shard: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, text = counting()
    first = build_index([text_shard], Recipe(text=text()))
    everything = len(words.calls)
    words.calls.clear()
    monkeypatch.setattr(recipes, number, 9)
    again = build_index([text_shard], Recipe(text=text()))
    assert content(again) == content(first) and again.path != first.path
    assert len(words.calls) == (everything if number == "COUNTS" else 0)


def test_other_columns_are_other_texts(tmp_path: Path) -> None:
    """The members of a sample have equal names under both mappings."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"one": "a b c", "two": "d e"}) + "\n" for _ in range(3)))
    _, text = counting()
    for old, other, tokens in (("one", "two", 3), ("two", "one", 2)):
        dataset = od.ShardDataset(str(path), columns={old: "text", other: "other"}, recipe=Recipe(text=text()))
        assert dataset.index().llm_tokens.tolist() == [tokens] * 3


def first(record: dict[str, Any]) -> str:
    return str(record["txt"])
