"""The cache folder: atomic, capped, safe for concurrent makers."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from orchdata.loaders.cache import CacheFolder, write_atomically


def filled(content: bytes) -> object:
    def make(file: IO[bytes], limit: int) -> None:
        file.write(content)

    return make


def test_the_root_comes_from_the_environment(private_cache: Path) -> None:
    assert CacheFolder().root == private_cache
    assert CacheFolder().file("index", "x").parent.is_dir()


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHDATA_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user of a container, whom no list knows
    with pytest.raises(OSError, match="set ORCHDATA_CACHE"):
        CacheFolder()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        raise OSError(errno.ENOSPC, "from a write")

    with pytest.raises(OSError, match=r"No space left on device.*facts\.parquet"):
        write_atomically(tmp_path / "facts.parquet", write)
    assert not list(tmp_path.iterdir())


def test_an_entry_is_made_once_by_many_threads(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    made: list[int] = []

    def make(file: IO[bytes], limit: int) -> None:
        made.append(1)
        time.sleep(0.05)
        file.write(b"content")

    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(cache.entry("one", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert {path.read_bytes() for path in paths} == {b"content"}


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, max_bytes=250)
    paths = [cache.entry(str(i), filled(bytes(100))) for i in range(2)]  # type: ignore[arg-type]
    os.utime(paths[0], (1, 1_000))  # long ago
    os.utime(paths[1], (1, 2_000))
    cache.entry("0", filled(b"never made"))  # type: ignore[arg-type]  # used again, so "1" is the oldest
    cache.entry("2", filled(bytes(100)))  # type: ignore[arg-type]
    assert paths[0].exists() and not paths[1].exists()


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def make(file: IO[bytes], limit: int) -> None:
        file.write(b"half")
        raise RuntimeError("no")

    cache = CacheFolder(tmp_path)
    with pytest.raises(RuntimeError):
        cache.entry("x", make)
    assert list((tmp_path / "shards").iterdir()) == []


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    orphan = cache.file("shards", "dead.part")
    orphan.write_bytes(b"half")
    os.utime(orphan, (1, 1))
    cache.entry("x", filled(b""))  # type: ignore[arg-type]
    assert not orphan.exists()


def test_atomic_writing_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: IO[bytes]) -> None:
        file.write(b"new")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_cap_below_one_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        CacheFolder(tmp_path, max_bytes=0)
