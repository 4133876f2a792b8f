"""The cache folder: atomic, capped, safe for concurrent writers."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from children import as_user, only_root

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile


def filled(content: bytes) -> object:
    def make(file: IO[bytes], limit: int) -> None:
        file.write(content)

    return make


def test_the_root_comes_from_the_environment(private_cache: Path) -> None:
    assert CacheFolder().root == private_cache
    assert CacheFolder().file("index", "x").parent.is_dir()


def test_a_new_folder_is_for_its_user_alone_and_one_that_exists_keeps_its_mode(private_cache: Path) -> None:
    shutil.rmtree(private_cache, ignore_errors=True)
    assert CacheFolder().file("index", "x").parent.parent.stat().st_mode & 0o777 == 0o700
    private_cache.chmod(0o775)  # so that a team can share it
    assert CacheFolder().file("index", "y").parent.parent.stat().st_mode & 0o777 == 0o775


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHDATA_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container user without an entry in the system's list
    with pytest.raises(OSError, match="set ORCHDATA_CACHE"):
        CacheFolder()


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


def test_a_cap_below_one_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        CacheFolder(tmp_path, max_bytes=0)


def as_other_user(work: Callable[[], None]) -> None:
    """Run in a child process as a user without files."""
    as_user(65534, work)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that other users can read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@only_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_complete_cache_serves_another_user_who_cannot_write_it(shared: Path, mode: int) -> None:
    CacheFolder(shared).entry("x", filled(b"content"))
    for folder in (shared / "shards", shared / "locks"):
        folder.chmod(mode)

    def use() -> None:
        assert CacheFolder(shared).entry("x", filled(b"never made")).read_bytes() == b"content"

    os.utime(shared / "shards" / "x.sum", (1, 1))  # so that use would be marked
    as_other_user(use)


@only_root
def test_an_incomplete_cache_that_cannot_be_written_is_a_storage_error(shared: Path, no_pauses: None) -> None:
    CacheFolder(shared).entry("x", filled(b"content"))

    def use() -> None:
        with pytest.raises(StorageError, match="cannot be written: Permission denied"):
            CacheFolder(shared).entry("y", filled(b"other"))

    as_other_user(use)


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


def test_a_copied_cache_is_known_by_its_content(tmp_path: Path) -> None:
    path = CacheFolder(tmp_path / "a").entry("x", filled(b"content"))
    os.utime(path, (1, 1))
    (tmp_path / "a").rename(tmp_path / "b")
    assert CacheFolder(tmp_path / "b").entry("x", filled(b"never made")).read_bytes() == b"content"


def test_a_momentarily_full_disk_costs_nothing(tmp_path: Path, no_pauses: None) -> None:
    refused = [errno.ENOSPC, errno.ENOSPC]

    def make(file: IO[bytes], limit: int) -> None:
        file.write(b"half")
        if refused:
            raise OSError(refused.pop(), "full")
        file.write(b" and whole")

    assert CacheFolder(tmp_path).entry("x", make).read_bytes() == b"half and whole"
    assert not list((tmp_path / "shards").glob("*.part"))


def test_damage_that_keeps_the_time_is_found_at_the_next_use(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path)
    path = cache.entry("x", filled(b"content"))
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock tick must pass
        path.write_bytes(b"CONTENT")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.entry("x", filled(b"content")).read_bytes() == b"content"
