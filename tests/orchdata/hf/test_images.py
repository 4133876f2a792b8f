"""Images of Hugging Face processors: what HFImages counts, writes and decodes is what the processor itself gives."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import hf_processors
import torch
import transformers
from hf_families.samples import as_image
from hf_processors import BACKENDS, FAMILIES
from images import encoded
from PIL import Image

from orchdata.hf.image_rules import FAMILIES as RULES
from orchdata.hf.images import HFImages, _found, image_modality
from orchdata.hf.processors import as_array, running
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import PartSize, keeps_headers_of, stored_dtype
from orchdata.loaders.recipe import ImagePreprocessor, Recipe

# Of what is compared with: PaliGemma's processor makes arrays of tensors, and Pillow drops transparency.
pytestmark = [
    pytest.mark.cpus,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning"),
]

LIMITS = Limits()


@lru_cache
def built(family: str, backend: str) -> Any:
    return hf_processors.processor(family, backend)


@lru_cache
def modality_of(family: str, backend: str) -> HFImages:
    return image_modality(built(family, backend))


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def decoded(images: HFImages, data: bytes) -> tuple[PartSize, dict[str, np.ndarray]]:
    size = images.count_header(images.probe(data, LIMITS), LIMITS)
    out = {
        name: np.full((size.num_rows if spec.per == "row" else 1, *spec.row_shape), 7, stored_dtype(spec.dtype))
        for name, spec in images.arrays().items()
    }
    images.decode_into(data, size, out, LIMITS)
    return size, out


def expanded(images: HFImages, size: PartSize, tokenizer: Any) -> list[int]:
    """Ids of the text that stands for a part: one mark for a run, repeated after tokenizing."""
    pieces = images.expand(size)
    assert pieces is not None and sum(piece for piece in pieces if isinstance(piece, int)) == size.tokens
    text = "".join(images.slot.mark if isinstance(piece, int) else piece for piece in pieces)
    counts = iter([piece for piece in pieces if isinstance(piece, int)])
    ids = tokenizer(f"See{text}?", add_special_tokens=False)["input_ids"]
    return [each for one in ids for each in [one] * (next(counts) if one == images.slot.token_id else 1)]


def assert_as_processor(family: str, backend: str, data: bytes, *, native: bool = True) -> None:
    processor, images = built(family, backend), dataclasses.replace(modality_of(family, backend), native=native)
    size, out = decoded(images, data)
    picture = as_image(data)
    given = processor(images=[picture], text=[images.placeholder], return_tensors="pt")
    for name, values in out.items():
        expected = as_array(given[name])
        np.testing.assert_array_equal(values, expected.reshape(values.shape), err_msg=name)
        assert values.dtype == expected.dtype
    for name, values in images.extras([size]).items():
        np.testing.assert_array_equal(values, as_array(given[name]), err_msg=name)
        assert values.dtype == as_array(given[name]).dtype
    left = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels", "pixel_attention_mask"}
    assert {*out, *images.extras([size])} == given.keys() - left
    if "pixel_attention_mask" in given and "pixel_attention_mask" not in out:
        assert bool(given["pixel_attention_mask"].all())
    _, text = running(images.source).outputs(picture)
    whole = processor.tokenizer(f"See{text}?", add_special_tokens=False)["input_ids"]
    assert expanded(images, size, processor.tokenizer) == whole
    assert whole.count(images.slot.token_id) == size.tokens == int((given["input_ids"] == images.slot.token_id).sum())


PICTURES = {
    "square": lambda: encoded(Image.fromarray(noise(200, 200, 3))),
    "flat": lambda: encoded(Image.fromarray(noise(60, 500, 3))),
    "tall": lambda: encoded(Image.fromarray(noise(700, 90, 3))),
    "tiny": lambda: encoded(Image.fromarray(noise(9, 13, 3))),
    "grey": lambda: encoded(Image.fromarray(noise(80, 120))),
    "palette": lambda: encoded(Image.fromarray(noise(80, 120, 3)).convert("P")),
    "palette, half transparent": lambda: encoded(
        Image.fromarray(noise(80, 120, 3)).convert("P"), transparency=bytes(range(256))
    ),
    "alpha": lambda: encoded(Image.fromarray(noise(80, 120, 4))),
    "palette, one transparent": lambda: encoded(Image.fromarray(noise(80, 120, 3)).quantize(7), transparency=2),
    "colour, transparent": lambda: encoded(Image.fromarray(noise(80, 120, 3) & 128), transparency=(128, 0, 128)),
    "16 bit": lambda: encoded(Image.fromarray(noise(80, 120, dtype=np.uint16))),
    "JPEG": lambda: encoded(Image.fromarray(noise(90, 130, 3)), "JPEG"),
    "CMYK": lambda: encoded(Image.fromarray(noise(90, 130, 4)).convert("CMYK"), "JPEG"),
    "turned": lambda: encoded(Image.fromarray(noise(90, 130, 3)), "JPEG", exif=_turned()),
    "turned PNG": lambda: encoded(Image.fromarray(noise(90, 130, 3)), exif=_turned()),
}


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_picture_becomes_what_the_processor_makes_of_it(family: str, backend: str) -> None:
    images = modality_of(family, backend)
    assert images.counted == "rule" and images.native
    for picture in PICTURES.values():
        assert_as_processor(family, backend, picture())


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_count_as_blank_images_measure(family: str) -> None:
    ruled = modality_of(family, BACKENDS[-1])
    measured = dataclasses.replace(ruled, counted="measured")
    rng = np.random.default_rng(0)
    for width, height in np.exp(rng.uniform(np.log(6), np.log(600), (30, 2))).astype(int).tolist():
        found = [images.count_header((width, height), LIMITS) for images in (ruled, measured)]
        assert found[0] == found[1], (width, height)
        assert ruled.expand(found[0]) == measured.expand(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_photographs(family: str, backend: str, fixtures_dir: Path) -> None:
    images, checked = modality_of(family, backend), 0
    for path in sorted((fixtures_dir / "images").rglob("*.*"))[::6]:
        data = path.read_bytes()
        try:
            images.count_header(images.probe(data, LIMITS), LIMITS)
            as_image(data)
        except (DecodeError, OSError, ValueError, SyntaxError):
            continue  # neither takes it, or HEIF and the like, which are not read here
        try:
            assert_as_processor(family, backend, data)
        except DecodeError as error:  # damage that Pillow passes off as grey
            assert "damaged" in str(error)
        checked += 1
    assert checked > 40


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", [name for name, family in RULES.items() if family.canvases is RULES["Qwen2VL"].canvases]
)
def test_patches_of_every_class_with_a_rule_are_its_own_at_and_between_its_limits(name: str, backend: str) -> None:
    limits = {"shortest_edge": 100 * 100, "longest_edge": 300 * 300}
    processor = hf_processors.image_processor(f"{name}ImageProcessor", backend, size=limits)
    images, refused = image_modality(processor), 0
    assert images.counted == "rule" and (images.native or name == "Cosmos3Edge")
    rng = np.random.default_rng(2)
    for width, height in np.exp(rng.uniform(np.log(8), np.log(900), (40, 2))).astype(int).tolist():
        picture = Image.fromarray(noise(height, width, 3))
        try:
            given = processor([picture], return_tensors="pt")
        except ValueError:
            refused += 1
            with pytest.raises(DecodeError, match="which its processor refuses"):
                images.count_header((width, height), LIMITS)
            continue
        size, out = decoded(images, encoded(picture, "BMP"))
        np.testing.assert_array_equal(out["pixel_values"], given["pixel_values"].numpy())
        assert images.extras([size])["image_grid_thw"].tolist() == given["image_grid_thw"].tolist()
    assert refused < 10


def test_what_the_processor_refuses_is_that_images_failure() -> None:
    with pytest.raises(DecodeError, match="3 x 900 pixels, which its processor refuses: absolute aspect ratio"):
        modality_of("qwen2_vl", "pil").count_header((3, 900), LIMITS)


def test_another_image_than_indexed_is_an_error() -> None:
    images, data = modality_of("llava_next", "pil"), PICTURES["square"]()
    size = images.count_header((200, 190), LIMITS)
    out = {name: np.empty((size.num_rows, *spec.row_shape), spec.dtype) for name, spec in images.arrays().items()}
    with pytest.raises(DecodeError, match="decoded to 200 x 200 pixels, the index says 200 x 190: index again"):
        images.decode_into(data, size, out, LIMITS)
    other = images.count_header((200, 200), LIMITS)
    for native in (False, True):
        with pytest.raises((DecodeError, ValueError), match="prepared to"):
            wrong = {
                name: np.empty((other.num_rows + 1, *values.shape[1:]), values.dtype) for name, values in out.items()
            }
            dataclasses.replace(images, native=native).decode_into(data, other, wrong, LIMITS)


def test_a_look_at_the_processor_finds_out_what_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = hf_processors.processor("llava", "pil")
    processor.image_processor.resample = 2  # what follows differs from the rest of these tests: nothing is cached
    native = image_modality(processor)
    assert native.native
    monkeypatch.setattr("orchdata.hf.image_rules.RESAMPLES", {2: "bicubic"})
    processor.image_processor.resample = 2
    assert not image_modality(processor).native
    monkeypatch.setattr("orchdata.hf.image_rules.FAMILIES", {})
    _found.cache_clear()
    assert image_modality(processor).counted == "measured"
    _found.cache_clear()


@pytest.mark.parametrize(
    ("family", "size", "tiles"),
    [("qwen2_vl", (168, 112), 1), ("qwen3_vl", (192, 128), 1), ("glm4v", (168, 112), 1),
     ("paddleocr_vl", (168, 112), 1), ("llava", (56, 56), 1), ("gemma3", (56, 56), 1), ("internvl", (112, 56), 3)],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_rows_become_the_picture_that_was_cut(family: str, size: tuple[int, int], tiles: int, backend: str) -> None:
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    images, picture = modality_of(family, backend), noise(size[1], size[0], 3)
    data = encoded(Image.fromarray(picture))
    found, out = decoded(images, data)
    assert found.num_rows == tiles or images.merge
    suffix, content = images.to_file(data, found, out, LIMITS)
    assert suffix == "png"
    shown = np.asarray(Image.open(io.BytesIO(content)))
    assert np.array_equal(shown[:, : size[0]], picture)  # the whole follows, if there are tiles
    assert shown.shape[1] == (size[0] + 56 if tiles > 1 else size[0])


def test_positions_are_those_of_the_tower() -> None:
    for family, per_tile in {"llava": 16, "llava_onevision": 9, "internvl": 16, "smolvlm": 16, "gemma3": 16}.items():
        images = modality_of(family, "pil")
        size = images.count_header((640, 400), LIMITS)
        assert size.positions == size.num_rows * per_tile, family
    assert image_modality(built("internvl", "pil"), patch_size=28).count_header((56, 56), LIMITS).positions == 4


def test_a_modality_is_a_value() -> None:
    images = modality_of("smolvlm", "pil")
    again = pickle.loads(pickle.dumps(images))
    assert again == images and hash(again) == hash(images)
    assert json.loads(json.dumps(images.describe())) == images.describe()
    recipes = [Recipe(image=each) for each in (images, again, dataclasses.replace(images, native=False))]
    assert len({recipe.fingerprint() for recipe in recipes}) == 1
    other = hf_processors.processor("smolvlm", "pil")
    other.image_processor.image_mean = (0.4, 0.5, 0.5)
    assert Recipe(image=image_modality(other)).fingerprint() != recipes[0].fingerprint()
    assert keeps_headers_of(HFImages, ImagePreprocessor)  # the index's own headers


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
@pytest.mark.parametrize("native", [True, False])
def test_threads_do_not_meet(family: str, native: bool) -> None:
    images = dataclasses.replace(modality_of(family, "pil"), native=native)
    pictures = [encoded(Image.fromarray(noise(90 + 20 * number, 150, 3)), "JPEG") for number in range(4)]
    alone = [decoded(images, data)[1]["pixel_values"] for data in pictures]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda number: decoded(images, pictures[number % 4])[1]["pixel_values"], range(12)))
    for number, values in enumerate(together):
        np.testing.assert_array_equal(values, alone[number % 4])


class _Measured(transformers.LlavaNextImageProcessorPil):
    """A class that no rule is known of."""


class _Coloured(transformers.CLIPImageProcessorPil):
    """What becomes of an image depends on its pixels."""

    def _preprocess(self, images: list[Any], **settings: Any) -> Any:
        found = super()._preprocess(images, **settings)
        times = 1 + int(images[0].mean() > 120)
        tiles = [*found["pixel_values"]] * times
        found["pixel_values"] = torch.stack(tiles) if settings["return_tensors"] else tiles
        return found


def _of_kind(kind: type, family: str = "llava") -> Any:
    processor = hf_processors.processor(family, "pil")
    processor.image_processor = kind(**json.loads(processor.image_processor.to_json_string()))
    return processor


def test_a_class_without_a_rule_is_measured() -> None:
    processor = _of_kind(_Measured, "llava_next")
    images = image_modality(processor)
    assert (images.counted, images.native) == ("measured", False)
    data = PICTURES["flat"]()
    size, out = decoded(images, data)
    given = processor(images=[as_image(data)], text=["<image>"], return_tensors="pt")
    np.testing.assert_array_equal(out["pixel_values"], given["pixel_values"][0].numpy())
    assert size.tokens == int((given["input_ids"] == images.slot.token_id).sum())


def _changed(**attributes: Any) -> Any:
    """LLaVA's processor with other attributes, of all its parts that have them."""
    processor = hf_processors.processor("llava", "pil")
    parts = (processor, processor.tokenizer, processor.image_processor)
    for holder, (name, value) in product(parts, attributes.items()):
        if hasattr(holder, name):
            setattr(holder, name, value)
    return processor


def _mllama() -> Any:
    words = hf_processors.tokenizer("<|python_tag|>", image_token="<|image|>")
    return transformers.MllamaProcessor(transformers.MllamaImageProcessorPil(), words)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: object(), "has no image processor"),
        (lambda: _changed(do_center_crop=False), "rows have another shape for every image"),
        (_mllama, "gives no array of tiles or patches"),
        (lambda: _of_kind(_Coloured), "does not follow from its size"),
        (lambda: _changed(patch_size=None), "LlavaProcessor does not take images as it is set: TypeError"),
        (lambda: _changed(image_token="cat dog"), "'cat dog' must be one added token"),
        (lambda: built("llava", "pil").image_processor, "give its processor, or patch_size"),
    ],
)
def test_what_no_batch_can_hold_is_refused(make: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        image_modality(make())


def test_an_image_processor_by_itself() -> None:
    images = image_modality(built("qwen2_vl", "pil").image_processor)
    assert images.expand(size := images.count_header((112, 112), LIMITS)) is None
    assert (size.positions, size.tokens) == (64, 16)
    squares = image_modality(built("llava", "pil").image_processor, patch_size=14)
    assert squares.count_header((10, 20), LIMITS)[:3] == (16, 16, 1)
