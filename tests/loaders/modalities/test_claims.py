"""What a modality may claim: fields, names, arrays, marks; and what is refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_modalities import Points, Tracks, cloud
from own_shards import Clouds, Wide, indexed, one_shard, parts_of, reasons, recipe_of
from shard_factory import RECIPE as PLAIN
from shard_factory import chat, png

import orchdata as od


@dataclass(frozen=True, kw_only=True)
class Depth(od.ImagePreprocessor):
    fields = ("depth.png",)
    words = ()


def test_the_longest_name_decides_whose_a_member_is(tmp_path: Path) -> None:
    samples = {"png": png(64, 32), "depth.png": png(32, 32), "1.depth.png": png(16, 64)}
    shard = one_shard(tmp_path, samples | {"txt": b"deep"})
    small = {"patch_size": 8, "min_tokens": 1, "max_tokens": 12}
    recipe = recipe_of(depth=Depth(**small))
    index = indexed(shard, recipe)
    assert [size.extent for size in parts_of(index, "image", recipe)] == [(4, 8)]
    assert [size.extent for size in parts_of(index, "depth", recipe)] == [(4, 4), (8, 2)]
    # Without the modality all three are images.
    assert len(parts_of(indexed(shard, PLAIN), "image", PLAIN)) == 3


def test_headers_that_the_facts_have_are_not_read_again(tmp_path: Path, private_cache: Path) -> None:
    indexed(one_shard(tmp_path, {"depth.png": png(32, 32)}), recipe_of(depth=Depth()))
    assert list(private_cache.rglob("*.headers")) == []


class Gifs(Depth):
    fields = ("gif",)


class Framed(od.ImagePreprocessor):
    fields = ("png", "depth.png")


class Marked(Points):
    fields = ("cloud",)
    slot = od.Slot(mark="<image>")


class Worded(Points):
    fields = ("cloud",)
    words = ("image_url",)


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        ({"points": Points(), "clouds": Clouds()}, "clouds and points both claim the field 'npy'"),
        ({"points": Points(), "npy": Tracks()}, "npy and points both claim the field 'npy'"),
        ({"image": Framed(), "depth": Depth()}, "image and depth both claim the field 'depth.png'"),
        ({"a": Tracks(), "b": Wide(), "wide": Tracks()}, "b and wide both claim the field 'wide'|'track'"),
        ({"marked": Marked()}, "the marks of image and marked are both '<image>'"),
        ({"worded": Worded()}, "image and worded both claim items of type 'image_url'"),
    ],
)
def test_claims_that_collide_are_refused(modalities: dict[str, od.Modality], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        od.Recipe(**modalities)


def test_what_is_left_out_may_be_claimed_and_a_users_claim_goes_before_a_default() -> None:
    assert od.Recipe(image=None, worded=Worded()).rules.words.items["image_url"] == "worded"
    recipe = recipe_of(moving=Gifs())
    assert recipe.kinds[recipe.kind_of("0.gif", 1)] == "moving" and recipe.kinds[recipe.kind_of("png", 1)] == "image"


@pytest.mark.parametrize("name", ["llm", "step", "Points", "2d", "point-cloud", "_x", "x_", ""])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a modality cannot be called"):
        od.Recipe(**{name: Points()})


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        ({"points": 3}, "Recipe.points must be an od.Modality, got int"),
        ({"points": Points}, "Recipe.points must be an od.Modality, got type"),
        ({"text": Points()}, "Recipe.text must be TextPreprocessor, got Points"),
        ({"image": od.AudioPreprocessor()}, "Recipe.image must be ImagePreprocessor, got AudioPreprocessor"),
    ],
)
def test_what_is_no_modality_is_refused(modalities: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        od.Recipe(**modalities)


@dataclass(frozen=True, kw_only=True)
class Arrays(Points):
    name: str = "points"
    dtype: str = "float32"
    per: Any = "row"
    row_shape: tuple[int, ...] = (3,)

    def arrays(self) -> Mapping[str, od.ArraySpec]:
        return {self.name: od.ArraySpec(self.row_shape, self.dtype, self.per)}


@pytest.mark.parametrize(
    ("modalities", "error", "message"),
    [
        ({"points": Arrays(name="positions")}, ValueError, "an array of points cannot be called 'positions'"),
        ({"points": Arrays(name="mask")}, ValueError, "'mask'"),
        ({"points": Arrays(name="two words")}, ValueError, "'two words'"),
        ({"input": Arrays(name="ids")}, ValueError, "every batch and input both have an input called input_ids"),
        ({"a": Arrays(name="b_values"), "a_b": Tracks()}, ValueError, "a and a_b both have an input called a_b_values"),
        ({"points": Arrays(per="rows")}, ValueError, "per='rows'"),
        ({"points": Arrays(row_shape=(0,))}, ValueError, "sides are ints of at least 1"),
        ({"points": Arrays(dtype="object")}, TypeError, "dtype 'object'"),
        ({"points": Arrays(dtype="float99")}, TypeError, "float99"),
    ],
)
def test_arrays_that_no_batch_can_hold_are_refused(
    modalities: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        od.Recipe(**modalities)


@dataclass(frozen=True, kw_only=True)
class Called(Points):
    """Its names are parameters, as any may be."""

    fields: Any = ("npy",)
    words: Any = ()
    slot: Any = od.Slot()


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ({"fields": "npy"}, "fields of points must be a tuple of names, got 'npy'"),
        ({"fields": ("npy", "")}, "fields of points must be a tuple of names"),
        ({"words": "cloud"}, "words of points must be a tuple of names, got 'cloud'"),
        ({"fields": (".npy",)}, "must be called 'npy', without its dot, got '.npy'"),
        ({"slot": od.Slot(mark=b"<cloud>")}, "the mark of points must be a string"),  # type: ignore[arg-type]
        ({"slot": od.Slot(token_id=-1)}, r"the token_id of points must be an int in \[0, 2147483647\], got -1"),
        ({"slot": od.Slot(token_id=None)}, "the token_id of points"),  # type: ignore[arg-type]
        ({"slot": od.Slot(start_id=2**31)}, "the start_id of points"),
    ],
)
def test_names_and_tokens_that_would_find_nothing_are_refused(called: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        od.Recipe(points=Called(**called))
    assert od.Recipe(points=Called(fields=("NPY",))).kind_of("0.npy", 255) == 3


def test_what_is_text_by_its_suffix_may_be_claimed(tmp_path: Path) -> None:
    recipe = recipe_of(layout=Called(fields=("layout.json", "csv")))
    shard = one_shard(tmp_path, {"layout.json": cloud(6), "csv": cloud(3), "json": chat("what?", "<layout> <layout>")})
    index = indexed(shard, recipe)
    assert reasons(index) == {} and [size.positions for size in parts_of(index, "layout", recipe)] == [3, 6]


def test_a_modality_without_methods_says_which_it_lacks(tmp_path: Path) -> None:
    class Nothing(od.Modality):
        fields = ("nothing",)

    class Uncounted(Nothing):
        def arrays(self) -> Mapping[str, od.ArraySpec]:
            return {}

    with pytest.raises(NotImplementedError, match=r"Nothing must define arrays\(\)"):
        od.Recipe(nothing=Nothing())
    errors = reasons(indexed(one_shard(tmp_path, {"nothing": b"data"}), od.Recipe(nothing=Uncounted())))
    assert "must define count(), or probe() and count_header()" in errors["s0"][1]
