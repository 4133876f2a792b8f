"""Compressed tars: any framing in, the same facts out, bombs stopped while decompressing."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from orchdata.loaders.errors import ShardError, StaleIndexError
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.open import open_indexed, open_shard
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.storage.cache import CacheFolder

SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def archive(num_bytes: int = 3_000_000) -> bytes:
    """A tar of text and incompressible bytes."""
    out = io.BytesIO()
    noise = np.random.default_rng(0).bytes(num_bytes)
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in (("a.txt", b"one"), ("a.bin", noise), ("b.txt", b"two" * 1000)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def streamed_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(data)


FRAMINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".tar.gz", gzip.compress),
    "two gzip members": (".tgz", lambda data: gzip.compress(data[:1_000]) + gzip.compress(data[1_000:])),
    "gzip, zero padding": (".tar.gz", lambda data: gzip.compress(data) + bytes(5_000)),
    "zstd": (".tar.zst", zstd),
    "zstd without content size": (".tzst", streamed_zstd),
    "zstd frames": (
        ".tar.zst",
        lambda data: SKIPPABLE + zstd(data[:70_000]) + zstd(b"") + SKIPPABLE + zstd(data[70_000:]) + SKIPPABLE,
    ),
    "a plain tar called .tar.gz": (".tar.gz", lambda data: data),
    "a gzipped tar called .tar": (".tar", gzip.compress),
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_any_framing_reads_as_the_plain_tar(tmp_path: Path, framing: str) -> None:
    suffix, compress = FRAMINGS[framing]
    data = archive()
    (tmp_path / "plain.tar").write_bytes(data)
    (tmp_path / f"packed{suffix}").write_bytes(compress(data))
    cache = CacheFolder(tmp_path / "cache")
    plain = open_shard(str(tmp_path / "plain.tar"), limits=Limits(), cache=cache)
    packed = open_shard(str(tmp_path / f"packed{suffix}"), limits=Limits(), cache=cache)
    assert packed.facts().table == plain.facts().table
    for row in plain.facts().table.arrow().to_pylist():
        member = row["offset"], row["size"], row["encoding"], row["field"]
        assert bytes(packed.read(*member)) == bytes(plain.read(*member))
    assert packed.size == (tmp_path / f"packed{suffix}").stat().st_size
    plain.close()
    packed.close()


def test_a_shard_is_decompressed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(archive(10)))
    cache = CacheFolder(tmp_path / "cache")
    for _ in range(2):
        open_shard(str(path), limits=Limits(), cache=cache).close()
    assert len(list((cache.root / "shards").glob("*.tar"))) == 1
    path.write_bytes(gzip.compress(archive(20)))
    open_shard(str(path), limits=Limits(), cache=cache).close()
    assert len(list((cache.root / "shards").glob("*.tar"))) == 2


def test_a_compressed_file_that_keeps_size_and_time_is_read_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl.gz", CacheFolder(tmp_path / "cache")
    path.write_bytes(gzip.compress(b'{"text": "some words"}', mtime=0))
    before = path.stat()
    shard = open_shard(str(path), limits=Limits(), cache=cache)
    meta = shard.facts().meta
    shard.close()
    indexed = ShardInfo(str(path), meta.size, meta.checksum, meta.version)
    open_indexed(str(path), indexed, limits=Limits(), cache=cache).close()
    copied = next((cache.root / "shards").glob("*.tar")).stat().st_mtime_ns
    os.chmod(path, 0o600)  # a later change of its status: the content is compared, and is the same
    open_indexed(str(path), indexed, limits=Limits(), cache=cache).close()

    path.write_bytes(gzip.compress(b'{"text": "some birds"}', mtime=0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert after.st_ctime_ns > copied
    for _ in range(2):  # the second process finds it too
        with pytest.raises(StaleIndexError, match=r"same size and modification time \(use `orchdata index --again`\)"):
            open_indexed(str(path), indexed, limits=Limits(), cache=cache)
    shard = open_shard(str(path), limits=Limits(), cache=cache)
    assert shard.facts().meta.checksum != meta.checksum
    shard.close()


BOMBS = {
    ".tar.gz": lambda: gzip.compress(bytes(64 << 20)),
    ".tar.zst": lambda: zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20)),
}


@pytest.mark.parametrize("suffix", BOMBS)
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(), r"decompresses \d+ to 1, above Limits.decompression_ratio=200"),
        (Limits(decompressed_bytes=8 << 20, decompression_ratio=1e9), "decompressed_bytes=8388608"),
    ],
)
def test_a_bomb_is_stopped_while_it_unfolds(tmp_path: Path, suffix: str, limits: Limits, message: str) -> None:
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(BOMBS[suffix]())
    cache = CacheFolder(tmp_path / "cache")
    with pytest.raises(ShardError, match=message):
        open_shard(str(path), limits=limits, cache=cache)
    assert list((cache.root / "shards").iterdir()) == []


@pytest.mark.parametrize(("suffix", "compress"), [(".tar.gz", gzip.compress), (".tar.zst", streamed_zstd)])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damage_is_an_error_that_names_the_shard(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes], damage: str
) -> None:
    data = bytearray(compress(archive(100_000)))
    if damage == "cut":
        del data[-20_000:]
    else:
        data[len(data) - 3] ^= 0xFF  # in the checksum of either
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"a\.tar\.(gz|zst): cannot be decompressed: "):
        open_shard(str(path), limits=Limits(), cache=CacheFolder(tmp_path / "cache"))


def test_golden_zstd_files_decompress_or_fail_cleanly(fixtures_dir: Path, tmp_path: Path) -> None:
    """None of them is a tar: those that decompress get that error, the others are ShardErrors."""
    for source in sorted((fixtures_dir / "hostile" / "zstd-golden").rglob("*.zst")):
        path = tmp_path / f"{source.stem}.tar.zst"
        path.write_bytes(source.read_bytes())
        sound = "decompression-errors" not in str(source)
        try:
            shard = open_shard(str(path), limits=Limits(), cache=CacheFolder(tmp_path / "cache"))
        except ShardError:
            assert not sound, source
            continue
        assert sound, source
        assert len(shard.facts().table) == 1
        shard.close()
