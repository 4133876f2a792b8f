"""All hostile samples and shards that are made here: the corpus grows by what is found."""

from __future__ import annotations

from collections.abc import Iterator

from hostile import EITHER, FAILS, HostileSample, HostileShard
from hostile_audio import audio_samples
from hostile_images import image_samples
from hostile_parquet import parquet_shards
from hostile_tars import compressed_shards, tar_shards
from hostile_text import named_samples, text_samples


def empty_shards() -> Iterator[HostileShard]:
    for suffix in (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".parquet"):
        yield HostileShard(f"nothing as {suffix}", suffix, FAILS, lambda path: path.write_bytes(b""))
        yield HostileShard(f"one byte as {suffix}", suffix, FAILS, lambda path: path.write_bytes(b"\x1f"))
        yield HostileShard(f"zeros as {suffix}", suffix, EITHER, lambda path: path.write_bytes(bytes(10_240)))


def hostile_samples() -> list[HostileSample]:
    return [*image_samples(), *audio_samples(), *text_samples(), *named_samples()]


def hostile_shards() -> list[HostileShard]:
    return [*tar_shards(), *compressed_shards(), *parquet_shards(), *empty_shards()]
