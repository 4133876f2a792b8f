"""Paths given by users."""

from __future__ import annotations

import errno
import glob
import os
from pathlib import Path

import pytest
from webdataset.shardlists import expand_urls

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.paths import _matches, expand_paths


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
