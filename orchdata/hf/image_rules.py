"""What Hugging Face's image processors make of an image: the shapes, from its size alone, and the values, in less time.

    pixels (height, width, 3) --resized, cropped, padded--> canvases, whole tiles each --patchify--> rows
    (width, height), as a picture without memory --the same--> the number of rows, and others that follow from a size

Arithmetic is the processor's own wherever that can be called. All steps of theirs but the last work on bytes, so that
normalising is a table of 256 values a channel, which the processor itself fills. Whoever uses a rule, or rows, compares
them with the processor first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from inspect import signature
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.modalities.image_decode import laid_out, nearest_bytes, resized
from orchdata.native.decoding import patchify

Outputs = dict[str, Any]
Canvas = NDArray[np.uint8]

_ZERO: Final = np.zeros(1, np.float32)
RESAMPLES: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""As Pillow numbers them."""


class Settings:
    """The settings of an image processor: arguments of the call come before attributes."""

    def __init__(self, image_processor: Any, call: Mapping[str, Any]) -> None:
        self.processor = image_processor
        self.module = import_module(type(image_processor).__module__)
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return self._call[name] if name in self._call else getattr(self.processor, name)

    @cached_property
    def byte_table(self) -> NDArray[np.float32]:
        """(3, 256): what the processor makes of each byte in each channel. Raises LookupError for other values."""
        levels = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256)).copy()
        means, stds = tuple(self.image_mean), tuple(self.image_std)
        values: Any = levels
        if self.processor.backend == "torchvision":
            import torch

            scaling = (self.do_rescale, self.rescale_factor, self.do_normalize)
            images = torch.from_numpy(levels)[None]
            values = self.processor.rescale_and_normalize(images, *scaling, means, stds)[0].numpy()
        else:
            if self.do_rescale:
                values = self.processor.rescale(values, self.rescale_factor)
            if self.do_normalize:
                values = self.processor.normalize(values, means, stds)
        if values.dtype != np.float32:
            raise LookupError(f"values of {values.dtype}")
        return np.ascontiguousarray(values.reshape(3, 256))

    def resize(self, image: Canvas, height: int, width: int) -> Canvas:
        if not self.do_resize:
            raise LookupError("images as they are")
        if not any(image.strides):
            return stub(height, width)
        resizer = "torchvision" if self.processor.backend == "torchvision" else "pillow"
        return resized(np.ascontiguousarray(image), (width, height), resizer, RESAMPLES[int(self.resample)])

    def side(self, name: str) -> tuple[int, int]:
        """(height, width) of `size` or `crop_size`."""
        size = dict(getattr(self, name))
        return (size["height"], size["width"]) if "height" in size else (size["shortest_edge"], size["shortest_edge"])


def pixels(*shape: int) -> NDArray[np.float32]:
    """An array of a shape, without memory."""
    return np.ndarray(shape, np.float32, _ZERO, strides=(0,) * len(shape))


def stub(height: int, width: int) -> Canvas:
    """A picture without memory: what is made of it is one again."""
    return np.ndarray((height, width, 3), np.uint8, _ZERO, strides=(0, 0, 0))


def _framed(image: Canvas, height: int, width: int, colour: Sequence[int]) -> Canvas:
    """An image in the middle of a canvas."""
    if not any(image.strides):
        return stub(height, width)
    canvas = np.empty((height, width, 3), np.uint8)
    canvas[:] = colour
    top, left = (height - image.shape[0]) // 2, (width - image.shape[1]) // 2
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


@cache
def _limits_frames(resize: Callable[..., Any]) -> bool:
    return "num_frames" in signature(resize).parameters


class Cut(NamedTuple):
    """How a canvas becomes rows: side of a tile in pixels, of a block in tiles, and how often a tile is repeated."""

    side: int
    merge: int = 1
    repeats: int = 1

    def tiles(self, canvas: Canvas) -> int:
        return int(canvas.shape[0] // self.side * (canvas.shape[1] // self.side))


def _square_side(sides: tuple[int, int]) -> int:
    if sides[0] != sides[1]:
        raise LookupError(f"tiles of {sides[0]} x {sides[1]}")
    return sides[0]


def _tiles(settings: Settings) -> Cut:
    cropped = getattr(settings.processor, "do_center_crop", None)
    return Cut(_square_side(settings.side("crop_size" if cropped else "size")))


def _blocks_of_patches(settings: Settings) -> Cut:
    return Cut(settings.patch_size, settings.merge_size, settings.temporal_patch_size)


def _rows_of_patches(settings: Settings) -> Cut:
    """Cut patches from left to right, not by blocks of merged ones."""
    return Cut(settings.patch_size, 1, settings.temporal_patch_size)


def _resized(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """Qwen-VL and its like: whole blocks of merged patches, by the class's own `smart_resize`."""
    size, resize = dict(settings.size), settings.module.smart_resize
    given = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    if _limits_frames(resize):  # GLM's limits count the pixels of all pictures of a patch
        given |= dict.fromkeys(("num_frames", "temporal_factor"), settings.temporal_patch_size)
    factor = settings.patch_size * settings.merge_size
    yield settings.resize(image, *resize(height=image.shape[0], width=image.shape[1], factor=factor, **given))


def _cropped(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    cropped = getattr(settings.processor, "do_center_crop", None)
    if not any(image.strides):  # of any size, it becomes one of this
        yield stub(*settings.side("crop_size" if cropped else "size"))
        return
    from transformers.image_transforms import get_resize_output_image_size

    height, width = settings.side("size")
    if "shortest_edge" in dict(settings.size):
        height, width = get_resize_output_image_size(pixels(3, *image.shape[:2]), height, default_to_square=False)
    image = settings.resize(image, height, width)
    if cropped:
        high, wide = settings.side("crop_size")
        if high > height or wide > width:
            raise LookupError("a crop larger than the image")
        top, left = (height - high) // 2, (width - wide) // 2
        image = image[top : top + high, left : left + wide]
    yield image


def _padded(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """LLaVA: squares in the colour of the mean."""
    side = max(image.shape[:2])
    if any(image.strides) and settings.do_pad and side != min(image.shape[:2]):
        image = _framed(image, side, side, [int(mean * 255) for mean in settings.image_mean])
    return _cropped(settings, image)


def _any_resolution_canvases(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """LLaVA-NeXT and OneVision: the whole picture, then that within the best of some sizes, on black."""
    size = image.shape[:2]
    side = _square_side(settings.side("size"))
    cell = settings.side("crop_size")[0] if settings.crop_size else side
    if settings.crop_size and settings.do_center_crop and settings.side("crop_size") != (side, side):
        raise LookupError("tiles that are cropped")
    yield settings.resize(image, side, side)
    high, wide = settings.module.select_best_resolution(size, settings.image_grid_pinpoints)
    if any(image.strides):
        inner = settings.module.get_patch_output_size(pixels(3, *size), (high, wide), "channels_first")
        image = settings.resize(image, *inner)
    canvas = _framed(image, high, wide, (0, 0, 0))
    if cell == side and high % side == wide % side == 0:
        yield canvas
        return
    # LLaVA-NeXT's defaults: sizes of 336 pixels in tiles of 224. What is left over is a part of a tile, enlarged.
    for top, left in product(range(0, high, cell), range(0, wide, cell)):
        yield from _cropped(settings, canvas[top : top + cell, left : left + cell])


def _tiled(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """InternVL: tiles of about the picture's aspect, then all of it in one."""
    side, cols, rows = settings.side("size"), 1, 1
    if settings.crop_to_patches:
        cols, rows = settings.module.get_optimal_tiled_canvas(
            image.shape[:2], side, settings.min_patches, settings.max_patches
        )
    yield settings.resize(image, rows * side[0], cols * side[1])
    if rows * cols > 1:
        yield settings.resize(image, *side)


def _split_canvases(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """Idefics3 and SmolVLM: resized to the longest edge, then to whole tiles; what comes last is made of these."""
    side = settings.max_image_size["longest_edge"]
    size = settings.module.get_resize_output_image_size(pixels(3, *image.shape[:2]), settings.size["longest_edge"])
    image = settings.resize(image, *size)
    if settings.do_image_splitting:
        # Whole tiles of the longer edge, then of the other at the same aspect.
        height, width = image.shape[:2]
        aspect = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / aspect) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * aspect) / side) * side
        image = settings.resize(image, height, width)
        if max(height, width) > side:
            yield image
    yield settings.resize(image, side, side)


def _pan_and_scan_canvases(settings: Settings, image: Canvas) -> Iterator[Canvas]:
    """Gemma-3: the picture, then crops of it where it is flat or tall."""
    side = settings.side("size")
    yield settings.resize(image, *side)
    if settings.do_pan_and_scan:
        names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        chosen = {f"pan_and_scan_{name}": getattr(settings, f"pan_and_scan_{name}") for name in names}
        cut = getattr(settings.processor, "pan_and_scan_batched", None) or settings.processor.pan_and_scan
        for crop in cut(image.transpose(2, 0, 1), **chosen):
            yield settings.resize(crop.transpose(1, 2, 0), *side)


# Numbers that follow from a size: of (settings, image, its canvases, its rows).


def _grid(settings: Settings, _: Canvas, canvases: Sequence[Canvas], rows: int) -> Outputs:
    wide = canvases[0].shape[1] // settings.patch_size
    return {"image_grid_thw": np.array([[1, rows // wide, wide]], np.int64)}


def _size(_: Settings, image: Canvas, *__: Any) -> Outputs:
    return {"image_sizes": np.array([image.shape[:2]], np.int64)}


def _split_into(settings: Settings, _: Canvas, canvases: Sequence[Canvas], rows: int) -> Outputs:
    # Without its pixel_attention_mask: tiles of one image are of one size and so it is all ones, as the models have it
    # where none is given. Ones that are left to them serve a dummy too, whose arrays are zeros.
    wide = canvases[0].shape[1] // settings.max_image_size["longest_edge"] if rows > 1 else 0
    return {"rows": [[(rows - 1) // max(1, wide)]], "cols": [[wide]]}


class Family(NamedTuple):
    """How the processors of a class make rows: canvases, how these are cut, and numbers besides; whether a row is one
    axis of values, and whether an axis of images precedes the rows.
    """

    canvases: Callable[[Settings, Canvas], Iterator[Canvas]]
    cut: Callable[[Settings], Cut]
    numbers: Callable[..., Outputs] = lambda *_: {}
    is_flat: bool = False
    batched: bool = False


_SPLIT: Final = Family(
    _split_canvases, lambda settings: Cut(settings.max_image_size["longest_edge"]), _split_into, batched=True
)
FAMILIES: Final[Mapping[str, Family]] = {
    **dict.fromkeys(
        "Qwen2VL CohereCompass Cosmos3Edge Ernie4_5_VLMoe Ernie4_5_VL_Moe Glm46V Glm4v Glmga".split(),
        Family(_resized, _blocks_of_patches, _grid, is_flat=True),
    ),
    "HunYuanVL": Family(_resized, _rows_of_patches, _grid, is_flat=True),
    "PaddleOCRVL": Family(_resized, _rows_of_patches, _grid),
    "VideoLlama3": Family(
        _resized,
        _blocks_of_patches,
        lambda of, *found: _grid(of, *found) | {"image_merge_sizes": np.array([of.merge_size], np.int64)},
        is_flat=True,
    ),
    "CLIP": Family(_cropped, _tiles),
    "Siglip": Family(_cropped, _tiles),
    "Llava": Family(_padded, _tiles),
    "LlavaNext": Family(_any_resolution_canvases, _tiles, _size, batched=True),
    "LlavaOnevision": Family(
        _any_resolution_canvases,
        _tiles,
        lambda *found: _size(*found) | {"batch_num_images": np.array([1], np.int64)},
        batched=True,
    ),
    "GotOcr2": Family(_tiled, _tiles, lambda *found: {"num_patches": np.array(found[-1:], np.int64)}),
    "Idefics3": _SPLIT,
    "SmolVLM": _SPLIT,
    "Gemma3": Family(_pan_and_scan_canvases, _tiles, lambda *found: {"num_crops": np.array([found[-1] - 1], np.int64)}),
}
"""Class, without "ImageProcessor" -> its family."""


def family_of(settings: Settings) -> Family:
    """Return the family of a processor's class, in either backend. Raises LookupError."""
    name = type(settings.processor).__name__.removesuffix("Pil").removesuffix("Fast")
    return FAMILIES[name.removesuffix("ImageProcessor")]


def ruled(settings: Settings, width: int, height: int) -> Outputs:
    """Return what becomes of an image of this size, without memory. Raises LookupError for a class or setting that this
    does not know, ValueError for a size that the processor refuses.
    """
    family, image = family_of(settings), stub(height, width)
    cut, canvases = family.cut(settings), list(family.canvases(settings, image))
    rows = sum(map(cut.tiles, canvases))
    row = (3 * cut.repeats, cut.side, cut.side)
    shape = (*((1,) if family.batched else ()), rows, *((math.prod(row),) if family.is_flat else row))
    return {"pixel_values": pixels(*shape), **family.numbers(settings, image, canvases, rows)}


def write_rows(settings: Settings, image: Canvas, rows: NDArray[np.float32]) -> None:
    """Write an image (height, width, 3) as the processor of these settings would, into all rows of its one array.

    Raises LookupError for a class or setting that this does not know, ValueError for another number of rows.
    """
    family, table = family_of(settings), settings.byte_table
    cut, flat, first = family.cut(settings), rows.reshape(len(rows), -1), 0
    for canvas in family.canvases(settings, image):
        count = cut.tiles(canvas)
        patchify(np.ascontiguousarray(canvas), cut.side, cut.merge, table, flat[first : first + count], cut.repeats)
        first += count
    if first != len(rows):
        raise ValueError(f"prepared to {first} rows instead of {len(rows)}")


def picture_of_rows(settings: Settings, rows: NDArray[np.float32], grid: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Return the picture that rows were made of, tiles side by side. uint8 (height, width, 3).

    Rows are (num_tiles, 3, height, width); with a grid of patches along height and width (grid_h * grid_w, 3 * times *
    side * side), in blocks of merged tokens. Raises LookupError for rows or settings of another form.
    """
    if grid is None:
        if rows.ndim != 4 or rows.shape[1] != 3:
            raise LookupError(f"rows of shape {rows.shape}")
        tiles = rows.transpose(2, 0, 3, 1).reshape(rows.shape[2], -1, 3)
        return nearest_bytes(tiles, settings.byte_table)
    side, merge = int(settings.patch_size), int(settings.merge_size)
    with suppress(LookupError):  # of any other class, rows are taken to be in blocks
        merge = family_of(settings).cut(settings).merge
    rows = rows.reshape(len(rows), -1)
    if rows.shape[0] != grid[0] * grid[1] or rows.shape[1] % (3 * side * side):
        raise LookupError(f"rows of shape {rows.shape}")
    return nearest_bytes(laid_out(rows, side, merge, grid)[0], settings.byte_table)
