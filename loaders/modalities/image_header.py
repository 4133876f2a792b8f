"""Image files -> their size, without decoding: shared by all modalities that are read from image files."""

from __future__ import annotations

import io
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import DecodeError, PackageError, one_line, package_error, pass_trouble
from orchdata.loaders.failures import as_failure
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import starts_with
from orchdata.loaders.modalities.modality import Header, Heads, Modality, PartSize

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are read (JPEG includes MPO). Of the others, some run programs (EPS) or have no
signature (TGA)."""

READS_IMAGES: Final = ("PIL.Image", "simplejpeg", "orchdata.loaders.modalities.image_decode")
"""Modules that reading image files imports."""

# Pillow's module for each format that is loaded on demand.
_PLUGINS: Final = {
    **{name: f"{name.title()}ImagePlugin" for name in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "AVIF")},
    "DIB": "BmpImagePlugin",
    "WEBP": "WebPImagePlugin",
    "JPEG2000": "Jpeg2KImagePlugin",
}
_LACKS_DECODER: Final = re.compile(r"decoder \w+ not available")

_formats_lock = threading.Lock()
_warnings_lock = threading.Lock()
_PIXEL_BYTES: Final = 4
_EXIF: Final = b"Exif\0\0"
_MOST_EXIF: Final = 256
"""Maximum number of EXIF blocks in a JPEG: Pillow concatenates them, and copies all of them each time."""
_MOST_STRAY: Final = 1 << 16
"""Maximum number of bytes between the segments of a JPEG's header: Pillow reads them one by one."""
_MARKER: Final = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_SCAN: Final = 0xDA
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xDA)})
"""Markers without a length."""


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
        load_formats()

    @staticmethod
    def scan(heads: Heads) -> None:
        from orchdata.native.scan import scan_images

        scan_images(*heads)

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
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


def load_formats() -> tuple[str, ...]:
    """Load Pillow's readers of `IMAGE_FORMATS`, and return the formats that it has. Exceptions of an import pass;
    Pillow itself ignores them, and all images of that format would look damaged.
    """
    from PIL import Image

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


def refuse_unsupported(data: bytes) -> None:
    """Raise PackageError for an image of a format that the installed Pillow was built without."""
    from PIL import Image

    reason = None
    for name in load_formats():
        accept = Image.OPEN[name][1]
        # With too few bytes some plugins raise any exception: then it is not their format.
        with suppress(Exception):
            said = accept(data[:16]) if accept is not None else None
            reason = said if reason is None and isinstance(said, str) else reason
    if reason is not None:
        raise PackageError("PIL", reason, way_out("PIL"), "an image")


def open_image(data: bytes) -> ImageFile:
    """Identify an image without decoding it. Raises DecodeError.

    Like Image.open, but without its check against a process-wide number of pixels: the recipe has a limit.
    """
    if not data:
        raise DecodeError("empty: 0 bytes")
    reason = f"not an image: starts with {starts_with(data)}"
    for name, factory, accept in _openers():
        accepted: bool | str = False
        with suppress(Exception):  # with too few bytes some plugins raise any exception
            accepted = accept is None or accept(data[:16])
        if not accepted or isinstance(accepted, str):
            continue
        try:
            return factory(io.BytesIO(data), "")
        except (SyntaxError, IndexError, TypeError, KeyError, ValueError, OSError, struct.error) as error:
            pass_trouble(error)
            reason = f"damaged {name} image: {one_line(error)}"
    refuse_unsupported(data)
    raise DecodeError(reason)


@lru_cache(maxsize=1)
def _openers() -> list[tuple[str, Callable[..., ImageFile], Callable[[bytes], bool | str] | None]]:
    from PIL import Image

    return [(name, *Image.OPEN[name]) for name in load_formats()]


def too_large(error: Exception, limits: Limits) -> DecodeError:
    """Return the failure of an image that Pillow rejects for its size. Raises PackageError if Pillow's limit is lower
    than the recipe's because the program has set it for the whole process.
    """
    from PIL import Image

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
    from PIL import ExifTags, Image

    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data)
    try:
        with quiet_pillow(), open_image(data) as image:
            width, height = image.size
            if width * height > limits.image_pixels:
                return width, height
            # Pillow turns TIFF sizes itself.
            orientation = 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)
    except Image.DecompressionBombError as error:
        raise too_large(error, limits) from None
    if width < 1 or height < 1:
        raise DecodeError(f"image of {width}x{height} pixels")
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    return width, height
