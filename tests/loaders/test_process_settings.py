"""Settings of the whole process, which any program may change: no good sample becomes a bad one for them."""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from images import encoded, photo, pixels_of
from PIL import Image
from shard_factory import write_shard

import orchdata as od
from orchdata.loaders.errors import DecodeError, PackageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import probe_image
from orchdata.loaders.recipe import Recipe


@contextmanager
def cells_of(characters: int) -> Iterator[None]:
    before = csv.field_size_limit(characters)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def failures(path: Path) -> list[str]:
    index = build_index([str(path)], Recipe())
    return [index.failure(int(row)).reason for row in index.bad_rows()]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("id,text\n1," + "w " * 1_000 + "\n2,b\n")
    return path


def test_a_low_limit_of_cells_is_refused_and_not_recorded(table: Path) -> None:
    with cells_of(100), pytest.raises(PackageError, match=r"csv.field_size_limit\(\) is 100.*131072"):
        build_index([str(table)], Recipe())
    assert failures(table) == []


def test_little_recursion_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a", "more": json.loads("[" * 300 + "]" * 300)}) + "\n")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(600)
    try:
        with pytest.raises(ValueError, match=r"getrecursionlimit\(\) is 600.*setrecursionlimit\(1000\)"):
            build_index([str(path)], Recipe())
    finally:
        sys.setrecursionlimit(before)
    assert failures(path) == []


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "PPM", "JPEG2000"])
def test_pillows_own_limit_of_pixels_is_none_of_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(photo(64, 48), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert probe_image(data, Limits()) == (64, 48)
    assert pixels_of(data, (64, 48)).shape == (48, 64, 3)


def unsound_apng() -> bytes:
    """A PNG that is good, but for a chunk of no frames, of which Pillow warns."""
    data = encoded(photo(64, 48), "PNG")
    control = b"acTL" + struct.pack(">II", 0, 0)
    chunk = struct.pack(">I", 8) + control + struct.pack(">I", zlib.crc32(control))
    return data[:33] + chunk + data[33:]


def test_a_warning_that_is_made_an_exception_is_no_damage(tmp_path: Path) -> None:
    data = unsound_apng()
    with pytest.warns(UserWarning, match="Invalid APNG"):
        Image.open(io.BytesIO(data))  # the control
    path = write_shard(tmp_path / "a.tar", [{"__key__": "a", "png": data, "txt": b"x"}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = od.DataLoader(od.ShardDataset(path, Recipe(audio=None)), batch_size=1, num_threads=0)
        assert [key for batch in loader for _, key in batch.sample_ids] == ["a"]


def jpeg_with(stray: bytes) -> bytes:
    data = encoded(photo(64, 48), "JPEG")
    return data[:2] + stray + data[2:]


@pytest.mark.parametrize("stray", [b"\xff", b"\0", b"\xff\0"])
def test_what_pillow_reads_byte_by_byte_in_a_jpeg_is_bounded(stray: bytes) -> None:
    with pytest.raises(DecodeError, match="more than 65536 bytes"):
        probe_image(jpeg_with(b"\xff" + stray * (1 << 24)), Limits())
    assert probe_image(jpeg_with(b"\xff" * 1_000), Limits()) == (64, 48)
