"""Image bytes -> pixels.

    bytes --decode--> uint8 RGB --orient--> upright --resize--> the grid's size

It reads the formats of `IMAGE_FORMATS`, and the first frame of an animation. EXIF orientation is applied;
palettes, CMYK and other colour modes become RGB as in Pillow (colour profiles are not applied); 16 bits keep their
upper byte, floats in [0, 1] become bytes; transparency is composited onto white or dropped. libjpeg-turbo decodes JPEG,
Pillow everything else.

libjpeg-turbo (simplejpeg) is strict, decodes into reused memory, and scales while decoding on request. Pillow decodes
the same values, but shows damaged data as grey; here any damage to the picture is an error.
"""

from __future__ import annotations

import io
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from platform import machine
from typing import Any, Final, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import DecodeError, PackageError, as_failure, one_line, package_error, pass_trouble
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import Header, Scratch, check_pixels, check_size, starts_with
from orchdata.native.decoding import channel_table

Pixels = NDArray[np.uint8]
Size = tuple[int, int]  # (width, height), as in Pillow

Payload = bytes | memoryview
_Convert = Callable[[Image.Image], Image.Image]
_LeastOf = Callable[[int, int], Size | None]
_JPEG: Final = b"\xff\xd8\xff"
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_ORIENTATION: Final = 0x0112
_SIXTEEN_BIT: Final = ("I;16", "I;16L", "I;16B", "I;16N")
_WHITE: Final = (255, 255, 255, 255)

# How to turn stored pixels (height, width, channels) upright, by EXIF orientation.
_UPRIGHT: Final[dict[int, Callable[[Pixels], Pixels]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels[::-1].transpose(1, 0, 2),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels[:, ::-1].transpose(1, 0, 2),
}


IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are read (JPEG includes MPO). Of the others, some run programs (EPS) or have no
signature (TGA)."""


# Pillow's module for each format that is loaded on demand.
_PLUGINS: Final = {
    **{name: f"{name.title()}ImagePlugin" for name in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "AVIF")},
    "DIB": "BmpImagePlugin",
    "WEBP": "WebPImagePlugin",
    "JPEG2000": "Jpeg2KImagePlugin",
}
_formats_lock = threading.Lock()
_LACKS_DECODER: Final = re.compile(r"decoder \w+ not available")

_warnings_lock = threading.Lock()
_EXIF: Final = b"Exif\0\0"
_MOST_EXIF: Final = 256
"""Maximum number of EXIF blocks in a JPEG: Pillow concatenates them, and copies all of them each time."""
_MOST_STRAY: Final = 1 << 16
"""Maximum number of bytes between the segments of a JPEG's header: Pillow reads them one by one."""
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_SCAN: Final = 0xDA
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xDA)})
"""Markers without a length."""


def load_formats() -> tuple[str, ...]:
    """Load Pillow's readers of `IMAGE_FORMATS`, and return the formats that it has. Exceptions of an import pass;
    Pillow itself ignores them, and all images of that format would look damaged.
    """
    with _formats_lock:
        Image.init()
        for name in IMAGE_FORMATS:
            if name not in Image.OPEN:
                import_module(f"PIL.{_PLUGINS[name]}")
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def pass_pillow(error: Exception) -> None:
    """Call `pass_trouble`, and raise PackageError if this Pillow was built without the decoder of an image."""
    pass_trouble(error)
    if isinstance(error, OSError) and _LACKS_DECODER.fullmatch(str(error)):
        raise package_error(error, "an image", "PIL") from error


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Identify an image without decoding it. Raises DecodeError. Like Image.open, but without its check against a
    process-wide number of pixels: the recipe has a limit.
    """
    if not data:
        raise DecodeError("empty: 0 bytes")
    reason = f"not an image: starts with {starts_with(data)}"
    lacks = None
    for name in load_formats():
        factory, accept = Image.OPEN[name]
        accepted: bool | str = False
        with suppress(Exception):  # with too few bytes some plugins raise any exception
            accepted = accept is None or accept(data[:16])
        if isinstance(accepted, str):  # this Pillow was built without the format
            lacks = lacks or accepted
            continue
        if not accepted:
            continue
        try:
            return factory(io.BytesIO(data), "")
        except (SyntaxError, IndexError, TypeError, KeyError, ValueError, OSError, struct.error) as error:
            pass_trouble(error)
            reason = f"damaged {name} image: {one_line(error)}"
    if lacks:
        raise PackageError("PIL", lacks, way_out("PIL"), "an image")
    raise DecodeError(reason)


def too_large(error: Exception, limits: Limits) -> DecodeError:
    """Return the failure of an image that Pillow rejects for its size. Raises PackageError if Pillow's limit is lower
    than the recipe's because the program has set it for the whole process.
    """
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and 2 * most < limits.image_pixels:
        reason = f"PIL.Image.MAX_IMAGE_PIXELS is {most}, and Limits.image_pixels allows {limits.image_pixels}"
        raise PackageError("PIL", reason, "set it to None: the limit here is Limits.image_pixels", "an image")
    return DecodeError(f"too large an image: {error}; see PIL.Image.MAX_IMAGE_PIXELS")


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings about repairs (EXIF, TIFF tags) and large images; the limit is ours. Warning filters
    are process-wide: set them briefly, in one thread at a time, and only for Pillow and this library.
    """
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(PIL|orchdata)(\.|$)")
        yield


def _check_jpeg(data: bytes) -> None:
    """Raise DecodeError for a JPEG with a header that Pillow would take very long to read."""
    blocks = data.count(_EXIF)
    if blocks > _MOST_EXIF:
        raise DecodeError(
            f"a JPEG with {blocks} blocks of EXIF data, above {_MOST_EXIF}: `exiftool -all=` removes them"
        )
    at, stray = 2, 0
    while at < len(data):
        marker = _MARKER.search(data, at, at + _MOST_STRAY - stray + 2)
        stray += (marker.start() if marker else len(data)) - at
        if stray > _MOST_STRAY:
            raise DecodeError(
                f"a JPEG with more than {_MOST_STRAY} bytes before its picture that belong to nothing: write it again"
            )
        if marker is None or marker[0][1] == _SCAN:
            return
        at = marker.start() + 2
        if marker[0][1] not in _ALONE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))


@as_failure(DecodeError, "damaged image", before=pass_pillow)
def probe_image(data: bytes, limits: Limits) -> Header:
    """Return (width, height) as displayed, from Pillow. Raises DecodeError."""
    if data.startswith(_JPEG):
        _check_jpeg(data)
    try:
        with quiet_pillow(), open_image(data) as image:
            width, height = image.size
            if width * height > limits.image_pixels:
                return width, height
            # Pillow turns TIFF sizes itself.
            orientation = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)
    except Image.DecompressionBombError as error:
        raise too_large(error, limits) from None
    if width < 1 or height < 1:
        raise DecodeError(f"image of {width}x{height} pixels")
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    return width, height


def augmented(pixels: Pixels, augment: UserFunction, rng: np.random.Generator | None) -> Pixels:
    """Return what the user's function makes of pixels (height, width, 3 or 4): uint8 (height, width, 3), C-contiguous.
    Raises DecodeError if it raised, or returned something else, and TypeError without `rng`.
    """
    if rng is None:
        raise TypeError(f"{augment.argument} needs a generator: pass rng= to decode_into")
    given = np.array(pixels[..., :3], order="C")  # `pixels` may be read-only, and has four channels from some decoders
    shape = given.shape  # of the array before the function gets it
    found = augment(given, rng)
    if not isinstance(found, np.ndarray):
        raise augment.wrong(f"returned {type(found).__name__}, not a NumPy array")
    if found.dtype != np.uint8 or found.shape != shape:
        raise augment.wrong(f"returned {found.dtype} {found.shape}, not uint8 {shape} as it was given")
    return np.ascontiguousarray(found)


def load_rgb(data: bytes | memoryview, limits: Limits) -> tuple[Pixels, object]:
    """Return upright pixels (height, width, 3) as from Hugging Face's `load_image`: Pillow's own `convert("RGB")` drops
    alpha and clips 16 bits at 255. Also return the colour, or None, that Pillow still calls transparent: their
    processors may use it. Memory and errors as in `upright_pixels`.
    """
    transparency: list[object] = [None]

    def convert(image: Image.Image) -> Image.Image:
        if isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]  # Pillow drops it too, with a warning
        converted = image.convert("RGB")
        transparency[0] = converted.info.get("transparency")
        return converted

    return upright_pixels(data, limits, convert), transparency[0]


def upright_pixels(
    data: Payload, limits: Limits, convert: _Convert, least_of: _LeastOf = lambda *_: None, colours: str = "RGB"
) -> Pixels:
    """Return upright pixels (height, width, channels), C-contiguous. Raises DecodeError. The memory may be this
    thread's scratch; its next image overwrites it. `convert` makes anything but a plain JPEG RGB. `least_of` takes the
    size as displayed, and returns the size below which a JPEG is not scaled while it is decoded, or None; `colours` of
    plain JPEGs are "RGB" or "RGBX".
    """
    try:
        return _upright_pixels(data, limits, convert, least_of, colours)
    except Warning:  # a filter of the program turns Pillow's warnings into exceptions; they are no damage
        with quiet_pillow():
            return _upright_pixels(data, limits, convert, least_of, colours)


@as_failure(DecodeError, "damaged image", before=pass_pillow)
def _upright_pixels(data: Payload, limits: Limits, convert: _Convert, least_of: _LeastOf, colours: str) -> Pixels:
    try:
        # Pillow decodes all formats but JPEG, and a JPEG that libjpeg-turbo cannot read.
        header = read_jpeg_header(data) if data[:3] == _JPEG else None
        if header is None:
            pixels, orientation = _by_pillow(bytes(data), limits, convert, least_of)
        else:  # a JPEG of colours, or of inks
            orientation = jpeg_orientation(data)
            least = _least_stored((header.width, header.height), orientation, limits, least_of)
            has_inks = header.colours in ("CMYK", "YCCK")
            pixels = decode_jpeg(data, header, "CMYK" if has_inks else colours, least)
            if has_inks:
                size = pixels.shape[1], pixels.shape[0]
                pixels = np.asarray(convert(Image.frombuffer("CMYK", size, pixels, "raw", "CMYK", 0, 1)))
    except Image.DecompressionBombError as error:
        raise too_large(error, limits) from None
    turn = _UPRIGHT.get(orientation)
    return np.ascontiguousarray(pixels if turn is None else turn(pixels))


def _by_pillow(data: bytes, limits: Limits, convert: _Convert, least_of: _LeastOf) -> tuple[Pixels, int]:
    """Return pixels as stored, and their orientation. Size limits are checked before decoding."""
    if data.startswith(_PNG):
        _check_png(data)
    image = JpegImagePlugin.JpegImageFile(io.BytesIO(data)) if data[:3] == _JPEG else open_image(data)
    check_pixels(image.width, image.height, limits)
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)  # Pillow gives TIFF sizes as displayed, others as stored
    _least_stored(image.size, orientation, limits, least_of)
    return np.asarray(convert(image)), orientation


def _least_stored(stored: Size, orientation: int, limits: Limits, least_of: _LeastOf) -> Size | None:
    """Check a size; return that, as stored, to which it may be scaled while decoding, or None for no scaling."""
    width, height = stored[::-1] if orientation in (5, 6, 7, 8) else stored
    check_size(width, height, limits)
    least = least_of(width, height)
    return (least[1], least[0]) if least is not None and orientation in (5, 6, 7, 8) else least


def _check_png(data: bytes) -> None:
    """Raise DecodeError if a chunk with pixel data is damaged: Pillow skips the checksums of pixels."""
    at, view = len(_PNG), memoryview(data)
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        name = data[at + 4 : at + 8]
        if name == b"IEND" or end + 4 > len(data):
            return  # Pillow finds a cut
        needed = not name[0] & 0x20 or name == b"tRNS"  # a small first letter: pixels do without it
        if needed and zlib.crc32(view[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise DecodeError(f"damaged PNG image: chunk {starts_with(name)} at byte {at} does not fit its checksum")
        at = end + 4


def to_rgb(image: Image.Image, alpha: str) -> Image.Image:
    """Convert an image of any mode to RGB; see the top of this file. Raises DecodeError."""
    if image.mode in (*_SIXTEEN_BIT, "I", "F"):
        return Image.fromarray(_to_bytes(image)).convert("RGB")
    if alpha == "white" and image.has_transparency_data:
        solid = Image.new("RGBA", image.size, _WHITE)
        solid.alpha_composite(image.convert("RGBA"))
        return solid.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_bytes(image: Image.Image) -> Pixels:
    """Grey with 16 or 32 bits per pixel -> uint8 (height, width)."""
    values = np.asarray(image)
    low, high, scale = values.min(), values.max(), 1.0
    if image.mode == "F":
        if not np.isfinite(low) or not np.isfinite(high):
            raise DecodeError("the image holds NaN or infinite values")
        # Floats are fractions; if some are above 1, they can only be byte values already.
        scale = 255.0 if high <= 1 else 1.0
    most = 255 / scale if image.mode == "F" else 65535
    if low < 0 or high > most:
        raise DecodeError(f"grey values from {low:g} to {high:g}, outside [0, {most:g}]: store it with 8 or 16 bits")
    return np.rint(values * np.float32(scale)).astype(np.uint8) if image.mode == "F" else (values >> 8).astype(np.uint8)


def resized(pixels: Pixels, target: Size, resizer: str, resample: str) -> Pixels:
    """Return pixels (height, width, 3 or 4) at `target` (width, height), see ImagePreprocessor.resizer, `resample`."""
    height, width = pixels.shape[:2]
    if (width, height) == target:
        return pixels
    if resizer != "torchvision":
        mode = "RGBX" if pixels.shape[2] == 4 else "RGB"
        image = Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)
        return np.asarray(image.resize(target, Image.Resampling[resample.upper()]))
    import torch
    from torch.nn.functional import interpolate

    with torch.no_grad():
        # Batch axis first: torch then sees channels-last memory, keeps that layout, and copies nothing.
        given = torch.from_numpy(np.require(pixels, requirements="W"))[None].permute(0, 3, 1, 2)
        # As torchvision: if uint8 has no bilinear kernel, resize floats.
        through_floats = resample == "bilinear" and not _has_bilinear_bytes()
        scaled = interpolate(given.float() if through_floats else given, target[::-1], mode=resample, antialias=True)
        if through_floats:
            scaled = scaled.round_().to(torch.uint8)
    return np.ascontiguousarray(scaled.permute(0, 2, 3, 1)[0].numpy())


@lru_cache(maxsize=1)
def is_avx() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _has_bilinear_bytes() -> bool:
    return is_avx() or machine() in ("aarch64", "arm64")


@lru_cache(maxsize=1)
def pass_order() -> str:
    """Return in which order the installed Pillow resizes the axes. It changes pixels: each pass rounds to bytes.
    "horizontal-first", as before Pillow 13, or "by-work": first the axis that leaves less work for the other.
    """
    image = Image.linear_gradient("L").resize((60, 40)).rotate(30)
    target, steps = (58, 10), Image.Resampling.BICUBIC
    whole = image.resize(target, steps)
    first = image.resize((target[0], image.height), steps).resize(target, steps)
    return "horizontal-first" if whole.tobytes() == first.tobytes() else "by-work"


def laid_out(patches: NDArray[Any], side: int, merge: int, grid: tuple[int, int]) -> NDArray[Any]:
    """Rearrange patches (grid_h * grid_w, 3 * times * side * side) into pictures (times, height, width, 3)."""
    blocks = patches.reshape(grid[0] // merge, grid[1] // merge, merge, merge, 3, -1, side, side)
    return blocks.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(-1, grid[0] * side, grid[1] * side, 3)


def nearest_bytes(values: NDArray[np.float32], table: NDArray[np.float32]) -> Pixels:
    """Return the bytes with the nearest values in a table (3, 256); channels are the last axis."""
    nearest = np.empty(values.shape, np.uint8)
    for channel, levels in enumerate(table):
        nearest[..., channel] = np.searchsorted((levels[1:] + levels[:-1]) / 2, values[..., channel])
    return nearest


def png_of(pictures: Pixels, seconds: float = 0.0) -> bytes:
    """Encode pictures (n, height, width, 3) as a PNG; several as an animated one, each shown for `seconds`."""
    first, *others = map(Image.fromarray, pictures)
    file = io.BytesIO()
    first.save(file, "PNG", save_all=bool(others), append_images=others, duration=1000 * seconds, default_image=False)
    return file.getvalue()


byte_table = lru_cache(maxsize=8)(channel_table)
_ORIENTATION_MARKS: Final = (b"Exif\0\0", b"tiff:Orientation")
# libjpeg's warnings about data before the scan; the picture itself may still be intact.
_HEADER_WARNING: Final = re.compile(r"bad ICC marker|extraneous bytes before marker 0x(?!d[0-9])")
_TRAILING: Final = re.compile("extraneous bytes before marker 0xd9")
_END: Final = b"\xff\xd9"
# Segments that decoding needs: frame, Huffman and quantisation tables, restart interval, Adobe's colour transform.
_NEEDED: Final = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDD, 0xEE, 0xE0})
_START_OF_SCAN: Final = 0xDA

_scratch = Scratch()


class JpegHeader(NamedTuple):
    """Size and colour space, as stored."""

    width: int
    height: int
    colours: str


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Return the header, or None if libjpeg-turbo cannot read it (arithmetic coding, 12 bits, damage): use Pillow."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    return JpegHeader(int(width), int(height), str(colours))


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation, as Pillow reads it; 1 if there is none."""
    data = bytes(data)
    if not any(mark in data for mark in _ORIENTATION_MARKS):
        return 1
    image = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def decode_jpeg(
    data: bytes | memoryview, header: JpegHeader, colours: str, least: tuple[int, int] | None
) -> NDArray[np.uint8]:
    """Return pixels (height, width, channels), scaled while decoding, to at least `least` (width, height), unless None.
    `colours` are "RGB", "RGBX" or "CMYK" (only for a CMYK picture; Adobe's inversion is undone). The memory belongs to
    this thread; its next call overwrites it. Raises DecodeError for a damaged picture.
    """
    # Halvings only: other scales of n/8 take longer than full decoding.
    wide, high = least or (header.width, header.height)
    scale = next((n for n in (8, 4, 2) if header.width >= n * wide and header.height >= n * high), 1)
    width, height = -(-header.width // scale), -(-header.height // scale)
    how: dict[str, Any] = {"min_width": width, "min_height": height} if scale > 1 else {}
    how["buffer"] = _scratch.take(height * width * (3 if colours == "RGB" else 4))
    for is_mended in (False, True):
        try:
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colours, **how)
            break
        except ValueError as error:
            warning = str(error)
        # A flaw around the scan hides those in it: decode again, just as strictly, without the bytes with the flaw.
        given = bytes(data)
        data = without_extras(given) if _HEADER_WARNING.search(warning) else given
        data = without_padding(given) if _TRAILING.search(warning) else data
        if is_mended or data == given:
            raise DecodeError(f"damaged JPEG: {warning.removeprefix('Corrupt JPEG data: ')}")
    if colours == "CMYK":  # Adobe's files store ink inverted; all CMYK files are treated as such
        np.bitwise_not(pixels, out=pixels)
    return pixels


def without_extras(data: bytes) -> bytes:
    """Return the JPEG without the data before its first scan that decoding does not need; itself without a scan."""
    kept = [b"\xff\xd8"]
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):  # stray bytes between segments
            at += 1
            continue
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _START_OF_SCAN:
            return b"".join([*kept, data[at:]])
        if marker in _NEEDED:
            kept.append(data[at:end])
        at = end
    return data


def without_padding(data: bytes) -> bytes:
    """Return the JPEG without zeros before its end marker: some programs pad with these. Other left-over bytes there
    are a sign of a damaged scan: they stay.
    """
    end = data.rfind(_END)
    return data[:end].rstrip(b"\0") + data[end:] if end > 0 else data
