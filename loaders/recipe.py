"""The recipe: how a sample's bytes become tensors. A frozen value with a fingerprint; nothing runs here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.preprocessors import AudioPreprocessor, ImagePreprocessor, image_grid
from orchdata.loaders.text.preprocessor import TextPreprocessor
from orchdata.loaders.text.template import ChatTemplate

__all__ = [
    "AudioPreprocessor",
    "ChatTemplate",
    "ImagePreprocessor",
    "Limits",
    "Recipe",
    "TextPreprocessor",
    "image_grid",
]

# Part of every fingerprint: raise it when the same recipe starts to give other counts or values.
_RULES_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How each modality is prepared.

    Attributes:
        image, audio: None leaves that modality's members alone: they are ignored, and a placeholder for one is an
            error of the sample.
        text: tokens, templates and placeholders.
        limits: what may be larger is an error.
    """

    image: ImagePreprocessor | None = ImagePreprocessor()
    audio: AudioPreprocessor | None = AudioPreprocessor()
    text: TextPreprocessor = TextPreprocessor()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        expected = {"image": ImagePreprocessor, "audio": AudioPreprocessor, "text": TextPreprocessor, "limits": Limits}
        for name, kind in expected.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name in ("image", "audio")):
                raise TypeError(f"Recipe.{name} must be {kind.__name__}, got {type(value).__name__}")

    def describe(self) -> dict[str, Any]:
        """All that costs and values depend on, JSON-safe: compare two to name what differs."""
        return {
            "rules_version": _RULES_VERSION,
            "image": _plain(self.image),
            "audio": _plain(self.audio),
            "text": self.text.describe(),
            "limits": _plain(self.limits),
        }

    def fingerprint(self) -> str:
        """A hex string, equal for equal recipes in every process and on every machine."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: ImagePreprocessor | AudioPreprocessor | Limits | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: list(held) if isinstance(held, tuple) else held for name, held in asdict(value).items()}
