"""Images at native resolution: how they become patches, as a value.

    (width, height) -> grid of patches -> merged tokens

All counts follow from headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from math import ceil, floor, isqrt, sqrt
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import (
    NOT_DESCRIBED,
    ArraySpec,
    Header,
    Heads,
    Modality,
    PartSize,
    as_tensor,
    check_at_least_one,
    check_choice,
    check_size,
    takes_rng,
)

READS_IMAGES: Final = ("PIL.Image", "simplejpeg", "orchdata.loaders.modalities.image_decode")
"""Modules that reading image files imports."""

_PIXEL_BYTES: Final = 4

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_CHOICES: Final = {
    "rule": ("budget", "qwen2_vl"),
    "resizer": ("torchvision", "pillow"),
    "resample": ("bicubic", "bilinear", "lanczos"),
    "draft": (False, True),
    "alpha": ("white", "drop"),
    "dtype": ("bfloat16", "float32", "uint8"),
}
_LANCZOS_SINCE: Final = (2, 12)

Augment = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]


class ImageFiles(Modality):
    """A modality read from image files; its headers are (width, height) in pixels, as displayed."""

    fields = tuple("jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff ppm pgm pbm pnm pfm jp2 j2k avif".split())
    words = ("image", "image_url")
    plural = "images"
    column_words = frozenset("image images img imgs picture pictures photo photos pixels".split())
    hf_feature = "Image"
    num_facts = 2

    def required_modules(self) -> tuple[str, ...]:
        return READS_IMAGES

    def set_up_process(self) -> None:
        from orchdata.loaders.modalities.image_decode import load_formats

        load_formats()

    @staticmethod
    def scan(heads: Heads) -> None:
        from orchdata.native.scan import scan_images

        scan_images(*heads)

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        from orchdata.loaders.modalities.image_decode import probe_image

        return probe_image(data, limits)

    @classmethod
    def matches_magic(cls, head: bytes) -> bool:
        if head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")):
            return True
        if head[:4] == b"RIFF":
            return head[8:12] == b"WEBP"
        return head[4:12] in (b"ftypavif", b"jP  \r\n\x87\n") or head.startswith(b"\xff\x4f\xff\x51")

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Pixels of the largest image: they are decoded one after the other."""
        return _PIXEL_BYTES * max([width * height for (width, height), _ in parts])


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessor(ImageFiles):
    """Images at native resolution and aspect, within a token budget, as patches.

    A patch is `patch_size` pixels square; `merge` x `merge` neighbouring patches become one LLM token.

    Attributes:
        patch_size: side of a patch in pixels.
        merge: side of a merged token in patches.
        min_tokens, max_tokens: merged tokens of one image; rule "budget" respects them for every aspect ratio.
        rule: how a size becomes a grid: "budget", in integers (`image_grid`), or "qwen2_vl", exactly Hugging Face's
            `smart_resize`: it rejects aspect ratios above 200, and very flat images may exceed the budget.
        min_pixels, max_pixels: limits of one image under "qwen2_vl", instead of min_tokens and max_tokens.
        temporal_patch_size: number of copies of the picture in a patch (Qwen-VL: 2); values are ordered (channel, time,
            row, column).
        mean, std: normalisation of channels in [0, 1] (default: CLIP's); unused with dtype "uint8".
        resizer: "torchvision" (equal to the bit to its resizing of uint8 tensors with antialiasing), or "pillow",
            several times slower; few values differ, at sharp edges by up to 21/255.
        resample: "bicubic", "bilinear" or "lanczos"; "lanczos" with "torchvision" needs torch 2.12.
        draft: whether a JPEG at least twice as large as needed is scaled while it is decoded, which takes less time and
            gives other values.
        alpha: how to treat transparent images: "white" composites them onto white, "drop" keeps their stored colours.
        dtype: dtype of the stored patches; "uint8" keeps raw values, to normalise on the device.
        augment: a function that changes the resized image before it is cut into patches: (pixels, rng) -> pixels. Both
            are uint8 (height, width, 3), RGB, of equal size; it may write into the array that it gets. `rng` is a
            `numpy.random.Generator` of this image in this pass: see `Modality.decode`. Several threads call the
            function. An exception, or a result of another type, shape or dtype, is a failure of the sample.
        augment_id: string that identifies the function in the recipe's fingerprint. Change it whenever the function
            returns something else. None: made from the function's source text, if the text has all that it uses.
    """

    num_extents = 2

    patch_size: int = 14
    merge: int = 2
    min_tokens: int = 4
    max_tokens: int = 4096
    rule: Literal["budget", "qwen2_vl"] = "budget"
    min_pixels: int | None = None
    max_pixels: int | None = None
    temporal_patch_size: int = 1
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resizer: Literal["torchvision", "pillow"] = "torchvision"
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    draft: bool = False
    alpha: Literal["white", "drop"] = "white"
    dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16"
    augment: Augment | None = field(default=None, metadata={NOT_DESCRIBED: True})
    augment_id: str | None = field(default=None, metadata={NOT_DESCRIBED: True})

    no_counts = frozenset("mean std resizer resample draft alpha dtype augment pass_order".split())
    may_differ_in_mixture = frozenset(
        "min_tokens max_tokens min_pixels max_pixels rule resizer resample draft alpha augment".split()
    )

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge", "min_tokens", "temporal_patch_size"):
            check_at_least_one("ImagePreprocessor", name, getattr(self, name))
        if not isinstance(self.max_tokens, int) or self.max_tokens < self.min_tokens:
            raise ValueError(
                f"ImagePreprocessor.max_tokens must be an int of at least min_tokens={self.min_tokens}, "
                f"got {self.max_tokens!r}"
            )
        for name, choices in _CHOICES.items():
            check_choice("ImagePreprocessor", name, getattr(self, name), choices)
        if (
            self.resizer == "torchvision"
            and self.resample == "lanczos"
            and tuple(map(int, version("torch").split(".")[:2])) < _LANCZOS_SINCE
        ):
            needed = ".".join(map(str, _LANCZOS_SINCE))
            raise ValueError(f"ImagePreprocessor.resample 'lanczos' needs torch {needed} or resizer='pillow'")
        self._check_pixels()
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3:
                raise ValueError(f"ImagePreprocessor.{name} must have 3 values (red, green, blue), got {len(values)}")
            object.__setattr__(self, name, values)
        if not all(value > 0 for value in self.std):
            raise ValueError(f"ImagePreprocessor.std must be above 0 in every channel, got {self.std}")
        if self.augment is None and self.augment_id is not None:
            raise ValueError(f"ImagePreprocessor.augment_id={self.augment_id!r} is of no function: pass augment= too")
        if self.augmentation is not None and not takes_rng(type(self)).decode_into:
            raise TypeError(
                f"{type(self).__qualname__}.decode_into has no parameter rng, which ImagePreprocessor.decode_into "
                "needs for augment=: add it, and pass it on"
            )

    @cached_property
    def augmentation(self) -> UserFunction | None:
        """`augment` with its id; None for none. Raises as `UserFunction.of`."""
        if self.augment is None:
            return None
        return UserFunction.of("ImagePreprocessor.augment", self.augment, self.augment_id)

    def draws(self) -> bool:
        """Whether there is an `augment`, or the `decode_into` of a subclass has a parameter `rng`."""
        own = type(self).decode_into is not ImagePreprocessor.decode_into
        return self.augment is not None or (own and super().draws())

    def _check_pixels(self) -> None:
        least, most = self.pixel_limits
        for name in ("min_pixels", "max_pixels"):
            if getattr(self, name) is not None:
                check_at_least_one("ImagePreprocessor", name, getattr(self, name))
                if self.rule == "budget":
                    raise ValueError(
                        f"ImagePreprocessor.{name} belongs to rule='qwen2_vl'; under rule 'budget' min_tokens and "
                        "max_tokens limit an image"
                    )
        if least > most:
            raise ValueError(f"ImagePreprocessor.min_pixels={least} is above max_pixels={most}")

    @property
    def pixel_limits(self) -> tuple[int, int]:
        """Minimum and maximum number of pixels of one image after resizing."""
        token = (self.patch_size * self.merge) ** 2
        least = self.min_tokens * token if self.min_pixels is None else self.min_pixels
        return least, self.max_tokens * token if self.max_pixels is None else self.max_pixels

    @property
    def patch_dim(self) -> int:
        """Values in one patch: 3 channels x temporal_patch_size x patch_size x patch_size."""
        return 3 * self.temporal_patch_size * self.patch_size * self.patch_size

    def parameters(self) -> dict[str, Any]:
        """With the pass order of the installed Pillow, if it resizes, and the id of `augment`, if there is one."""
        parameters = super().parameters()
        if self.resizer == "pillow":
            from orchdata.loaders.modalities.image_decode import pass_order

            parameters["pass_order"] = pass_order()
        if self.augmentation is not None:
            parameters["augment"] = self.augmentation.id
        return parameters

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Merged tokens of a grid of patches."""
        return grid[0] * grid[1] // (self.merge * self.merge)

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"patches": ArraySpec((self.patch_dim,), self.dtype)}

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        width, height = header
        check_size(width, height, limits)
        try:
            grid = image_grid(width, height, self)
        except ValueError as error:
            raise DecodeError(str(error)) from None
        patches = grid[0] * grid[1]
        return PartSize(patches, patches // self.merge**2, patches, grid)

    def decode_into(
        self,
        data: bytes | memoryview,
        size: PartSize,
        out: Mapping[str, NDArray[Any]],
        limits: Limits,
        rng: np.random.Generator | None = None,
    ) -> None:
        """As `Modality.decode_into`. Raises TypeError if there is an `augment`, and no `rng`."""
        from orchdata.loaders.modalities.image_decode import augmented, byte_table
        from orchdata.native.decoding import patchify

        pixels = self._pixels(data, limits, size.extent)
        if self.augmentation is not None:
            pixels = augmented(pixels, self.augmentation, rng)
        table = byte_table(self.mean, self.std, self.dtype)
        patchify(pixels, self.patch_size, self.merge, table, out["patches"], repeats=self.temporal_patch_size)

    def _pixels(self, data: bytes | memoryview, limits: Limits, grid: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return upright pixels (height, width, 3 or 4) of the grid's size; a fourth channel is undefined. Memory and
        errors as in `upright_pixels`.
        """
        from orchdata.loaders.modalities.image_decode import is_avx, resized, to_rgb, upright_pixels

        # Of a plain JPEG to be resized, vectors handle four bytes per pixel faster, torch on ARM only three.
        colours = "RGBX" if self.resizer == "pillow" or is_avx() else "RGB"
        convert, least = partial(to_rgb, alpha=self.alpha), partial(self._least, grid, limits)
        pixels = upright_pixels(data, limits, convert, least, colours)
        return resized(pixels, (grid[1] * self.patch_size, grid[0] * self.patch_size), self.resizer, self.resample)

    def _least(self, grid: tuple[int, ...], limits: Limits, width: int, height: int) -> tuple[int, int] | None:
        """Return the size below which a picture is not scaled while it is decoded, or None. Raises DecodeError for one
        of another grid.
        """
        high, wide = self.count_header((width, height), limits).extent
        if (high, wide) != tuple(grid):
            raise DecodeError(
                f"decoded to {width} x {height} pixels, {high} x {wide} patches; the index says {grid[0]} x {grid[1]} "
                "patches: index again"
            )
        return (wide * self.patch_size, high * self.patch_size) if self.draft else None

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """grid_hw: int32 (num_images, 2), patches along height and width."""
        return {"grid_hw": np.array([size.extent for size in sizes], np.int32).reshape(-1, 2)}

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """The picture in the patches, with 8 bits per channel."""
        from orchdata.loaders.modalities.image_decode import png_of

        return "png", png_of(self._pictures(arrays["patches"], (size.extent[0], size.extent[1]))[:1])

    def _pictures(self, patches: NDArray[Any], grid: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the pictures of these patches, uint8 (temporal_patch_size, height, width, 3), from their values."""
        from orchdata.loaders.modalities.image_decode import byte_table, laid_out, nearest_bytes

        if self.dtype == "uint8":
            return laid_out(patches, self.patch_size, self.merge, grid)
        values = as_tensor(patches, self.dtype).float().numpy()
        return nearest_bytes(
            laid_out(values, self.patch_size, self.merge, grid), byte_table(self.mean, self.std, "float32")
        )

    def rope(self, size: PartSize) -> NDArray[np.int64]:
        """As in Qwen2-VL: one moment, the merged grid along height and width."""
        height, width = (side // self.merge for side in size.extent)
        return grid_positions(np.zeros(1, np.int64), height, width)

    def dummy(self) -> PartSize:
        side = self.merge
        return PartSize(side * side, 1, side * side, (side, side))

    def padding(self, positions: int) -> PartSize:
        """One row of merged tokens."""
        return PartSize(positions, positions // self.merge**2, positions, (self.merge, positions // self.merge))


def grid_positions(moments: NDArray[np.int64], high: int, wide: int) -> NDArray[np.int64]:
    """Return (3, len(moments) * high * wide): moment, row and column of the cells of consecutive grids."""
    rows, cols = np.divmod(np.arange(high * wide), wide)
    times = len(moments)
    return np.stack([np.repeat(moments, high * wide), np.tile(rows, times), np.tile(cols, times)])


def image_grid(width: int, height: int, pre: ImagePreprocessor) -> tuple[int, int]:
    """Return the grid of patches (grid_h, grid_w) for an image of `width` x `height` pixels; both multiples of `merge`.
    By rule "qwen2_vl" as Hugging Face, see `smart_resize`. Rule "budget" is similar: each side is rounded to a whole
    number of merged tokens (half to even); above `max_tokens` (below `min_tokens`) both shrink (grow) by one factor,
    rounded down (up). But sides never fall below one token, the product stays within both limits even for extreme
    aspect ratios, and all arithmetic is in integers.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image must have at least one pixel, got {width} x {height}")
    factor = pre.patch_size * pre.merge
    if pre.rule == "qwen2_vl":
        high, wide = smart_resize(height, width, factor, *pre.pixel_limits)
        return high // pre.patch_size, wide // pre.patch_size
    # Round half to even.
    (rows, rest_high), (cols, rest_wide) = divmod(height, factor), divmod(width, factor)
    rows = max(1, rows + (2 * rest_high + rows % 2 > factor))
    cols = max(1, cols + (2 * rest_wide + cols % 2 > factor))
    if rows * cols > pre.max_tokens:
        # floor(sqrt(max_tokens * height / width)), exactly
        rows, cols = isqrt(pre.max_tokens * height // width), isqrt(pre.max_tokens * width // height)
        rows, cols = max(1, rows), max(1, cols)
    elif rows * cols < pre.min_tokens:
        rows, cols = _ceil_sqrt(pre.min_tokens * height, width), _ceil_sqrt(pre.min_tokens * width, height)
    if not pre.min_tokens <= rows * cols <= pre.max_tokens:
        rows, cols = _within(rows, cols, pre.min_tokens, pre.max_tokens)
    return rows * pre.merge, cols * pre.merge


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the pixels (height, width) to which Qwen-VL's image processors of Hugging Face resize an image. In floats,
    with equal results: these operations are rounded in the same way on every machine. Raises ValueError for an aspect
    ratio above 200.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > 200:
        raise ValueError(f"an aspect ratio of {ratio:g}: Qwen-VL takes none above 200; leave {width} x {height} out")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > max_pixels:
        shrink = sqrt((height * width) / max_pixels)
        return max(factor, floor(height / shrink / factor) * factor), max(
            factor, floor(width / shrink / factor) * factor
        )
    if high * wide < min_pixels:
        grow = sqrt(min_pixels / (height * width))
        return ceil(height * grow / factor) * factor, ceil(width * grow / factor) * factor
    return high, wide


def _within(rows: int, cols: int, low: int, high: int) -> tuple[int, int]:
    """Return the sides nearest to (rows, cols) with a product in [low, high]; the shorter one is kept if possible."""
    short, long = min(rows, cols), max(rows, cols)
    for side in range(min(short, isqrt(high)), 0, -1):
        least, most = -(-low // side), high // side
        if least <= most:  # true for a side of 1
            short, long = side, min(max(long, least), most)
            break
    return (short, long) if rows <= cols else (long, short)


def _ceil_sqrt(numerator: int, denominator: int) -> int:
    """Return the smallest k with k * k >= numerator / denominator > 0."""
    return isqrt(-(-numerator // denominator) - 1) + 1
