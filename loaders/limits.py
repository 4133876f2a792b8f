"""Limits that apply while reading: larger data are an error, never an out-of-memory kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper limits on the size of one shard or sample. They are part of the recipe's fingerprint.

    Attributes:
        member_bytes: one member of a shard, as stored; a sparse one, as read.
        sample_bytes: all members of one sample together.
        sample_parts: images and clips of one sample, items of one list, turns of one chat.
        sample_tokens: LLM tokens of one sample, including those of images and audio, after
            `TextPreprocessor.overflow`.
        sample_decoded_bytes: memory for decoding the media of one sample: patches and audio features as float32, for
            any dtype of the recipe, decoded waves, and the pixels of the largest image.
        shard_rows: members of one tar, rows or fields of one Parquet file.
        column_bytes: one column of a Parquet row group, decoded; more only within `decompression_ratio` of the file. In
            an Arrow file, one column of the rows that are read together (at least one row), or a batch that is read
            whole, decompressed.
        decompressed_bytes: a .tar.gz or .tar.zst, decompressed.
        decompression_ratio: decompressed to compressed size, beyond the first MiB (`column_bytes` of a Parquet column);
            size of a sparse member as read to its stored size; memory of the index to bytes of a Parquet file.
        key_bytes: a sample's key, or the name of a field, as UTF-8.
        image_pixels: width times height of an image, or of a video's pictures, before any resizing.
        audio_seconds: length of one clip, or video.
        text_bytes: one text or JSON member, after decompression; also all text of one sample together. It also limits
            the number of values in one cell of lists and structs, nulls included.
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
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"Limits.{name} must be a number above 0, got {value!r}")

    @property
    def short_name(self) -> int:
        """Any name of at most this many characters is within the limit."""
        return self.key_bytes // 4

    def name_error(self, what: str, name: str) -> str | None:
        """Return why a name is too long, or None."""
        if len(name) <= self.short_name or (size := len(name.encode())) <= self.key_bytes:
            return None
        return f"a {what} of {size} bytes, above Limits.key_bytes={self.key_bytes}"

    def size_error(self, size: int, *, is_text: bool) -> str | None:
        """Return why a member of this size is too large, or None."""
        if size > self.member_bytes:
            return f"{size} bytes, above Limits.member_bytes={self.member_bytes}"
        if is_text and size > self.text_bytes:
            return f"text of {size} bytes, above Limits.text_bytes={self.text_bytes}"
        return None


def shortened(name: str) -> str:
    """Return the start of a name that is above the limit, for a message."""
    return name[:64] + "..."


OF_MEDIA: Final = frozenset(("image_pixels", "audio_seconds"))
"""Limits that no text can be above."""
NOT_SCANNED: Final = frozenset(("sample_bytes", "sample_tokens", "sample_decoded_bytes"))
"""Limits that no scan of a shard applies."""


@lru_cache(maxsize=64)
def scan_limits(limits: Limits) -> dict[str, float]:
    """Return the limits that facts depend on."""
    names = [name for name in Limits.__dataclass_fields__ if name not in NOT_SCANNED]
    return {name: float(getattr(limits, name)) for name in names}


def still_holds(kept: Mapping[str, float], limits: Limits, reasons: Iterable[str]) -> bool:
    """Return whether facts that were found under the limits `kept` are those under `limits`: none is lower now, and
    none that is higher refused anything. `reasons` are of what was refused then; each names the limit that it is above.
    """
    now = scan_limits(limits)
    if kept == now:
        return True
    if kept.keys() != now.keys() or any(now[name] < kept[name] for name in now):
        return False
    raised = [name for name in now if now[name] > kept[name]]
    return not any(name in reason for reason in reasons for name in raised)
