"""Limits that hold while reading: what may be larger is an error, never an out-of-memory kill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper limits on what one shard or sample may hold. They are part of the recipe's fingerprint.

    Attributes:
        member_bytes: one member of a shard, as stored.
        sample_bytes: all members of one sample together.
        decompressed_bytes: a .tar.gz or .tar.zst once decompressed.
        decompression_ratio: decompressed to compressed size, beyond the first MiB.
        image_pixels: width times height of an image, before any resizing.
        audio_seconds: length of one clip.
        text_bytes: one text or JSON member, after decompression.
    """

    member_bytes: int = 1 << 30
    sample_bytes: int = 2 << 30
    decompressed_bytes: int = 64 << 30
    decompression_ratio: float = 200.0
    image_pixels: int = 178_956_970
    audio_seconds: float = 3 * 3600.0
    text_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits.{name} must be above 0, got {getattr(self, name)}")
