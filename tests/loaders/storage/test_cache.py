"""The cache folder: atomic, capped, safe for concurrent writers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile


def filled(content: bytes) -> object:
    def make(file: IO[bytes], limit: int) -> None:
        file.write(content)

    return make


def test_a_new_folder_is_for_its_user_alone_and_one_that_exists_keeps_its_mode(private_cache: Path) -> None:
    shutil.rmtree(private_cache, ignore_errors=True)
    assert CacheFolder().file("index", "x").parent.parent.stat().st_mode & 0o777 == 0o700
    private_cache.chmod(0o775)  # so that a team can share it
    assert CacheFolder().file("index", "y").parent.parent.stat().st_mode & 0o777 == 0o775


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
    os.utime(paths[0].with_suffix(".sum"), (1, 1_000))  # long ago
    os.utime(paths[1].with_suffix(".sum"), (1, 2_000))
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
    orphan = cache.file("shards", ".dead.tar.0123.part")
    orphan.write_bytes(b"half")
    os.utime(orphan, (1, 1))
    cache.entry("x", filled(b""))  # type: ignore[arg-type]
    assert not orphan.exists()


def test_marking_use_leaves_the_entry_as_it_was(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    path = cache.entry("x", filled(b"content"))
    other_job = LocalFile(path)
    os.utime(path.with_suffix(".sum"), (1, 1))
    cache.entry("x", filled(b"never made"))
    other_job.check_unchanged()
    assert path.with_suffix(".sum").stat().st_mtime > 1


@pytest.mark.parametrize("damage", [b"CONTENT", b"\0\0\0tent", b"con", b"", b"content and more"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: bytes) -> None:
    cache = CacheFolder(tmp_path)
    path = cache.entry("x", filled(b"content"))
    while path.stat().st_mtime_ns == int(path.with_suffix(".sum").read_text().split()[2]):
        path.write_bytes(damage)
    assert cache.entry("x", filled(b"content")).read_bytes() == b"content"


def test_damage_that_keeps_the_time_is_found_at_the_next_use(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    path = cache.entry("x", filled(b"content"))
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock tick must pass
        path.write_bytes(b"CONTENT")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.entry("x", filled(b"content")).read_bytes() == b"content"
