"""The base of data sets of images."""

from __future__ import annotations

from typing import Any


class VisionDataset:
    """In name alone."""


def __getattr__(_: str) -> Any:
    """Any other of its data sets."""
    return VisionDataset
