"""Local files: system errors are not damage, and content that changes while it is open is not delivered."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard
from webdataset.shardlists import expand_urls

import orchdata as od
from orchdata.loaders.errors import StaleIndexError, StorageError
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.paths import _matches, expand_paths

KINDS = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES]


def refusing(call: Callable[..., Any], times: int, number: int) -> Callable[..., Any]:
    """Return `call` with a number of failures before it works."""
    left = [times]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call(*args, **kwargs)

    return refuse


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    return path


@pytest.mark.parametrize("number", KINDS)
@pytest.mark.parametrize("name", ["open", "fstat", "pread", "preadv"])
def test_what_the_system_refuses_three_times_is_tried_a_fourth(
    path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(os, name, refusing(getattr(os, name), 3, number))
    file = LocalFile(path)
    assert file.read(10, 5) == bytes(range(10, 15))
    buffer = bytearray(4)
    assert file.read_into(20, memoryview(buffer)) == 4
    assert buffer == bytes(range(20, 24))


def test_a_forgotten_file_is_opened_again(path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalFile(path)
    stale = [os.fstat(file._held().number).st_ino, True]
    pread = os.pread

    def forgotten(fd: int, size: int, offset: int) -> bytes:
        if stale[1]:  # until the descriptor is replaced
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(fd, size, offset)

    dup2 = os.dup2

    def put(*args: Any, **kwargs: Any) -> int:
        stale[1] = False
        return dup2(*args, **kwargs)

    monkeypatch.setattr(os, "pread", forgotten)
    monkeypatch.setattr(os, "dup2", put)
    assert file.read(0, 3) == bytes([0, 1, 2])
    file.check_unchanged()


def test_a_file_in_the_place_of_a_forgotten_one_is_not_read(
    path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LocalFile(path)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1, 1))  # another file of the same size
    monkeypatch.setattr(os, "pread", refusing(os.pread, 2, errno.ESTALE))
    with pytest.raises(StaleIndexError, match="/data: was replaced while it was open"):
        file.read(0, 3)


@pytest.mark.parametrize("change", ["content", "size", "times"])
def test_a_change_while_open_is_seen(path: Path, change: str) -> None:
    file = LocalFile(path)
    file.check_unchanged()
    before = os.stat(path)
    if change == "size":
        with path.open("ab") as out:
            out.write(b"more")
    else:
        while os.stat(path).st_ctime_ns == before.st_ctime_ns:  # a clock tick must pass for a change to show
            with path.open("r+b") as out:
                out.write(b"\0")
            time.sleep(0.001)
    if change == "times":  # as rsync leaves it; only the inode's own time tells
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StaleIndexError, match="/data: was changed while it was open"):
        file.check_unchanged()


def samples(word: str, count: int = 30) -> list[dict[str, Any]]:
    return [{"__key__": f"k{number:03d}", "txt": f"{word} {number:03d}".encode()} for number in range(count)]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("collate_fn", [None, lambda samples: [sample.key for sample in samples]])
def test_a_shard_rewritten_in_place_during_an_epoch_stops_it(
    tmp_path: Path, on_error: str, collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    shard = write_shard(tmp_path / "a.tar", samples("right"))
    other = write_shard(tmp_path / "b.tar", samples("wrong"))
    assert os.path.getsize(shard) == os.path.getsize(other)
    loader = od.DataLoader(
        od.ShardDataset(shard), batch_size=2, num_threads=0, on_error=on_error, collate_fn=collate_fn
    )
    steps = iter(loader)
    next(steps)
    written = os.stat(shard).st_mtime_ns
    while os.stat(shard).st_mtime_ns == written:
        with open(other, "rb") as source, open(shard, "r+b") as out:  # as cp and rsync --inplace do
            shutil.copyfileobj(source, out)
    with pytest.raises(StaleIndexError, match=r"a\.tar: was changed while it was open.*orchdata index"):
        next(steps)
    assert loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("collate_fn", [None, lambda samples: [sample.key for sample in samples]])
def test_an_index_written_to_while_it_is_open_stops_the_run(
    tmp_path: Path, collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    shard = write_shard(tmp_path / "a.tar", samples("right"))
    loader = od.DataLoader(od.ShardDataset(shard), batch_size=2, num_threads=0, on_error="skip", collate_fn=collate_fn)
    steps = iter(loader)
    next(steps)
    path = od.ShardDataset(shard).index().path
    written = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    while path.stat().st_mtime_ns == written:
        with path.open("r+b") as out:
            out.write(content)
    with pytest.raises(od.DamagedIndexError, match="was changed while it was open"):
        next(steps)


# Paths given by users.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a-000.tar", "a-001.tar", "a-002.tar.gz", "b.parquet", "notes.md"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_braces_expand_as_webdataset_expands_them(folder: Path) -> None:
    pattern = str(folder / "a-{000..001}.tar")
    assert expand_paths(pattern) == expand_urls(pattern) == [str(folder / "a-000.tar"), str(folder / "a-001.tar")]
    assert expand_paths(str(folder / "{b.parquet,a-001.tar}")) == [str(folder / "b.parquet"), str(folder / "a-001.tar")]


def test_globs_are_sorted_and_lists_keep_their_order(folder: Path) -> None:
    assert expand_paths(str(folder / "*.tar")) == [str(folder / "a-000.tar"), str(folder / "a-001.tar")]
    assert expand_paths([folder / "b.parquet", str(folder / "a-*.tar")])[0] == str(folder / "b.parquet")
    for scheme in ("file://", "file:", "file://localhost"):
        assert expand_paths(f"{scheme}{folder}/b.parquet") == [f"{folder}/b.parquet"]


@pytest.mark.parametrize("name", ["absent.tar", "a-{000..009}.tar", "c*.tar"])
def test_what_does_not_exist_is_named(folder: Path, name: str) -> None:
    expected = {"absent.tar": "absent.tar", "a-{000..009}.tar": "a-002.tar", "c*.tar": r"c\*.tar"}[name]
    with pytest.raises(FileNotFoundError, match=expected):
        expand_paths(str(folder / name))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("notes.md", r"notes\.md: unknown kind of shard.*\.tar, \.tar\.gz, \.tgz, \.tar\.zst, \.tzst, \.parquet"),
        ("pipe:cat a-000.tar", "never run"),
        ("a-000.tar::pipe:cat a-001.tar", "'pipe:cat a-001.tar': commands are never run.*mount"),
        ("s3:///a.tar", "names no bucket"),
        ("https://host/train-*.tar", "HTTP servers have no listing"),
        (".", "is a folder without metadata\\.jsonl or .*\\*\\.tar"),
        (["a-000.tar", "./a-000.tar"], "given twice"),
        ("a-{000..001.tar", "unbalanced braces"),
        ("{a,b}" * 40 + ".tar", "more than 1,000,000 paths.*give a glob"),
        ("{0..1000000}.tar", "more than 1,000,000 paths"),
        ("{x,{a,b}{0..9999}}{c,{d,{e,f}}}{0..99}.tar", "more than 1,000,000 paths"),
        ("{0.." + "9" * 5000 + "}.tar", "more than 1,000,000 paths"),
        ("", "empty"),
    ],
)
def test_what_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, paths: str | list[str], message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        expand_paths(paths)


def test_a_folder_that_cannot_be_listed_is_an_error(
    folder: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StorageError, match="cannot be listed: Input/output error"):
        expand_paths(str(folder / "*.tar"))


@pytest.mark.parametrize(
    "pattern", ["*.tar", "**/*.tar", "*/x*", "a/**/*.tar", "link/**/*.tar", "[!a]*/*", "?/.h*", "a/.h*"]
)
def test_globs_match_as_the_standard_library_matches(tmp_path: Path, pattern: str) -> None:
    for name in ("a/x.tar", "a/b/y.tar", "a/b/c/z.tar", ".h/q.tar", "a/.hid.tar", "a/b/x[1].tar", "w.tar", "c d/e.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    path = str(tmp_path / pattern)
    matching = {os.path.realpath(name) for name in glob.glob(path, recursive=True) if name.endswith(".tar")}
    assert {os.path.realpath(name) for name in _matches(Path(path)) if name.endswith(".tar")} == matching
