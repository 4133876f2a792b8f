"""Warnings that a process gives once, however many loaders it makes."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_said: set[str] = set()
_OURS = os.path.dirname(__file__) + os.sep
_TRAINERS = frozenset(
    ("accelerate", "composer", "ignite", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
)


def warn_once(subject: str, message: str) -> None:
    """Warn about `subject`, if nobody has yet, at the line outside of this package that led here."""
    if subject not in _said:
        _said.add(subject)
        warn_user(message)


def warn_user(message: str) -> None:
    """Warn at the line outside of this package that led here."""
    warnings.warn(message, stacklevel=_outside()[1])


def calling_place() -> object:
    """Where the caller of this function's caller stands: equal for two calls from one place in the code."""
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


def calling_trainer() -> str | None:
    """The package of a trainer that takes `len()` for the number of items, where the line outside of this package that
    led here is in one.
    """
    caller, _ = _outside()
    package = "" if caller is None else str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return package if package in _TRAINERS else None


def _outside() -> tuple[FrameType | None, int]:
    """The frame outside of this package that led here, and how far above the caller of this it is, which is 1."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    return frame, depth
