"""Open shards: by suffix, shared by threads, bounded, no descriptor left."""

from __future__ import annotations

import gc
import gzip
import io
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.index.facts import load_facts
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.open import OpenShards, open_shard
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile


def tar_bytes(text: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return out.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> OpenShards:
    return OpenShards(limits=Limits(), cache=CacheFolder(tmp_path / "cache"), capacity=3)


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left(tmp_path: Path, shards: OpenShards) -> None:
    paths = []
    for i in range(12):
        path = tmp_path / f"{i}.tar.gz"
        path.write_bytes(gzip.compress(tar_bytes(b"%d" % i)))
        paths.append(str(path))
    before = open_descriptors()
    for path in paths * 2:
        shards.get(path).read(512, 1, 0, "txt")
    assert open_descriptors() == before + 3  # the capacity
    shards.close()
    assert open_descriptors() == before


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


def test_another_size_than_indexed_is_stale(tmp_path: Path, shards: OpenShards) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(b"x"))
    size = path.stat().st_size
    indexed = indexed_as(path)
    assert shards.get(str(path), indexed).size == size
    shards.close()
    with pytest.raises(StaleIndexError, match=rf"a\.tar: has {size} bytes, 7 when it was indexed"):
        shards.get(str(path), replace(indexed, size=7))


def test_a_copy_of_the_indexed_shard_is_not_stale(tmp_path: Path, shards: OpenShards) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(b"one"))
    indexed = indexed_as(path)
    os.utime(path, ns=(1, 1))
    assert shards.get(str(path), indexed).checksum() == indexed.checksum
