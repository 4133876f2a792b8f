"""Checks that modalities share: of their parameters, and of headers against limits."""

from __future__ import annotations

from typing import Final

from orchdata.loaders.limits import Limits

LONGEST_SIDE: Final = 1 << 25
"""Pillow's resizing counts what it needs for a longer one in 32 bits, and then reports a lack of memory."""


def above_pixels(width: int, height: int, limits: Limits) -> str | None:
    """Why an image of this size is refused, or None."""
    if width * height > limits.image_pixels:
        size = f"{width}x{height} = {width * height} pixels"
        return f"image of {size}, above Limits.image_pixels={limits.image_pixels}"
    if max(width, height) > LONGEST_SIDE:
        return f"image of {width}x{height} pixels: no side above {LONGEST_SIDE} can be resized"
    return None


def above_seconds(frames: int, rate: int, limits: Limits) -> str | None:
    """Why a clip of this length is refused, or None."""
    if rate and frames > limits.audio_seconds * rate:
        return f"audio of {frames / rate:.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}"
    return None


def starts_with(data: bytes) -> str:
    """The first eight bytes, to show in an error: as text where they are printable."""
    head = data[:8]
    return repr(head.decode("ascii")) if head.isascii() and head.decode("ascii").isprintable() else repr(head)[1:]


def described(error: Exception) -> str:
    """What a decoder says, in one line of bounded length."""
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


def check_at_least_one(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}.{name} must be an int of at least 1, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
