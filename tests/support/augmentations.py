"""Augmentations, as a user would write them: of the generator that they get, and otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shard_factory import RECIPE

import orchdata as od


def noisy(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    noise = rng.integers(0, 256, pixels.shape, np.uint8)
    return pixels ^ noise


def inverted(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    np.subtract(255, pixels, out=pixels)  # where it was given them
    return pixels


def cropped(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    return pixels[:, :-1]


def as_floats(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float32]:
    return pixels.astype(np.float32)


def as_list(pixels: NDArray[np.uint8], rng: np.random.Generator) -> Any:
    return pixels.tolist()


def failing(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    raise RuntimeError("no such colour")


def recipe(augment: Any = noisy, **options: Any) -> od.Recipe:
    """Small images, augmented, and short audio."""
    sizes = {"patch_size": 8, "min_tokens": 1, "max_tokens": 12, "dtype": "uint8"}
    return od.Recipe(image=od.ImagePreprocessor(**{**sizes, **options}, augment=augment), audio=RECIPE.audio)


@dataclass(frozen=True, kw_only=True)
class Halved(od.ImagePreprocessor):
    """An own preparation of images that knows nothing of generators."""

    def decode_into(self, data: Any, size: od.PartSize, out: Mapping[str, Any], limits: od.Limits) -> None:  # type: ignore[override]
        super().decode_into(data, size, out, limits)


@dataclass(frozen=True, kw_only=True)
class Dropped(od.ImagePreprocessor):
    """An own preparation of images that augments, and draws itself."""

    def decode_into(self, data: Any, size: Any, out: Any, limits: Any, rng: Any = None) -> None:
        super().decode_into(data, size, out, limits, rng)
        out["patches"][rng.random(len(out["patches"])) < 0.5] = 0
