"""What keeping a Hugging Face processor as JSON takes, of images or audio: its classes, its outputs, its text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Generic, TypeVar

import numpy as np

Built = TypeVar("Built")

RESAMPLES: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""As Pillow numbers them."""


class OwnByThread(threading.local, Generic[Built]):
    """What JSON describes, built once a thread: several decode at once, and not every class says that it can be shared.

    Args:
        build: makes it of what the JSON holds.
    """

    def __init__(self, build: Callable[[Mapping[str, Any]], Built]) -> None:
        self._build = build
        self._built: dict[str, Built] = {}

    def __call__(self, source: str) -> Built:
        built = self._built.get(source)
        if built is None:
            built = self._built[source] = self._build(json.loads(source))
        return built


def path_of(value: Any) -> list[str]:
    """Module and name of its class. Raises ValueError where other processes could not import it by them."""
    kind = type(value)
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        raise ValueError(
            f"{kind.__qualname__} cannot be imported from {kind.__module__}, as other processes do: define it in a file"
        )
    return [kind.__module__, kind.__qualname__]


def class_at(path: Sequence[str]) -> Any:
    module, name = path
    return getattr(import_module(module), name)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """One output, as NumPy has it."""
    if hasattr(value, "detach"):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)


def placeholder_of(processor: Any) -> str:
    """Return the text that a processor expects for an image; "" if it names none."""
    marks = (getattr(processor, name, None) for name in ("image_placeholder_token", "image_token"))
    return next((str(mark) for mark in marks if mark), "")


def runs(text: str, mark: str) -> tuple[str | int, ...]:
    """Text with marks in it -> strings, and numbers of marks in a row."""
    pieces: list[str | int] = []
    for at, piece in enumerate(text.split(mark)):
        if at:
            if pieces and isinstance(pieces[-1], int):
                pieces[-1] += 1
            else:
                pieces.append(1)
        if piece:
            pieces.append(piece)
    return tuple(pieces)
