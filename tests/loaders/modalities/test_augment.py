"""What decoding draws from: the generator of a part, who asks for it, and the user's augmentation of images."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import augmentations
import numpy as np
import pytest
from augmentations import Dropped, Halved, cropped, inverted, noisy
from own_modalities import Points
from shard_factory import jpeg, png

import orchdata as od
from orchdata.loaders.errors import FieldError
from orchdata.loaders.generators import Pass, ShardIdentity
from orchdata.loaders.samples.sample import decode_media

SHARD = ShardIdentity("a.tar", 10)
SMALL = od.ImagePreprocessor(patch_size=8, max_tokens=12, dtype="uint8")


def draws(of: Pass = Pass(1, "web", 2), shard: ShardIdentity = SHARD, key: str = "k", part: int = 0) -> int:  # noqa: B008
    return int(of.generator(shard, key, part).integers(1 << 62))


def decoded(modality: od.Modality, data: bytes, rng: Any = lambda: np.random.default_rng(3)) -> Any:
    name = "points" if isinstance(modality, Points) else "image"
    recipe = od.Recipe(**{name: modality})
    (array,) = decode_media(name, data, modality.count(data, recipe.limits), recipe, "field", rng).arrays.values()
    return array


def pixels_of(modality: od.ImagePreprocessor, data: bytes) -> Any:
    """The picture in the patches."""

    size = modality.count(data, od.Limits())
    return modality._pictures(decoded(modality, data), size.extent)[0]  # type: ignore[arg-type]


def test_generator_depends_on_each_of_its_identity_and_on_nothing_else() -> None:
    others = [
        draws(Pass(2, "web", 2)),
        draws(Pass(1, "wed", 2)),
        draws(Pass(1, "web", 3)),
        draws(shard=ShardIdentity("b.tar", 10)),
        draws(shard=ShardIdentity("a.tar", 11)),
        draws(key="l"),
        draws(part=1),
    ]
    assert len({draws(), *others}) == 8
    assert draws() == draws()
    assert draws() == 298085707625059540  # on every machine, in every release


@pytest.mark.parametrize("data", [jpeg(60, 40), png(60, 40), png(64, 32)])
@pytest.mark.parametrize("resizer", ["torchvision", "pillow"])
def test_augmentation_gets_the_resized_image(data: bytes, resizer: Any) -> None:
    given: list[Any] = []

    def seen(pixels: Any, rng: np.random.Generator) -> Any:
        assert pixels.flags.c_contiguous and pixels.flags.writeable and pixels.flags.owndata
        given.append(pixels.copy())
        return pixels

    plain = replace(SMALL, resizer=resizer)
    unchanged = replace(plain, augment=seen, augment_id="seen")
    assert np.array_equal(decoded(unchanged, data), decoded(plain, data))
    assert given[0].dtype == np.uint8
    assert np.array_equal(given[0], pixels_of(plain, data))
    assert given[0].shape == (32, 64, 3)
    assert np.array_equal(decoded(replace(plain, augment=inverted), data), 255 - decoded(plain, data))


def test_a_subclass_augments_and_draws_itself() -> None:
    dropped = Dropped(patch_size=8, max_tokens=12, dtype="uint8", augment=noisy)
    patches, plain = decoded(dropped, jpeg(60, 40)), decoded(replace(SMALL, augment=noisy), jpeg(60, 40))
    is_zero = (patches == 0).all(axis=1)
    assert 0 < is_zero.sum() < len(patches)
    assert np.array_equal(patches[~is_zero], plain[~is_zero])
    with pytest.raises(TypeError, match=r"Halved.decode_into has no parameter rng"):
        Halved(augment=noisy)


LINES = {
    name: getattr(augmentations, name).__code__.co_firstlineno
    for name in ("cropped", "as_floats", "as_list", "failing")
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cropped", r"returned uint8 \(32, 63, 3\), not uint8 \(32, 64, 3\) as it was given"),
        ("as_floats", r"returned float32 \(32, 64, 3\), not uint8 \(32, 64, 3\) as it was given"),
        ("as_list", "returned list, not a NumPy array"),
    ],
)
def test_another_size_dtype_or_type_fails_the_part(name: str, said: str) -> None:
    wrong = replace(SMALL, augment=getattr(augmentations, name))
    with pytest.raises(FieldError, match=rf"ImagePreprocessor.augment: {name}, line {LINES[name]} {said}"):
        decoded(wrong, jpeg(60, 40))


def test_fingerprint_has_the_id_and_not_the_function() -> None:
    plain, given = od.Recipe(image=SMALL), replace(SMALL, augment=noisy, augment_id="mine-1")
    assert "augment" not in plain.describe()["image"] and "augment_id" not in plain.describe()["image"]
    described = od.Recipe(image=given).describe()["image"]
    assert described == {**plain.describe()["image"], "augment": "mine-1"}
    same = od.Recipe(image=replace(given, augment=cropped))
    assert same.fingerprint() == od.Recipe(image=given).fingerprint()
    by_text = od.Recipe(image=replace(SMALL, augment=noisy))
    assert by_text.describe()["image"]["augment"].startswith("source:")
    prints = {each.fingerprint() for each in (plain, same, by_text, od.Recipe(image=replace(SMALL, augment=cropped)))}
    assert len(prints) == 4
    assert pickle.loads(pickle.dumps(by_text)).fingerprint() == by_text.fingerprint()
