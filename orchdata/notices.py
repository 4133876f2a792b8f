"""Warnings that a process issues once, for any number of loaders, and which trainer called this package."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_warned: set[str] = set()
_OURS = os.path.dirname(__file__) + os.sep
_TRAINERS = frozenset(
    ("accelerate", "composer", "ignite", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
)


def warn_once(subject: str, message: str) -> None:
    """Warn about `subject` once in this process, at the line outside of this package that led here."""
    if subject not in _warned:
        _warned.add(subject)
        warn_user(message)


def warn_user(message: str) -> None:
    """Warn at the line outside of this package that led here."""
    warnings.warn(message, stacklevel=_outside()[1])


def calling_trainer() -> str | None:
    """Return the trainer package that contains the line outside of this package that led here, else None. These
    trainers take `len()` for the number of items.
    """
    caller, _ = _outside()
    package = "" if caller is None else str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return package if package in _TRAINERS else None


def _outside() -> tuple[FrameType | None, int]:
    """Return the frame outside of this package that led here, and its depth; the caller of this has depth 1."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    return frame, depth
