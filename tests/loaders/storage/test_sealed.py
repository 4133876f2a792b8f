"""Sealed files: changed content is never returned."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from orchdata.loaders.storage import sealed
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile, new_file, replaced, write_at, write_once, write_whole
from orchdata.loaders.storage.sealed import (
    BLOCK_BYTES,
    Damaged,
    body_start,
    finish,
    head_of,
    opened,
    read_sealed,
    seal,
    verify_body,
)

KIND = b"test"
VALUES = {"name": "ä", "numbers": [1, 2, 3]}


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Alter each byte in two ways, cut at each length, write zeros at each offset, and append bytes."""
    for offset in range(len(content)):
        for mask in (1, 0xFF):
            yield f"byte {offset} ^ {mask}", content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :]
        yield f"cut to {offset}", content[:offset]
        zeros = content[:offset] + bytes(16) + content[offset + 16 :]
        if zeros[: len(content)] != content:
            yield f"zeros at {offset}", zeros[: len(content)]
    yield "longer", content + b"\0"


def test_no_damage_is_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content, _ = seal(KIND, 3, VALUES, [b"some bytes"])
    tried = 0
    for what, damaged in damages(content):
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            pytest.fail(f"{what}: {read_sealed(path, KIND, 3)}")
        tried += 1
    assert tried > 3 * len(content)


@pytest.mark.parametrize("kind, format", [(b"tset", 3), (KIND, 4)])
def test_another_kind_or_format_is_refused(tmp_path: Path, kind: bytes, format: int) -> None:
    write_whole(tmp_path / "x", seal(KIND, 3, VALUES, [b"body"])[0])
    with pytest.raises(Damaged, match=r"it is of kind b'test' and format 3"):
        read_sealed(tmp_path / "x", kind, format)


def test_lengths_that_lie_ask_for_no_memory(tmp_path: Path) -> None:
    fixed = sealed._FIXED.pack(sealed._MAGIC, KIND, 3, 1 << 40, 1 << 40, 1 << 60)
    (tmp_path / "x").write_bytes(fixed + sealed._CRC.pack(zlib.crc32(fixed)))
    with pytest.raises(Damaged, match="it has 44 bytes, and should have"):
        read_sealed(tmp_path / "x", KIND, 3)


def test_a_large_body_is_checked_block_by_block(tmp_path: Path) -> None:
    path, size = tmp_path / "x", 5 * BLOCK_BYTES + 17
    body = os.urandom(size)
    with replaced(path) as fd:
        start = body_start(VALUES, size)
        write_at(fd, body, start)
        assert os.pread(fd, 8, 0) == bytes(8)  # without its magic until it is complete
        finish(fd, KIND, 3, VALUES, start, size)
    assert path.read_bytes() == seal(KIND, 3, VALUES, [body])[0]
    assert bytes(read_sealed(path, KIND, 3)[1]) == body

    with opened(path) as fd:
        head = head_of(fd, KIND, 3)
        verify_body(fd, head)
    for block, offset in ((0, 0), (3, 3 * BLOCK_BYTES + 5), (5, size - 1)):
        content = bytearray(path.read_bytes())
        content[head.start + offset] ^= 64
        (tmp_path / "y").write_bytes(content)
        with opened(tmp_path / "y") as fd, pytest.raises(Damaged, match=f"bytes {head.start + block * BLOCK_BYTES} to"):
            verify_body(fd, head_of(fd, KIND, 3))
        with pytest.raises(Damaged, match="its content is not what was written"):
            read_sealed(tmp_path / "y", KIND, 3)


def test_a_file_cut_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, seal(KIND, 3, VALUES, [os.urandom(2 * BLOCK_BYTES)])[0])
    with opened(path) as fd:
        head = head_of(fd, KIND, 3)
        os.truncate(path, BLOCK_BYTES)
        with pytest.raises(Damaged):
            verify_body(fd, head)


# Files appear whole or not at all.


def test_what_fails_in_the_block_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"older")
    with pytest.raises(RuntimeError, match="in the block"), new_file(path) as fd:
        write_at(fd, b"newer", 0)
        raise RuntimeError("in the block")
    assert [other.name for other in tmp_path.iterdir()] == ["x"] and path.read_bytes() == b"older"


def test_what_the_system_writes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:3], offset))
    write_once(tmp_path / "x", b"12345678")
    assert (tmp_path / "x").read_bytes() == b"12345678"


def test_a_large_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync, synced = tmp_path / "x", os.fsync, []

    def noted(fd: int) -> None:
        sync(fd)
        synced.append((os.fstat(fd).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    _replace(path)
    assert synced == [(len(b"newer"), False)] and path.exists()


def _replace(path: Path) -> None:
    with replaced(path) as fd:
        write_at(fd, b"newer", 0)


# The cache folder: atomic, capped, safe for concurrent writers.


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

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: cache.entry("one", make), range(8)))
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
