"""What Hugging Face's image processors make of pixels, by this library's own resizing and cutting: in less time, the
same values.

    pixels (height, width, 3) --resized, cropped, padded--> canvases, whole tiles each --patchify--> rows

All steps of theirs but the last work on bytes, so that normalising is a table of 256 values a channel, which the
processor itself fills. Whoever uses this compares it with the processor first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.processors import running
from orchdata.hf.image.sizes import Settings, class_name, crops, pixels, sides_of_patches, whole_tiles
from orchdata.hf.processor_parts import RESAMPLES
from orchdata.loaders.modalities.image_decode import laid_out, nearest_bytes, resized
from orchdata.native.decoding import patchify

Canvas = NDArray[np.uint8]


class Cut(NamedTuple):
    """How a canvas becomes rows: side of a tile in pixels, of a block in tiles, and how often a tile is repeated."""

    side: int
    merge: int = 1
    repeats: int = 1


class Steps:
    """A processor's settings and resizing, to make canvases with. Raises LookupError for unknown settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._resizer = "torchvision" if settings.processor.backend == "torchvision" else "pillow"
        self._resample = RESAMPLES[int(settings.resample)]
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
    cut, table = cut_of(run.settings), run.settings.byte_table
    flat, first = rows.reshape(len(rows), -1), 0
    for canvas in canvases(Steps(run.settings), image):
        count = canvas.shape[0] // cut.side * (canvas.shape[1] // cut.side)
        patchify(canvas, cut.side, cut.merge, table, flat[first : first + count], cut.repeats)
        first += count
    if first != len(rows):
        raise ValueError(f"prepared to {first} rows instead of {len(rows)}")


def cut_of(source: str) -> Cut:
    """Return how the processor of `source` cuts its canvases. Raises LookupError for an unknown class."""
    run = running(source)
    return _FAMILIES[class_name(run.image_processor)][1](run.settings)


def _square_side(sides: tuple[int, int]) -> int:
    if sides[0] != sides[1]:
        raise LookupError(f"tiles of {sides[0]} x {sides[1]}")
    return sides[0]


def _tiles_of(name: str) -> Callable[[Settings], Cut]:
    return lambda settings: Cut(_square_side(settings.side(name)))


def _blocks_of_patches(settings: Settings) -> Cut:
    return Cut(settings.patch_size, settings.merge_size, settings.temporal_patch_size)


def _rows_of_patches(settings: Settings) -> Cut:
    """Cut patches from left to right, not by blocks of merged ones."""
    return Cut(settings.patch_size, 1, settings.temporal_patch_size)


def _resized(steps: Steps, image: Canvas) -> Iterator[Canvas]:
    yield steps.resize(image, *sides_of_patches(steps.settings, image.shape[1], image.shape[0]))


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
    cell = settings.side("crop_size")[0] if settings.crop_size else side
    if settings.crop_size and settings.do_center_crop and settings.side("crop_size") != (side, side):
        raise LookupError("tiles that are cropped")
    yield steps.resize(image, side, side)
    high, wide = settings.module.select_best_resolution(size, settings.image_grid_pinpoints)
    height, width = settings.module.get_patch_output_size(pixels(3, *size), (high, wide), "channels_first")
    canvas = np.zeros((high, wide, 3), np.uint8)
    top, left = (high - height) // 2, (wide - width) // 2
    canvas[top : top + height, left : left + width] = steps.resize(image, height, width)
    if cell == side and high % side == wide % side == 0:
        yield canvas
        return
    # LLaVA-NeXT's defaults: sizes of 336 pixels in tiles of 224. What is left over is a part of a tile, enlarged.
    for top, left in product(range(0, high, cell), range(0, wide, cell)):
        yield from _cropped(steps, np.ascontiguousarray(canvas[top : top + cell, left : left + cell]))


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
    "Qwen2VLImageProcessor": (_resized, _blocks_of_patches),
    "CohereCompassImageProcessor": (_resized, _blocks_of_patches),
    "Ernie4_5_VLMoeImageProcessor": (_resized, _blocks_of_patches),
    "Ernie4_5_VL_MoeImageProcessor": (_resized, _blocks_of_patches),
    "Glm46VImageProcessor": (_resized, _blocks_of_patches),
    "Glm4vImageProcessor": (_resized, _blocks_of_patches),
    "GlmgaImageProcessor": (_resized, _blocks_of_patches),
    "HunYuanVLImageProcessor": (_resized, _rows_of_patches),
    "PaddleOCRVLImageProcessor": (_resized, _rows_of_patches),
    "VideoLlama3ImageProcessor": (_resized, _blocks_of_patches),
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


def picture_of_rows(source: str, rows: NDArray[np.float32], grid: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Return the picture that rows were made of, tiles side by side. uint8 (height, width, 3).

    Args:
        source: of the processor.
        rows: (num_tiles, 3, height, width); with a grid (grid_h * grid_w, 3 * times * side * side).
        grid: patches along height and width, in blocks of merged tokens; None where rows are tiles.

    Raises:
        LookupError: rows or settings of another form.
    """
    settings: Any = running(source).settings
    if grid is None:
        if rows.ndim != 4 or rows.shape[1] != 3:
            raise LookupError(f"rows of shape {rows.shape}")
        tiles = rows.transpose(2, 0, 3, 1).reshape(rows.shape[2], -1, 3)
        return nearest_bytes(tiles, settings.byte_table)
    side, merge = int(settings.patch_size), int(settings.merge_size)
    with suppress(LookupError):  # of any other class, rows are taken to be in blocks
        merge = cut_of(source).merge
    rows = rows.reshape(len(rows), -1)
    if rows.shape[0] != grid[0] * grid[1] or rows.shape[1] % (3 * side * side):
        raise LookupError(f"rows of shape {rows.shape}")
    return nearest_bytes(laid_out(rows, side, merge, grid)[0], settings.byte_table)
