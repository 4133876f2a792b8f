"""Open shards: by suffix, shared by threads, bounded, no descriptor left."""

from __future__ import annotations

import gc
import gzip
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hostile import tar_of
from hypothesis import given
from hypothesis import strategies as st

from orchdata.loaders.errors import ShardError, StaleIndexError
from orchdata.loaders.index.facts import load_facts
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member, stem, uses_of
from orchdata.loaders.shards.fields import _split_long, classify, printable, split_name
from orchdata.loaders.shards.open import OpenShards, open_indexed, open_shard
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile


def tar_bytes(text: bytes) -> bytes:
    return tar_of({"a.txt": text})


@pytest.fixture
def shards(tmp_path: Path) -> OpenShards:
    return OpenShards(limits=Limits(), cache=CacheFolder(tmp_path / "cache"), capacity=3)


def open_descriptors() -> set[tuple[str, str]]:
    """Return number and file of each; those that other tests left may be closed at any time."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {(link, os.readlink(link)) for link in links if os.path.lexists(link)}


def test_no_descriptor_is_left(tmp_path: Path, shards: OpenShards) -> None:
    paths = []
    for i in range(12):
        path = tmp_path / f"{i}.tar.gz"
        path.write_bytes(gzip.compress(tar_bytes(b"%d" % i)))
        paths.append(str(path))
    before = open_descriptors()
    for path in paths * 2:
        shards.get(path).read(512, 1, 0, "txt")
    assert len(open_descriptors() - before) == 3  # the capacity
    shards.close()
    assert open_descriptors() <= before


def test_a_shard_let_go_stays_readable_for_who_has_it(tmp_path: Path, shards: OpenShards) -> None:
    for i in range(6):
        (tmp_path / f"{i}.tar").write_bytes(tar_bytes(b"%d" % i))
    first = shards.get(str(tmp_path / "0.tar"))
    for i in range(1, 6):
        shards.get(str(tmp_path / f"{i}.tar"))
    assert first.read(512, 1, 0, "txt") == b"0"
    assert shards.get(str(tmp_path / "0.tar")) is not first


def indexed_as(path: Path) -> ShardInfo:
    def opened() -> Shard:
        return open_shard(str(path), limits=Limits(), cache=CacheFolder())

    meta = load_facts(str(path), opened, limits=Limits(), cache=CacheFolder()).meta
    return ShardInfo(str(path), meta.size, meta.checksum, meta.version)


def test_other_members_in_the_same_size_are_stale(tmp_path: Path, shards: OpenShards) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(b"one"))
    indexed = indexed_as(path)
    path.write_bytes(tar_bytes(b"seven"))
    os.utime(path, ns=(1, 1))
    assert path.stat().st_size == indexed.size
    with pytest.raises(StaleIndexError, match="rewritten since it was indexed"):
        shards.get(str(path), indexed)


def test_threads_open_a_shard_once(tmp_path: Path, shards: OpenShards) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(b"x"))
    barrier = threading.Barrier(8)

    def get() -> int:
        barrier.wait()
        return id(shards.get(str(path)))

    with ThreadPoolExecutor(8) as pool:
        assert len({future.result() for future in [pool.submit(get) for _ in range(8)]}) == 1


def test_closing_waits_for_readers_and_ends_reading(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    file = LocalFile(path)
    held = file._held()
    fd = held.number
    file.close()
    assert os.pread(fd, 7, 0) == b"content"  # a read under way keeps it
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(fd, 7, 0)
    with pytest.raises(ValueError, match="read after close"):
        file.read(0, 1)
    file.close()


# Names of members: split as by webdataset, ordered by number, also long and odd ones.


IMAGE = 1

WEBDATASETS = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
LONG = 1 << 20


def images(*names: str) -> list[str]:
    """Return the fields in the order of their placeholders."""
    members = [Member(name, IMAGE) for name in names]
    return [names[index] for index in uses_of(members, Recipe()).media["image"]]


@pytest.mark.parametrize("characters", [None, "ab./\n_"])
@given(data=st.data())
def test_long_names_are_split_as_webdataset_splits_short_ones(characters: str | None, data: st.DataObject) -> None:
    name = data.draw(st.text(characters or st.characters(), max_size=14))
    if not name.startswith("__"):
        split = split_name(name)
        assert split == _split_long(name)
        padding = "c" * 300  # after the last dot or slash: nothing else changes
        assert split_name(name + padding) == _split_long(name + padding) == found_by_expression(name + padding)


def found_by_expression(name: str) -> tuple[str, str] | None:
    match = WEBDATASETS.match(name)
    return None if match is None else (match[1], match[2].lower())


@pytest.mark.parametrize(
    "name", ["/" * LONG + "./", "a/" * LONG + ".b/", "." * LONG, "a." * LONG, "9" * LONG + ".jpg", "\n/" * LONG + "a.b"]
)
def test_a_name_of_a_mebibyte_takes_no_time(name: str) -> None:
    """In quadratic time, each would take hours."""
    split = split_name(name)
    for text in (name, "" if split is None else split[1]):
        classify(text)
        printable(text)
        stem(text)
        images(text, "0.jpg")


def test_numbers_of_any_length_order_by_value() -> None:
    huge = "7" * 5_000
    assert images(f"{huge}.jpg", "10.jpg", "9.jpg", "jpg") == ["jpg", "9.jpg", "10.jpg", f"{huge}.jpg"]
    assert images(f"{huge}8.jpg", f"{huge}7.jpg") == [f"{huge}7.jpg", f"{huge}8.jpg"]
    assert images("010.jpg", "9.jpg", "0.jpg", "00.png") == [
        "0.jpg",
        "00.png",
        "9.jpg",
        "010.jpg",
    ]  # ties: as they come
    assert images("\u0663.jpg", "2.jpg", "\u00b2.jpg") == ["\u00b2.jpg", "2.jpg", "\u0663.jpg"]  # Arabic 3; no number


# Compressed tars: any framing in, the same facts out, bombs stopped while decompressing.


SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def archive(num_bytes: int = 3_000_000) -> bytes:
    """A tar of text and incompressible bytes."""
    noise = np.random.default_rng(0).bytes(num_bytes)
    return tar_of({"a.txt": b"one", "a.bin": noise, "b.txt": b"two" * 1000})


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
