"""The modalities a part can have, their codes in the index, and which of them have an encoder."""

from __future__ import annotations

from typing import Final

MODALITIES: Final[tuple[str, ...]] = ("text", "image", "audio")
TEXT: Final = 0
IMAGE: Final = 1
AUDIO: Final = 2

# Modalities whose parts enter an encoder, each a phase of its own before the llm phase.
ENCODERS: Final[tuple[str, ...]] = ("image", "audio")
