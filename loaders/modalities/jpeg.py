"""JPEG -> pixels through libjpeg-turbo (simplejpeg): into reused memory, strict, and scaled while decoding on request.

Pillow decodes the same values, but shows damaged data as grey; here any damage to the picture is an error.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import JpegImagePlugin

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.scratch import Scratch

_ORIENTATION: Final = 0x0112
_ORIENTATION_MARKS: Final = (b"Exif\0\0", b"tiff:Orientation")
# libjpeg's warnings about data before the scan; the picture itself may still be intact.
_HEADER_WARNING: Final = re.compile(r"bad ICC marker|extraneous bytes before marker 0x(?!d[0-9])")
_TRAILING: Final = re.compile("extraneous bytes before marker 0xd9")
_END: Final = b"\xff\xd9"
# Segments that decoding needs: frame, Huffman and quantisation tables, restart interval, Adobe's colour transform.
_NEEDED: Final = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDD, 0xEE, 0xE0})
_START_OF_SCAN: Final = 0xDA
# Markers followed by a length: all but start, end and restarts.
_SEGMENTS: Final = frozenset({*range(0xC0, 0xD0), *range(0xDA, 0xFF)})

_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Size in pixels and colour space, both as stored."""

    width: int
    height: int
    colours: str

    @property
    def is_cmyk(self) -> bool:
        return self.colours in ("CMYK", "YCCK")


def is_jpeg(data: bytes | memoryview) -> bool:
    return data[:3] == b"\xff\xd8\xff"


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Return the header, or None if libjpeg-turbo cannot read it (arithmetic coding, 12 bits, damage): use Pillow."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    return JpegHeader(int(width), int(height), str(colours))


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation, as Pillow reads it; 1 if there is none."""
    head = bytes(data[: _first_scan(data)])
    if not any(mark in head for mark in _ORIENTATION_MARKS):
        return 1
    image = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _first_scan(data: bytes | memoryview) -> int:
    """Return where the first scan starts; the end of the data if anything but segments comes before it."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] in _SEGMENTS:
        if data[at + 1] == _START_OF_SCAN:
            return at
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return len(data)


def decode_jpeg(
    data: bytes | memoryview, header: JpegHeader, colours: str, least: tuple[int, int] | None
) -> NDArray[np.uint8]:
    """Return pixels (height, width, channels), scaled while decoding, to at least `least` (width, height), unless None.

    The memory belongs to this thread; its next call overwrites it.

    Args:
        colours: "RGB", "RGBX" or "CMYK" (only for a CMYK picture; Adobe's inversion is undone).

    Raises:
        DecodeError: the picture is damaged.
    """
    try:
        return _decode(data, header, colours, least)
    except ValueError as error:
        warning = str(error)
    data = bytes(data)
    # A flaw around the scan hides those in it: decode again, just as strictly, without the bytes with the flaw.
    try:
        if _HEADER_WARNING.search(warning) is not None:
            return _decode(without_extras(data), header, colours, least)
        if _TRAILING.search(warning) is not None and (picture := without_padding(data)) != data:
            return _decode(picture, header, colours, least)
    except ValueError as error:
        warning = str(error)
    raise DecodeError(f"damaged JPEG: {warning.removeprefix('Corrupt JPEG data: ')}")


def _decode(
    data: bytes | memoryview, header: JpegHeader, colours: str, least: tuple[int, int] | None
) -> NDArray[np.uint8]:
    # Halvings only: other scales of n/8 take longer than full decoding.
    wide, high = least or (header.width, header.height)
    scale = next((n for n in (8, 4, 2) if header.width >= n * wide and header.height >= n * high), 1)
    width, height = -(-header.width // scale), -(-header.height // scale)
    channels = 3 if colours == "RGB" else 4
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data,
        colours,
        min_width=width if scale > 1 else 0,
        min_height=height if scale > 1 else 0,
        buffer=_scratch.take(height * width * channels),
    )
    if colours == "CMYK":  # Adobe's files store ink inverted; all CMYK files are treated as such
        np.bitwise_not(pixels, out=pixels)
    return pixels


def without_extras(data: bytes) -> bytes:
    """Return the JPEG without the data before its first scan that decoding does not need. Raises ValueError if cut."""
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
    raise ValueError("no start of scan")


def without_padding(data: bytes) -> bytes:
    """Return the JPEG without zeros before its end marker: some programs pad with these.

    Other left-over bytes there are a sign of a damaged scan: they stay.
    """
    end = data.rfind(_END)
    return data[:end].rstrip(b"\0") + data[end:] if end > 0 else data
