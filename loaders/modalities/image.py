"""Images at native resolution: how they become patches, as a value.

    (width, height) -> grid of patches -> merged tokens

All counts follow from headers, in integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import check_at_least_one, check_choice
from orchdata.loaders.modalities.image_header import ImageFiles, check_size
from orchdata.loaders.modalities.modality import ArraySpec, Header, PartSize

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessor(ImageFiles):
    """Images at native resolution and aspect, within a token budget, as patches.

    A patch is `patch_size` pixels square; `merge` x `merge` neighbouring patches become one LLM token.

    Attributes:
        patch_size: side of a patch in pixels.
        merge: side of a merged token in patches.
        min_tokens, max_tokens: merged tokens of one image; always respected, whatever the aspect ratio.
        mean, std: normalisation of channels in [0, 1] (default: CLIP's); unused with dtype "uint8".
        resizer: "pillow" (bicubic, the reference) or "torch" (bicubic with antialiasing on uint8, several
            times faster; few values differ, at sharp edges by up to 21/255).
        dtype: what patches are stored as; "uint8" holds raw values, to normalise on the device.
    """

    num_extents = 2

    patch_size: int = 14
    merge: int = 2
    min_tokens: int = 4
    max_tokens: int = 4096
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resizer: Literal["pillow", "torch"] = "pillow"
    dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge", "min_tokens"):
            check_at_least_one("ImagePreprocessor", name, getattr(self, name))
        if not isinstance(self.max_tokens, int) or self.max_tokens < self.min_tokens:
            raise ValueError(
                f"ImagePreprocessor.max_tokens must be an int of at least min_tokens={self.min_tokens}, "
                f"got {self.max_tokens!r}"
            )
        check_choice("ImagePreprocessor", "resizer", self.resizer, ("pillow", "torch"))
        check_choice("ImagePreprocessor", "dtype", self.dtype, ("bfloat16", "float32", "uint8"))
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3:
                raise ValueError(f"ImagePreprocessor.{name} must have 3 values (red, green, blue), got {len(values)}")
            object.__setattr__(self, name, values)
        if not all(value > 0 for value in self.std):
            raise ValueError(f"ImagePreprocessor.std must be above 0 in every channel, got {self.std}")

    @property
    def patch_dim(self) -> int:
        """Values in one patch: 3 channels x patch_size x patch_size."""
        return 3 * self.patch_size * self.patch_size

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Merged tokens of a grid of patches."""
        return grid[0] * grid[1] // (self.merge * self.merge)

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"patches": ArraySpec((self.patch_dim,), self.dtype)}

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        width, height = header
        check_size(width, height, limits)
        grid = image_grid(width, height, self)
        patches = grid[0] * grid[1]
        return PartSize(patches, self.num_tokens(grid), patches, grid)

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.image_decode import decode_image

        decode_image(data, self, limits, out["patches"], (size.extent[0], size.extent[1]))

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """grid_hw: int32 (num_images, 2), patches along height and width."""
        return {"grid_hw": np.array([size.extent for size in sizes], np.int32).reshape(-1, 2)}

    def rope(self, size: PartSize) -> NDArray[np.int64]:
        """After Qwen2-VL: one moment, the merged grid along height and width."""
        height, width = (side // self.merge for side in size.extent)
        rows, cols = np.divmod(np.arange(height * width), width)
        return np.stack([np.zeros_like(rows), rows, cols])

    def dummy(self) -> PartSize:
        side = self.merge
        return PartSize(side * side, 1, side * side, (side, side))


def image_grid(width: int, height: int, pre: ImagePreprocessor) -> tuple[int, int]:
    """The patches (grid_h, grid_w) an image of `width` x `height` pixels is resized to; both multiples of `merge`.

    Qwen2-VL's smart resize: each side rounds to a whole number of merged tokens (half to even); above `max_tokens`
    (below `min_tokens`) both shrink (grow) by one factor, rounded down (up). Unlike there, sides never fall below
    one token and the product is held in both limits even for extreme aspect ratios. Integer arithmetic throughout,
    so every machine finds the same size.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image must have at least one pixel, got {width} x {height}")
    factor = pre.patch_size * pre.merge
    rows, cols = max(1, _round_half_even(height, factor)), max(1, _round_half_even(width, factor))
    if rows * cols > pre.max_tokens:
        # floor(sqrt(max_tokens * height / width)), exactly
        rows, cols = isqrt(pre.max_tokens * height // width), isqrt(pre.max_tokens * width // height)
        rows, cols = max(1, rows), max(1, cols)
    elif rows * cols < pre.min_tokens:
        rows, cols = _ceil_sqrt(pre.min_tokens * height, width), _ceil_sqrt(pre.min_tokens * width, height)
    if not pre.min_tokens <= rows * cols <= pre.max_tokens:
        rows, cols = _within(rows, cols, pre.min_tokens, pre.max_tokens)
    return rows * pre.merge, cols * pre.merge


def _within(rows: int, cols: int, low: int, high: int) -> tuple[int, int]:
    """The sides nearest to (rows, cols), the shorter one kept if it can be, whose product is in [low, high]."""
    short, long = min(rows, cols), max(rows, cols)
    for side in range(min(short, isqrt(high)), 0, -1):
        least, most = -(-low // side), high // side
        if least <= most:  # always so for a side of 1
            short, long = side, min(max(long, least), most)
            break
    return (short, long) if rows <= cols else (long, short)


def _round_half_even(value: int, step: int) -> int:
    quotient, rest = divmod(value, step)
    return quotient + (2 * rest > step or (2 * rest == step and quotient % 2 == 1))


def _ceil_sqrt(numerator: int, denominator: int) -> int:
    """The smallest k with k * k >= numerator / denominator > 0."""
    return isqrt(-(-numerator // denominator) - 1) + 1
