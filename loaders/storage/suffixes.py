"""Kinds of shards by the suffix of a name, their compression, the folder of the media that a file of records names."""

from __future__ import annotations

import os

from orchdata.loaders.storage.remote.urls import identity

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow",)
_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
RECORD_SUFFIXES = tuple(suffix + packed for packed in ("", ".gz", ".zst") for suffix in _RECORDS)
SUFFIXES = TAR_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES + RECORD_SUFFIXES

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

MEDIA_TABLES = ("metadata.jsonl", "metadata.csv")
"""Tables that name the media files in their own folder."""


def suffix_of(path: str, *, own_too: bool = False) -> str:
    """Return the suffix of a shard's path, in lower case. Raises ValueError for an unknown suffix.

    Args:
        own_too: whether containers of the user's were asked too, for the error.
    """
    name = path.lower()
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)
    if suffix is None:
        others = ", and no container of containers= claims it" if own_too else "; a container of yours may read others"
        raise ValueError(f"{path}: unknown kind of shard; the suffix must be one of {', '.join(SUFFIXES)}{others}")
    return suffix


def is_compressed(path: str) -> bool:
    """Return whether a path ends in the suffix of a compression."""
    return path.lower().endswith((".gz", ".tgz", ".zst", ".tzst"))


def compression(head: bytes) -> str | None:
    """Return "gzip", "zstd" or None by the first four bytes. File names are often wrong about it."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    skippable = len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    return "zstd" if head.startswith(_ZSTD_MAGIC) or skippable else None


def is_media_table(path: str) -> bool:
    """Return whether a file is the table of the media in its folder."""
    return os.path.basename(path) in MEDIA_TABLES


def media_root_of(path: str, media_root: str | None) -> str | None:
    """Return the folder for names in a file of records: `media_root`, or by default a media table's own folder."""
    if media_root is None and is_media_table(path):
        return os.path.dirname(identity(path))
    return media_root if path.lower().endswith(RECORD_SUFFIXES) else None
