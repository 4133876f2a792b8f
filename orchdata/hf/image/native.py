"""What Hugging Face's image processors make of pixels, by this library's own resizing and cutting: in less time, the
same values.

    pixels (height, width, 3) --resized, cropped, padded--> canvases, whole tiles each --patchify--> rows

All steps of theirs but the last work on bytes, so that normalising is a table of 256 values a channel, which the
processor itself fills. Whoever uses this compares it with the processor first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.processors import running
from orchdata.hf.image.sizes import Settings, class_name, crops, pixels, whole_tiles
from orchdata.loaders.modalities.image_decode import resized
from orchdata.native.patchify import patchify

Canvas = NDArray[np.uint8]
_RESAMPLES: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow numbers them


class Cut(NamedTuple):
    """How a canvas becomes rows: side of a tile in pixels, of a block in tiles, and how often a tile is repeated."""

    side: int
    merge: int = 1
    repeats: int = 1


class Steps:
    """What canvases are made with: a processor's settings and its resizing. Raises LookupError for others' settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._resizer = "torchvision" if settings.processor.backend == "torchvision" else "pillow"
        self._resample = _RESAMPLES[int(settings.resample)]
        if not settings.do_resize:
            raise LookupError("images as they are")

    def resize(self, image: Canvas, height: int, width: int) -> Canvas:
        return np.ascontiguousarray(resized(image, (width, height), self._resizer, self._resample))


def write_rows(source: str, image: Canvas, rows: NDArray[np.float32]) -> None:
    """Write an image (height, width, 3) as the processor described by `source` would.

    Args:
        rows: of its one array, C-contiguous, written in whole.

    Raises:
        LookupError: a class or setting that this does not know.
        ValueError: of another number of rows.
    """
    run = running(source)
    canvases, cut_of = _FAMILIES[class_name(run.image_processor)]
    cut, table = cut_of(run.settings), byte_values(source)
    flat, first = rows.reshape(len(rows), -1), 0
    for canvas in canvases(Steps(run.settings), image):
        count = canvas.shape[0] // cut.side * (canvas.shape[1] // cut.side)
        patchify(canvas, cut.side, cut.merge, table, flat[first : first + count], cut.repeats)
        first += count
    if first != len(rows):
        raise ValueError(f"prepared to {first} rows instead of {len(rows)}")


@lru_cache(maxsize=8)
def byte_values(source: str) -> NDArray[np.float32]:
    """(3, 256): what the processor makes of each byte in each channel."""
    run = running(source)
    settings, levels = run.settings, np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256)).copy()
    means, stds = tuple(settings.image_mean), tuple(settings.image_std)
    found: Any = levels
    if settings.processor.backend == "torchvision":
        import torch

        scaling = (settings.do_rescale, settings.rescale_factor, settings.do_normalize)
        tensor = torch.from_numpy(levels)[None]
        found = settings.processor.rescale_and_normalize(tensor, *scaling, means, stds)[0].numpy()
    else:
        if settings.do_rescale:
            found = settings.processor.rescale(found, settings.rescale_factor)
        if settings.do_normalize:
            found = settings.processor.normalize(found, means, stds)
    if found.dtype != np.float32:
        raise LookupError(f"values of {found.dtype}")
    return np.ascontiguousarray(found.reshape(3, 256))


def _square_side(sides: tuple[int, int]) -> int:
    if sides[0] != sides[1]:
        raise LookupError(f"tiles of {sides[0]} x {sides[1]}")
    return sides[0]


def _tiles_of(name: str) -> Callable[[Settings], Cut]:
    return lambda settings: Cut(_square_side(settings.side(name)))


def _patches(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    settings, size = steps.settings, dict(steps.settings.size)
    factor = settings.patch_size * settings.merge_size
    limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    yield steps.resize(image, *settings.module.smart_resize(*image.shape[:2], factor=factor, **limits))


def _cropped(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    from transformers.image_transforms import get_resize_output_image_size

    settings = steps.settings
    height, width = settings.side("size")
    if "shortest_edge" in dict(settings.size):
        height, width = get_resize_output_image_size(pixels(3, *image.shape[:2]), height, default_to_square=False)
    image = steps.resize(image, height, width)
    if getattr(settings.processor, "do_center_crop", None):
        high, wide = settings.side("crop_size")
        if high > height or wide > width:
            raise LookupError("a crop larger than the image")
        top, left = (height - high) // 2, (width - wide) // 2
        image = image[top : top + high, left : left + wide]
    yield np.ascontiguousarray(image)


def _padded(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    """LLaVA: squares in the colour of the mean."""
    height, width = image.shape[:2]
    if steps.settings.do_pad and height != width:
        side = max(height, width)
        square = np.empty((side, side, 3), np.uint8)
        square[:] = [int(mean * 255) for mean in steps.settings.image_mean]
        top, left = (side - height) // 2, (side - width) // 2
        square[top : top + height, left : left + width] = image
        image = square
    return _cropped(steps, image)


def _any_resolution(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    """LLaVA-NeXT and OneVision: the whole picture, then that within the best of some sizes, on black."""
    settings, size = steps.settings, image.shape[:2]
    side = _square_side(settings.side("size"))
    if settings.crop_size and settings.do_center_crop and settings.side("crop_size") != (side, side):
        raise LookupError("tiles that are cropped")
    yield steps.resize(image, side, side)
    high, wide = settings.module.select_best_resolution(size, settings.image_grid_pinpoints)
    height, width = settings.module.get_patch_output_size(pixels(3, *size), (high, wide), "channels_first")
    canvas = np.zeros((high, wide, 3), np.uint8)
    top, left = (high - height) // 2, (wide - width) // 2
    canvas[top : top + height, left : left + width] = steps.resize(image, height, width)
    yield canvas


def _tiled(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    """InternVL: tiles of about the picture's aspect, then all of it in one."""
    settings = steps.settings
    side, cols, rows = settings.side("size"), 1, 1
    if settings.crop_to_patches:
        cols, rows = settings.module.get_optimal_tiled_canvas(
            image.shape[:2], side, settings.min_patches, settings.max_patches
        )
    yield steps.resize(image, rows * side[0], cols * side[1])
    if rows * cols > 1:
        yield steps.resize(image, *side)


def _split(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    """Idefics3 and SmolVLM: resized to the longest edge, then to whole tiles; what comes last is made of these."""
    settings = steps.settings
    side = settings.max_image_size["longest_edge"]
    size = settings.module.get_resize_output_image_size(pixels(3, *image.shape[:2]), settings.size["longest_edge"])
    image = steps.resize(image, *size)
    if settings.do_image_splitting:
        height, width = whole_tiles(image.shape[0], image.shape[1], side)
        image = steps.resize(image, height, width)
        if max(height, width) > side:
            yield image
    yield steps.resize(image, side, side)


def _pan_and_scan(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    """Gemma-3: the picture, then crops of it where it is flat or tall."""
    settings, side = steps.settings, steps.settings.side("size")
    yield steps.resize(image, *side)
    for crop in crops(settings, image.transpose(2, 0, 1)):
        yield steps.resize(np.ascontiguousarray(crop.transpose(1, 2, 0)), *side)


_Canvases = Callable[[Steps, Canvas], Iterator[Canvas]]
_FAMILIES: Final[Mapping[str, tuple[_Canvases, Callable[[Settings], Cut]]]] = {
    "Qwen2VLImageProcessor": (
        _patches,
        lambda settings: Cut(settings.patch_size, settings.merge_size, settings.temporal_patch_size),
    ),
    "CLIPImageProcessor": (_cropped, _tiles_of("crop_size")),
    "SiglipImageProcessor": (_cropped, _tiles_of("size")),
    "LlavaImageProcessor": (_padded, _tiles_of("crop_size")),
    "LlavaNextImageProcessor": (_any_resolution, _tiles_of("size")),
    "LlavaOnevisionImageProcessor": (_any_resolution, _tiles_of("size")),
    "GotOcr2ImageProcessor": (_tiled, _tiles_of("size")),
    "Idefics3ImageProcessor": (_split, lambda settings: Cut(settings.max_image_size["longest_edge"])),
    "SmolVLMImageProcessor": (_split, lambda settings: Cut(settings.max_image_size["longest_edge"])),
    "Gemma3ImageProcessor": (_pan_and_scan, _tiles_of("size")),
}
