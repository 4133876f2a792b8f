"""Image bytes -> patches, written into the batch's memory.

    bytes --decode--> uint8 RGB --orient--> upright --resize--> the grid's size --patchify--> out

What is read: the formats of `image_header.IMAGE_FORMATS`, the first frame of an animation. EXIF orientation is applied;
palettes, CMYK and other colour modes become RGB as Pillow converts them (colour profiles are not applied); 16 bits
keep their upper byte, floats in [0, 1] become bytes; transparency is composited onto white or dropped. JPEG goes
through libjpeg-turbo, all else through Pillow.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from platform import machine
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin

from orchdata.loaders.errors import DecodeError, as_failure
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import above_pixels, starts_with
from orchdata.loaders.modalities.image_header import open_image, pass_pillow, quiet_pillow, too_large
from orchdata.loaders.modalities.jpeg import decode_jpeg, is_jpeg, jpeg_orientation, read_jpeg_header
from orchdata.loaders.modalities.modality import as_tensor
from orchdata.native.patchify import channel_table, patchify

if TYPE_CHECKING:
    from orchdata.loaders.modalities.image import ImagePreprocessor

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # (width, height), as Pillow has it

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_ORIENTATION: Final = 0x0112
_SIXTEEN_BIT: Final = ("I;16", "I;16L", "I;16B", "I;16N")
_WHITE: Final = (255, 255, 255, 255)

# How stored pixels (height, width, channels) are turned upright, by EXIF orientation.
_UPRIGHT: Final[dict[int, Callable[[Pixels], Pixels]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels[::-1].transpose(1, 0, 2),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels[:, ::-1].transpose(1, 0, 2),
}


def decode_image(
    data: bytes | memoryview, pre: ImagePreprocessor, limits: Limits, out: NDArray[Any], grid: tuple[int, int]
) -> None:
    """Decode, resize and cut one image into patches.

    Args:
        out: (grid_h * grid_w, pre.patch_dim), C-contiguous, written in whole: float32, uint16 (bfloat16 bits) or
            uint8, as `pre.dtype` says. Rows and values are ordered as `native.patchify` says.
        grid: patches (grid_h, grid_w) that the index found from the header.

    Raises:
        DecodeError: not an image, damaged, above a limit, or of another size than the index says.
    """
    pixels = load_pixels(data, pre, limits, grid)
    table = byte_table(pre.mean, pre.std, pre.dtype)
    patchify(pixels, pre.patch_size, pre.merge, table, out, repeats=pre.temporal_patch_size)


def load_pixels(data: bytes | memoryview, pre: ImagePreprocessor, limits: Limits, grid: tuple[int, int]) -> Pixels:
    """Upright pixels (height, width, 3 or 4) of the grid's size, C-contiguous; channels past the third mean nothing.

    The memory may be this thread's scratch, overwritten by its next image. Raises DecodeError.
    """
    target = (grid[1] * pre.patch_size, grid[0] * pre.patch_size)

    def least_of(width: int, height: int) -> Size | None:
        found = pre.count_header((width, height), limits).extent
        if found != tuple(grid):
            raise DecodeError(
                f"decoded to {width} x {height} pixels, {found[0]} x {found[1]} patches; the index says "
                f"{grid[0]} x {grid[1]} patches: index again"
            )
        return target if pre.draft else None

    pixels = upright_pixels(data, limits, partial(to_rgb, alpha=pre.alpha), least_of, _colours(pre.resizer))
    return resized(pixels, target, pre.resizer, pre.resample)


def load_rgb(data: bytes | memoryview, limits: Limits) -> tuple[Pixels, object]:
    """Upright pixels (height, width, 3) as Hugging Face's `load_image` has them: Pillow's own `convert("RGB")` drops
    alpha and cuts 16 bits off at 255. And the colour, or None, that Pillow goes on calling transparent, which their
    processors may look at. Memory and errors as of `load_pixels`.
    """
    transparency: list[object] = [None]

    def convert(image: Image.Image) -> Image.Image:
        if isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]  # Pillow leaves it out too, with a warning
        found = image.convert("RGB")
        transparency[0] = found.info.get("transparency")
        return found

    return upright_pixels(data, limits, convert), transparency[0]


def upright_pixels(
    data: bytes | memoryview,
    limits: Limits,
    convert: Callable[[Image.Image], Image.Image],
    least_of: Callable[[int, int], Size | None] = lambda *_: None,
    colours: str = "RGB",
) -> Pixels:
    """Upright pixels (height, width, channels), C-contiguous; memory and errors as of `load_pixels`.

    Args:
        convert: makes RGB of what is not a plain JPEG.
        least_of: told the size (width, height) as displayed, says below which a JPEG is not scaled while it is decoded;
            None for no scaling.
        colours: "RGB", or "RGBX" of plain JPEGs.
    """
    try:
        return _upright_pixels(data, limits, convert, least_of, colours)
    except Warning:  # a filter of the program's makes exceptions of Pillow's warnings, which are no damage
        with quiet_pillow():
            return _upright_pixels(data, limits, convert, least_of, colours)


@as_failure(DecodeError, "damaged image", before=pass_pillow)
def _upright_pixels(
    data: bytes | memoryview,
    limits: Limits,
    convert: Callable[[Image.Image], Image.Image],
    least_of: Callable[[int, int], Size | None],
    colours: str,
) -> Pixels:
    try:
        if is_jpeg(data):
            return _upright_jpeg(data, limits, convert, least_of, colours)
        data = bytes(data)
        if data.startswith(_PNG):
            _check_png(data)
        return _upright_other(open_image(data), limits, convert, least_of)
    except Image.DecompressionBombError as error:
        raise too_large(error, limits) from None


def _check_png(data: bytes) -> None:
    """Raise DecodeError where a chunk that pixels come from is damaged: Pillow skips the checksums of pixels."""
    at, view = len(_PNG), memoryview(data)
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        name = data[at + 4 : at + 8]
        if name == b"IEND" or end + 4 > len(data):
            return  # what is cut Pillow finds
        needed = not name[0] & 0x20 or name == b"tRNS"  # a small first letter: pixels do without it
        if needed and zlib.crc32(view[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise DecodeError(f"damaged PNG image: chunk {starts_with(name)} at byte {at} does not fit its checksum")
        at = end + 4


def _upright_jpeg(
    data: bytes | memoryview,
    limits: Limits,
    convert: Callable[[Image.Image], Image.Image],
    least_of: Callable[[int, int], Size | None],
    colours: str,
) -> Pixels:
    header = read_jpeg_header(data)
    if header is None:
        return _upright_other(JpegImagePlugin.JpegImageFile(io.BytesIO(data)), limits, convert, least_of)
    orientation = jpeg_orientation(data)
    least = _displayed((header.width, header.height), orientation, limits, least_of)
    if header.is_cmyk:
        inks = decode_jpeg(data, header, "CMYK", least)
        image = Image.frombuffer("CMYK", (inks.shape[1], inks.shape[0]), inks, "raw", "CMYK", 0, 1)
        return _upright(np.asarray(convert(image)), orientation)
    return _upright(decode_jpeg(data, header, colours, least), orientation)


def _upright_other(
    image: ImageFile.ImageFile,
    limits: Limits,
    convert: Callable[[Image.Image], Image.Image],
    least_of: Callable[[int, int], Size | None],
) -> Pixels:
    """Through Pillow."""
    # Before decoding: size limits. Pillow gives TIFF sizes as displayed, others as stored.
    _check_limits(image.width, image.height, limits)
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    _displayed(image.size, orientation, limits, least_of)
    return _upright(np.asarray(convert(image)), orientation)


def _displayed(
    stored: Size, orientation: int, limits: Limits, least_of: Callable[[int, int], Size | None]
) -> Size | None:
    """The size, as stored, to which it may be scaled while decoding; None where it may not."""
    turned = orientation in (5, 6, 7, 8)
    width, height = reversed(stored) if turned else stored
    _check_limits(width, height, limits)
    if width < 1 or height < 1:
        raise DecodeError(f"damaged image: {width} x {height} pixels")
    least = least_of(width, height)
    return (least[1], least[0]) if least is not None and turned else least


def _check_limits(width: int, height: int, limits: Limits) -> None:
    reason = above_pixels(width, height, limits)
    if reason is not None:
        raise DecodeError(reason)


def to_rgb(image: Image.Image, alpha: str) -> Image.Image:
    """RGB of any mode; see the top of this file. Raises DecodeError."""
    if image.mode in (*_SIXTEEN_BIT, "I", "F"):
        return Image.fromarray(_to_bytes(image)).convert("RGB")
    if alpha == "white" and image.has_transparency_data:
        solid = Image.new("RGBA", image.size, _WHITE)
        solid.alpha_composite(image.convert("RGBA"))
        return solid.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_bytes(image: Image.Image) -> Pixels:
    """Grey of 16 or 32 bits a pixel -> uint8 (height, width)."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not np.isfinite(low) or not np.isfinite(high):
            raise DecodeError("the image holds NaN or infinite values")
        # Floats are fractions; where some are above 1 they can only be byte values already.
        scale = 255.0 if high <= 1 else 1.0
        _check_range(low, high, 255 / scale)
        return np.rint(values * np.float32(scale)).astype(np.uint8)
    _check_range(low, high, 65535)
    return (values >> 8).astype(np.uint8)


def _check_range(low: float, high: float, most: float) -> None:
    if low < 0 or high > most:
        raise DecodeError(f"grey values from {low:g} to {high:g}, outside [0, {most:g}]: store it with 8 or 16 bits")


def resized(pixels: Pixels, target: Size, resizer: str, resample: str) -> Pixels:
    """Pixels (height, width, 3 or 4) at `target` (width, height), by ImagePreprocessor.resizer and `resample`."""
    height, width = pixels.shape[:2]
    if (width, height) == target:
        return pixels
    if resizer == "torchvision":
        return _resized_as_torchvision(pixels, target, resample)
    mode = "RGBX" if pixels.shape[2] == 4 else "RGB"
    image = Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)
    return np.asarray(image.resize(target, Image.Resampling[resample.upper()]))


def _resized_as_torchvision(pixels: Pixels, target: Size, resample: str) -> Pixels:
    import torch
    from torch.nn.functional import interpolate

    with torch.no_grad():
        # Batch axis first: torch then sees channels-last memory, keeps it so, and nothing is copied around.
        image = torch.from_numpy(np.require(pixels, requirements="W"))[None].permute(0, 3, 1, 2)
        # As torchvision does: where uint8 has no bilinear kernel of its own, through floats.
        through_floats = resample == "bilinear" and not _has_bilinear_bytes()
        found = interpolate(image.float() if through_floats else image, target[::-1], mode=resample, antialias=True)
        if through_floats:
            found = found.round_().to(torch.uint8)
    return np.ascontiguousarray(found.permute(0, 2, 3, 1)[0].numpy())


def _colours(resizer: str) -> str:
    """Of a plain JPEG that is resized next: vectors take four bytes a pixel faster, but torch's for ARM three alone."""
    return "RGBX" if resizer == "pillow" or _is_avx() else "RGB"


@lru_cache(maxsize=1)
def _is_avx() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _has_bilinear_bytes() -> bool:
    return _is_avx() or machine() in ("aarch64", "arm64")


@lru_cache(maxsize=1)
def pass_order() -> str:
    """In which order the installed Pillow resizes the axes, which shows in the pixels: each pass rounds to bytes.

    "horizontal-first", as Pillow did before 13, or "by-work": the axis first that leaves less to do for the other.
    """
    image = Image.linear_gradient("L").resize((60, 40)).rotate(30)
    target, steps = (58, 10), Image.Resampling.BICUBIC
    whole = image.resize(target, steps)
    first = image.resize((target[0], image.height), steps).resize(target, steps)
    return "horizontal-first" if whole.tobytes() == first.tobytes() else "by-work"


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    turn = _UPRIGHT.get(orientation)
    return np.ascontiguousarray(pixels if turn is None else turn(pixels))


def pictures_of_patches(patches: NDArray[Any], pre: ImagePreprocessor, grid: tuple[int, int]) -> Pixels:
    """The pictures that were cut into patches, from their values: `decode_image` backwards.

    Args:
        patches: (grid_h * grid_w, pre.patch_dim), as it has written them.

    Returns uint8 (pre.temporal_patch_size, height, width, 3).
    """
    if pre.dtype == "uint8":
        return laid_out(patches, pre.patch_size, pre.merge, grid)
    values = as_tensor(patches, pre.dtype).float().numpy()
    return nearest_bytes(laid_out(values, pre.patch_size, pre.merge, grid), byte_table(pre.mean, pre.std, "float32"))


def laid_out(patches: NDArray[Any], side: int, merge: int, grid: tuple[int, int]) -> NDArray[Any]:
    """Patches (grid_h * grid_w, 3 * times * side * side) in their places: (times, height, width, 3)."""
    blocks = patches.reshape(grid[0] // merge, grid[1] // merge, merge, merge, 3, -1, side, side)
    return blocks.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(-1, grid[0] * side, grid[1] * side, 3)


def nearest_bytes(values: NDArray[np.float32], table: NDArray[np.float32]) -> Pixels:
    """The bytes whose values in a table (3, 256) are the nearest; channels are the last axis."""
    found = np.empty(values.shape, np.uint8)
    for channel, levels in enumerate(table):
        found[..., channel] = np.searchsorted((levels[1:] + levels[:-1]) / 2, values[..., channel])
    return found


def png_of(pictures: Pixels, seconds: float = 0.0) -> bytes:
    """Pictures (n, height, width, 3) as a PNG; several as an animated one, each for so many seconds."""
    first, *others = map(Image.fromarray, pictures)
    file = io.BytesIO()
    first.save(file, "PNG", save_all=bool(others), append_images=others, duration=1000 * seconds, default_image=False)
    return file.getvalue()


@lru_cache(maxsize=8)
def byte_table(mean: tuple[float, ...], std: tuple[float, ...], dtype: str) -> NDArray[Any]:
    """As `channel_table`, kept."""
    return channel_table(mean, std, dtype)
