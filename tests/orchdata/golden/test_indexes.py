"""Indexes that an earlier release has written are opened, and say what they said."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from golden_indexes import DIGESTS, FOLDER, digest

from orchdata.loaders.errors import DamagedIndexError
from orchdata.loaders.index.index import Index

KEPT = json.loads(DIGESTS.read_text())


def opened(name: str, folder: Path, *, changed: int | None = None) -> Index:
    content = bytearray(lzma.decompress((FOLDER / name).read_bytes()))
    if changed is not None:
        content[changed] ^= 1
    path = folder / "kept.index"
    path.write_bytes(content)
    return Index(path)


def test_all_files_have_a_digest() -> None:
    assert {path.name for path in FOLDER.glob("*.xz")} == KEPT.keys() and len(KEPT) >= 8


@pytest.mark.parametrize("name", KEPT)
def test_an_index_of_an_earlier_release_says_what_it_said(name: str, tmp_path: Path) -> None:
    index = opened(name, tmp_path)
    assert digest(index) == KEPT[name]
    assert index.num_samples == index.totals["samples"] > 0
    for row in range(0, index.num_rows, 5):
        assert index.key(row) and index.members(row) is not None


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DamagedIndexError):
        opened(next(iter(KEPT)), tmp_path, changed=-20)
