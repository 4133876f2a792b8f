"""The files that are mutated: a few small ones of each kind, made here."""

from __future__ import annotations

import gzip
import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hostile import tar_of
from hostile_arrow import good_files
from hostile_media import sound
from PIL import Image
from shard_factory import chat, jpeg, omni_samples, png, write_shard

MEMBER_KINDS = ("jpg", "png", "webp", "tiff", "gif", "bmp", "wav", "flac", "mp3", "ogg", "json", "txt")
VIDEO_KINDS = ("mp4", "mov", "webm", "mkv")
"""Which take PyAV, of which the other kinds can do without."""
SHARD_KINDS = ("tar", "parquet", "arrow", "tar.gz", "tar.zst")
IMAGE_KINDS, AUDIO_KINDS = MEMBER_KINDS[:6], MEMBER_KINDS[6:10]


@cache
def seed_files(kind: str) -> tuple[bytes, ...]:
    """Files of a kind: always the same, in the same order."""
    if kind in IMAGE_KINDS:
        return tuple(_images(kind))
    if kind in AUDIO_KINDS:
        return tuple(_sounds(kind))
    if kind in ("json", "txt"):
        return tuple(_texts(kind))
    if kind in VIDEO_KINDS:
        return tuple(_clips(kind))
    return tuple(_shards(kind))


def _picture(mode: str, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height)).convert(mode)


def _images(kind: str) -> list[bytes]:
    name = {"jpg": "JPEG", "tiff": "TIFF"}.get(kind, kind.upper())
    turned = Image.Exif()
    turned[274] = 6
    kinds: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "jpg": [("RGB", {}), ("L", {}), ("RGB", {"progressive": True, "exif": turned}), ("CMYK", {})],
        "png": [("RGB", {}), ("RGBA", {}), ("P", {}), ("I;16", {}), ("1", {})],
        "webp": [("RGB", {}), ("RGBA", {"lossless": True}), ("RGB", {"exif": turned})],
        "tiff": [("RGB", {}), ("L", {"compression": "tiff_lzw"}), ("RGB", {"compression": "tiff_adobe_deflate"})],
        "gif": [("P", {}), ("L", {}), ("P", {"interlace": 0})],
        "bmp": [("RGB", {}), ("L", {}), ("1", {})],
    }
    files = []
    for number, (mode, options) in enumerate(kinds[kind]):
        out = io.BytesIO()
        _picture(mode if mode != "I;16" else "L", 48 + 8 * number, 40).convert(mode).save(out, name, **options)
        files.append(out.getvalue())
    return files


def _sounds(kind: str) -> list[bytes]:
    name = kind.upper()
    rates = {"mp3": (16_000, 44_100)}.get(kind, (16_000, 22_050, 8_000))
    subtypes = {"wav": ("PCM_16", "FLOAT", "ULAW"), "flac": ("PCM_16", "PCM_24", "PCM_S8")}.get(kind, (None,) * 3)
    return [sound(name, subtype, seconds=0.3, rate=rate) for rate, subtype in zip(rates, subtypes, strict=False)]


def _clips(kind: str) -> list[bytes]:
    from video_clips import VARIABLE, clip

    exact = ("fflags", "+bitexact")  # without random numbers in the container
    pieces = (exact, ("movflags", "frag_keyframe+empty_moov"))
    kinds: dict[str, list[dict[str, Any]]] = {
        "mp4": [{}, {"times": VARIABLE[:8]}, {"codec": "mpeg4"}, {"options": pieces}],
        "mov": [{"codec": "mpeg4"}, {"turned": 90}],
        "webm": [{"codec": "vp8"}, {"codec": "vp9"}],
        "mkv": [{}, {"codec": "mpeg4", "times": VARIABLE[:6]}],
    }
    plain: dict[str, Any] = {"codec": "h264", "container": kind, "frames": 8, "options": (exact,)}
    return [clip(**plain | options) for options in kinds[kind]]


def _texts(kind: str) -> list[bytes]:
    if kind == "txt":
        return [b"a plain text", "größer <image> 漢字 \u200b".encode(), b"line\r\nline\n\n" * 20]
    parts = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "again"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "so <image>"}]
    plain = {"text": "hello", "loss": True}
    return [
        chat("what is it", "a thing"),
        json.dumps(turns).encode(),
        json.dumps({"messages": turns}).encode(),
        json.dumps(plain).encode(),
        json.dumps([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "there"}]).encode(),
    ]


def _shards(kind: str) -> list[bytes]:
    if kind == "arrow":
        return list(good_files().values())
    with TemporaryDirectory() as folder:
        written = Path(write_shard(Path(folder) / "a.tar", omni_samples(3))).read_bytes()
        if kind == "parquet":
            return [_parquet(Path(folder) / "a.parquet", compression) for compression in ("none", "snappy", "zstd")]
    plain = tar_of({"a.txt": b"one", "b.jpg": jpeg(40, 30), "b.txt": b"two", "c" * 90 + "/d.txt": b"three"})
    tars = [plain, written, tar_of({"a.png": png(30, 30), "a.json": chat("see <image>", "yes")}, ends=False)]
    if kind == "tar.gz":
        return [gzip.compress(data, mtime=0) for data in tars]
    return [zstandard.ZstdCompressor().compress(data) for data in tars] if kind == "tar.zst" else tars


def _parquet(path: Path, compression: str) -> bytes:
    images = [{"bytes": jpeg(40, 30, number), "path": None} for number in range(4)]
    table = pa.table({"image": images, "text": [f"text {number}" * number for number in range(1, 5)], "n": range(4)})
    pq.write_table(table, path, compression=compression, row_group_size=2, write_page_checksum=compression == "zstd")
    return path.read_bytes()
