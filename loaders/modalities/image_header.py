"""Image files -> their size, without decoding, for whatever the scan of plain headers leaves to Pillow."""

from __future__ import annotations

import io
import threading
import warnings
from typing import Final

from orchdata.loaders.errors import NOT_DATA, DecodeError, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import described, starts_with
from orchdata.loaders.modalities.modality import Header

IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's names of the formats that are read (JPEG includes MPO). Others run programs (EPS) or have no signature to
tell them by (TGA)."""

_warnings_lock = threading.Lock()


def probe_image(data: bytes, limits: Limits) -> Header:
    """(width, height) as displayed, by Pillow. Raises DecodeError."""
    from PIL import ExifTags, Image, UnidentifiedImageError

    Image.init()  # `formats` names plugins, and only five are loaded unasked
    try:
        # Pillow warns of what it repairs (EXIF, TIFF tags) and of large images; the limit is ours. Filters are
        # process-wide: hold them shortly, one thread at a time, and for Pillow's own modules only.
        with _warnings_lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                width, height = image.size
                if width * height > limits.image_pixels:
                    return width, height
                # Pillow turns TIFF sizes itself.
                orientation = 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)
    except UnidentifiedImageError:
        raise DecodeError(f"not an image: starts with {starts_with(data)}") from None
    except Image.DecompressionBombError as error:
        raise DecodeError(f"too large an image: {error}; see PIL.Image.MAX_IMAGE_PIXELS") from None
    except NOT_DATA:
        raise
    except Exception as error:
        pass_trouble(error)
        raise DecodeError(f"damaged image: {described(error)}") from error
    if width < 1 or height < 1:
        raise DecodeError(f"image of {width}x{height} pixels")
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    return width, height
