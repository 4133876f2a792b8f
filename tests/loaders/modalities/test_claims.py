"""What a modality may claim: fields, names, arrays, marks; and what is refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_modalities import Points, Tracks
from own_shards import Clouds, Wide, indexed, one_shard, parts_of, recipe_of
from shard_factory import RECIPE as PLAIN
from shard_factory import png

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
        ({"image": Framed(), "depth": Depth()}, "image and depth both claim the field 'depth.png'"),
        ({"a": Tracks(), "b": Wide(), "wide": Tracks()}, "b and wide both claim the field 'wide'|'track'"),
        ({"marked": Marked()}, "the marks of image and marked are both '<image>'"),
        ({"worded": Worded()}, "image and worded both claim items of type 'image_url'"),
    ],
)
def test_claims_that_collide_are_refused(modalities: dict[str, od.Modality], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        od.Recipe(**modalities)


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        ({"points": 3}, "Recipe.points must be an od.Modality, got int"),
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
        ({"input": Arrays(name="ids")}, ValueError, "every batch and input both have an input called input_ids"),
        ({"a": Arrays(name="b_values"), "a_b": Tracks()}, ValueError, "a and a_b both have an input called a_b_values"),
        ({"points": Arrays(row_shape=(0,))}, ValueError, "sides are ints of at least 1"),
        ({"points": Arrays(dtype="object")}, TypeError, "dtype 'object'"),
    ],
)
def test_arrays_that_no_batch_can_hold_are_refused(
    modalities: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        od.Recipe(**modalities)
