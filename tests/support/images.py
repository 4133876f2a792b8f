"""Images made up for tests, and their pixels."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import ImagePreprocessor, image_grid

LIMITS = Limits()
EXACT = ImagePreprocessor(patch_size=1, merge=1, min_tokens=1, max_tokens=10**9)  # any size is kept as it is


def pixels_of(data: bytes, size: tuple[int, int], pre: ImagePreprocessor = EXACT) -> np.ndarray:
    return pre._pixels(data, LIMITS, image_grid(*size, pre))[:, :, :3].copy()


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def photo(width: int, height: int) -> Image.Image:
    """Smooth enough that scaled decoding changes little."""
    return Image.fromarray(noise(height // 16 + 2, width // 16 + 2, 3)).resize(
        (width, height), Image.Resampling.BICUBIC
    )


RGB = Image.fromarray(noise(20, 30, 3))


def jpeg() -> bytes:
    return encoded(photo(320, 240), "JPEG", quality=90)
