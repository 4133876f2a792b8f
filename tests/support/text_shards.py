"""JSON Lines of short texts, and whether two indexes are the same."""

from __future__ import annotations

import json
from pathlib import Path

from orchdata.loaders.index.index import Index


def texts(path: Path, count: int) -> str:
    """Write a file of so many records. Return its path."""
    path.write_text("".join(json.dumps({"text": f"{path.stem} has {number} words"}) + "\n" for number in range(count)))
    return str(path)


def same(index: Index, other: Index) -> bool:
    """Whether two indexes have the same bytes, and were merged from the same tables."""
    return index.path.read_bytes() == other.path.read_bytes() and index.build_id == other.build_id
