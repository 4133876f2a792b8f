"""The shapes that Hugging Face's image processors give, from an image's size alone: no pixel is touched.

Each rule gives what the processor would, for one image: arrays of the right shape whose values mean nothing (they take
no memory), and the numbers that follow from the size. Its arithmetic is the processor's own wherever that can be
called. Whoever uses a rule compares it with the processor itself first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from inspect import signature
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Outputs = dict[str, Any]


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
            values = self.processor.rescale_and_normalize(torch.from_numpy(levels)[None], *scaling, means, stds)[
                0
            ].numpy()
        else:
            if self.do_rescale:
                values = self.processor.rescale(values, self.rescale_factor)
            if self.do_normalize:
                values = self.processor.normalize(values, means, stds)
        if values.dtype != np.float32:
            raise LookupError(f"values of {values.dtype}")
        return np.ascontiguousarray(values.reshape(3, 256))

    def side(self, name: str) -> tuple[int, int]:
        """(height, width) of `size` or `crop_size`."""
        size = dict(getattr(self, name))
        return (size["height"], size["width"]) if "height" in size else (size["shortest_edge"], size["shortest_edge"])


Rule = Callable[[Settings, int, int], Outputs]


def rule_of(image_processor: Any) -> Rule | None:
    """The rule of a processor's class, in either backend."""
    return _RULES.get(class_name(image_processor))


def class_name(image_processor: Any) -> str:
    """The name of a processor's class, the same in either backend."""
    return type(image_processor).__name__.removesuffix("Pil").removesuffix("Fast")


def pixels(*shape: int) -> NDArray[np.float32]:
    """An array of a shape, without memory."""
    return np.broadcast_to(np.float32(0), shape)


def _patches(settings: Settings, width: int, height: int) -> Outputs:
    patch = settings.patch_size
    if not settings.do_resize:
        raise ValueError("without do_resize")
    high, wide = sides_of_patches(settings, width, height)
    grid = (1, high // patch, wide // patch)
    dim = 3 * settings.temporal_patch_size * patch * patch
    return {"pixel_values": pixels(grid[1] * grid[2], dim), "image_grid_thw": np.array([grid], np.int64)}


def sides_of_patches(settings: Settings, width: int, height: int) -> tuple[int, int]:
    """(height, width) in pixels, whole blocks of merged patches, that the class's own `smart_resize` gives."""
    size, resize = dict(settings.size), settings.module.smart_resize
    given = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    if _limits_frames(resize):  # GLM's limits count the pixels of all pictures of a patch
        frames = settings.temporal_patch_size
        given |= {"num_frames": frames, "temporal_factor": frames}
    factor = settings.patch_size * settings.merge_size
    high, wide = resize(height=height, width=width, factor=factor, **given)
    return high, wide


@cache
def _limits_frames(resize: Callable[..., Any]) -> bool:
    return "num_frames" in signature(resize).parameters


def _patches_as_pictures(settings: Settings, width: int, height: int) -> Outputs:
    patches, side = _patches(settings, width, height), settings.patch_size
    return {
        **patches,
        "pixel_values": pixels(len(patches["pixel_values"]), 3 * settings.temporal_patch_size, side, side),
    }


def _patches_and_merge(settings: Settings, width: int, height: int) -> Outputs:
    return {**_patches(settings, width, height), "image_merge_sizes": np.array([settings.merge_size], np.int64)}


def _square(settings: Settings, *_size: int) -> Outputs:
    cropped = getattr(settings.processor, "do_center_crop", None)
    return {"pixel_values": pixels(1, 3, *settings.side("crop_size" if cropped else "size"))}


def _any_resolution(settings: Settings, width: int, height: int) -> Outputs:
    side = settings.side("crop_size" if settings.crop_size and settings.do_center_crop else "size")
    cell = settings.side("crop_size" if settings.crop_size else "size")[0]
    best = settings.module.select_best_resolution((height, width), settings.image_grid_pinpoints)
    tiles = 1 + -(-best[0] // cell) * -(-best[1] // cell)
    return {"pixel_values": pixels(1, tiles, 3, *side), "image_sizes": np.array([[height, width]], np.int64)}


def _one_vision(settings: Settings, width: int, height: int) -> Outputs:
    return {**_any_resolution(settings, width, height), "batch_num_images": np.array([1], np.int64)}


def _canvas(settings: Settings, width: int, height: int) -> Outputs:
    side, tiles = settings.side("size"), 1
    if settings.crop_to_patches:
        cols, rows = settings.module.get_optimal_tiled_canvas(
            (height, width), side, settings.min_patches, settings.max_patches
        )
        tiles = rows * cols + (rows * cols > 1)
    return {"pixel_values": pixels(tiles, 3, *side), "num_patches": np.array([tiles], np.int64)}


def _split(settings: Settings, width: int, height: int) -> Outputs:
    side, rows, cols = settings.max_image_size["longest_edge"], 0, 0
    if settings.do_image_splitting:
        high, wide = height, width
        if settings.do_resize:
            stub = pixels(3, height, width)
            high, wide = settings.module.get_resize_output_image_size(stub, settings.size["longest_edge"])
        high, wide = whole_tiles(high, wide, side)
        if max(high, wide) > side:
            rows, cols = high // side, wide // side
    # Without its pixel_attention_mask: tiles of one image are of one size and so it is all ones, as the models have it
    # where none is given. Ones that are left to them serve a dummy too, whose arrays are zeros.
    return {"pixel_values": pixels(1, rows * cols + 1, 3, side, side), "rows": [[rows]], "cols": [[cols]]}


def whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """The whole tiles that Idefics3 resizes to: of the longer edge, then of the other at the same aspect."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / aspect) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * aspect) / side) * side


def crops(settings: Settings, image: NDArray[Any]) -> Sequence[NDArray[Any]]:
    """The crops that Gemma-3 takes of an image (3, height, width)."""
    if not settings.do_pan_and_scan:
        return ()
    names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
    chosen = {f"pan_and_scan_{name}": getattr(settings, f"pan_and_scan_{name}") for name in names}
    cut = getattr(settings.processor, "pan_and_scan_batched", None) or settings.processor.pan_and_scan
    cuts: Sequence[NDArray[Any]] = cut(image, **chosen)
    return cuts


def _pan_and_scan(settings: Settings, width: int, height: int) -> Outputs:
    count = len(crops(settings, pixels(3, height, width)))
    return {"pixel_values": pixels(1 + count, 3, *settings.side("size")), "num_crops": np.array([count], np.int64)}


_RULES: Final[Mapping[str, Rule]] = {
    "Qwen2VLImageProcessor": _patches,
    "CohereCompassImageProcessor": _patches,
    "Cosmos3EdgeImageProcessor": _patches,
    "Ernie4_5_VLMoeImageProcessor": _patches,
    "Ernie4_5_VL_MoeImageProcessor": _patches,
    "Glm46VImageProcessor": _patches,
    "Glm4vImageProcessor": _patches,
    "GlmgaImageProcessor": _patches,
    "HunYuanVLImageProcessor": _patches,
    "PaddleOCRVLImageProcessor": _patches_as_pictures,
    "VideoLlama3ImageProcessor": _patches_and_merge,
    "CLIPImageProcessor": _square,
    "SiglipImageProcessor": _square,
    "LlavaImageProcessor": _square,
    "LlavaNextImageProcessor": _any_resolution,
    "LlavaOnevisionImageProcessor": _one_vision,
    "GotOcr2ImageProcessor": _canvas,
    "Idefics3ImageProcessor": _split,
    "SmolVLMImageProcessor": _split,
    "Gemma3ImageProcessor": _pan_and_scan,
}
