"""Names of fields that say how a sample is stored or where it is from: no training signal is lost with them."""

from __future__ import annotations

from typing import Final

HARMLESS: Final = frozenset(
    (
        *("id", "_id", "uid", "uuid", "idx", "index", "key", "__key__", "sample_id", "question_id"),
        *("url", "__url__", "__index_level_0__", "width", "height", "original_width", "original_height", "exif"),
        *("sha256", "sha1", "md5", "hash", "status", "error_message", "license", "source", "split"),
        *("dataset", "dataset_name", "subset", "created_at", "date", "version", "author", "messages[].tool_call_id"),
    )
)
"""Compared whole. No name of a part, a weight, a mask, a label, a file or a text is among them."""
