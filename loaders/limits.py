"""Limits that hold while reading: what may be larger is an error, never an out-of-memory kill."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper limits on what one shard or sample may hold. They are part of the recipe's fingerprint.

    Attributes:
        member_bytes: one member of a shard, as stored; of a sparse one, as read.
        sample_bytes: all members of one sample together.
        sample_parts: images and clips of one sample, items of one list, turns of one chat.
        sample_tokens: LLM tokens of one sample, those of images and audio included; of what `TextPreprocessor.overflow`
            leaves of it.
        sample_decoded_bytes: memory that decoding the media of one sample takes: patches, audio features, the decoded
            waves, and the pixels of the largest image.
        shard_rows: members of one tar, rows or fields of one Parquet file.
        column_bytes: one column of a Parquet row group, decoded; more only within `decompression_ratio` of the file. Of
            an Arrow file, one column of the rows that are read together, which is one row at least.
        decompressed_bytes: a .tar.gz or .tar.zst once decompressed.
        decompression_ratio: decompressed to compressed size, beyond the first MiB (`column_bytes` of a Parquet column);
            what a sparse member reads as to what is stored of it; memory of the index to bytes of a Parquet file.
        key_bytes: a sample's key, or the name of a field, as UTF-8.
        image_pixels: width times height of an image, or of a video's pictures, before any resizing.
        audio_seconds: length of one clip, or video.
        text_bytes: one text or JSON member, after decompression; also all of one sample together. Values of one cell of
            lists and structs, nulls included, are as many at most.
    """

    member_bytes: int = 1 << 30
    sample_bytes: int = 2 << 30
    sample_parts: int = 1 << 16
    sample_tokens: int = 1 << 24
    sample_decoded_bytes: int = 16 << 30
    shard_rows: int = 10_000_000
    column_bytes: int = 1 << 30
    decompressed_bytes: int = 64 << 30
    decompression_ratio: float = 200.0
    key_bytes: int = 4096
    image_pixels: int = 178_956_970
    audio_seconds: float = 3 * 3600.0
    text_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits.{name} must be above 0, got {getattr(self, name)}")

    @property
    def short_name(self) -> int:
        """Characters up to which no name is refused, whatever they are."""
        return self.key_bytes // 4

    def name_error(self, what: str, name: str) -> str | None:
        """Why a name is refused, or None."""
        if len(name) <= self.short_name or (size := len(name.encode())) <= self.key_bytes:
            return None
        return f"a {what} of {size} bytes, above Limits.key_bytes={self.key_bytes}"

    def size_error(self, size: int, *, is_text: bool) -> str | None:
        """Why a member of this size is refused, or None."""
        if size > self.member_bytes:
            return f"{size} bytes, above Limits.member_bytes={self.member_bytes}"
        if is_text and size > self.text_bytes:
            return f"text of {size} bytes, above Limits.text_bytes={self.text_bytes}"
        return None


def shortened(name: str) -> str:
    """A name that is above the limit, to be shown."""
    return name[:64] + "..."


@lru_cache(maxsize=64)
def limits_fingerprint(limits: Limits) -> str:
    """The limits that facts depend on, in a form to compare."""
    values = {name: float(getattr(limits, name)) for name in Limits.__dataclass_fields__}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()
