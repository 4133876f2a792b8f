"""How the shards of a data set are read: one value, which everything that looks up or builds its index takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How shards are read; part of the identity of their index.

    Attributes:
        media_root: folder of the media files that records name, as an absolute path; None: records name no files.
        columns: (old name, new name) of each field to rename, by old name.
    """

    media_root: str | None = None
    columns: tuple[tuple[str, str], ...] = ()

    def identity(self) -> list[Any]:
        """Return what an index depends on besides shards and recipe, JSON-safe; empty for the default."""
        parts: list[Any] = [] if self.media_root is None else [self.media_root]
        return parts + ([{"columns": [list(pair) for pair in self.columns]}] if self.columns else [])


PLAIN = Reading()
