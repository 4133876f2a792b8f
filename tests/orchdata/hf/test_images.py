"""Images of Hugging Face processors: what HFImages counts, writes and decodes is what the processor itself gives."""

from __future__ import annotations

import dataclasses
import io
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import hf_processors
from hf_processors import BACKENDS, FAMILIES
from PIL import Image, ImageOps

from orchdata.hf.image_processors import as_array, running
from orchdata.hf.images import HFImages, image_modality, runs
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import PartSize, stored_dtype

# Of transformers about itself: PaliGemma's processor makes arrays of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LIMITS = Limits()


@lru_cache
def built(family: str, backend: str) -> Any:
    return hf_processors.processor(family, backend)


@lru_cache
def modality_of(family: str, backend: str) -> HFImages:
    return image_modality(built(family, backend))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def theirs(data: bytes) -> Image.Image:
    """As transformers' load_image reads it."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


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


def assert_as_processor(family: str, backend: str, data: bytes) -> None:
    processor, images = built(family, backend), modality_of(family, backend)
    size, out = decoded(images, data)
    picture = theirs(data)
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
    "alpha": lambda: encoded(Image.fromarray(noise(80, 120, 4))),
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
    assert modality_of(family, backend).counted == "rule"
    for picture in PICTURES.values():
        assert_as_processor(family, backend, picture())


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_count_as_blank_images_measure(family: str) -> None:
    ruled = modality_of(family, BACKENDS[-1])
    measured = dataclasses.replace(ruled, counted="measured")
    rng = np.random.default_rng(0)
    for width, height in np.exp(rng.uniform(np.log(3), np.log(600), (60, 2))).astype(int).tolist():
        found = [images.count_header((width, height), LIMITS) for images in (ruled, measured)]
        assert found[0] == found[1], (width, height)
        assert ruled.expand(found[0]) == measured.expand(found[1])


def test_runs_of_a_mark() -> None:
    assert runs("a<i><i>b<i>", "<i>") == ("a", 2, "b", 1)
    assert runs("<i>", "<i>") == (1,)
    assert runs("none", "<i>") == ("none",)
