"""Transforms of images."""

from __future__ import annotations

from typing import Any


def to_tensor(image: Any) -> Any:
    """As it came."""
    return image
