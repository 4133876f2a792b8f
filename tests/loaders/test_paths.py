"""Paths as users give them."""

from __future__ import annotations

from pathlib import Path

import pytest
from webdataset.shardlists import expand_urls

from orchdata.loaders.paths import expand_paths


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
    assert expand_paths(f"file://{folder}/b.parquet") == [f"{folder}/b.parquet"]


def test_a_path_with_glob_characters_that_exists_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "a[1].tar"
    path.write_bytes(b"x")
    assert expand_paths(str(path)) == [str(path)]
    assert expand_paths(path) == [str(path)]


def test_a_path_with_braces_that_exists_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "a{1..2}.tar"
    path.write_bytes(b"x")
    assert expand_paths(str(path)) == [str(path)]


@pytest.mark.parametrize("name", ["absent.tar", "a-{000..009}.tar", "c*.tar"])
def test_what_does_not_exist_is_named(folder: Path, name: str) -> None:
    expected = {"absent.tar": "absent.tar", "a-{000..009}.tar": "a-002.tar", "c*.tar": r"c\*.tar"}[name]
    with pytest.raises(FileNotFoundError, match=expected):
        expand_paths(str(folder / name))


def test_check_false_leaves_the_files_alone() -> None:
    assert expand_paths("nowhere/{0..1}.tar", check=False) == ["nowhere/0.tar", "nowhere/1.tar"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("notes.md", r"notes\.md: unknown kind of shard.*\.tar, \.tar\.gz, \.tgz, \.tar\.zst, \.tzst, \.parquet"),
        ("pipe:cat a-000.tar", "never run"),
        ("s3://bucket/a.tar", "s3://.*not supported yet"),
        (".", "is a folder.*\\*\\.tar"),
        (["a-000.tar", "./a-000.tar"], "given twice"),
        (["a-000.tar", "a-*.tar"], "given twice"),
        ("a-{000..001.tar", "unbalanced braces"),
        ([], "empty"),
        ("", "empty"),
    ],
)
def test_what_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, paths: str | list[str], message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        expand_paths(paths)


def test_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="int"):
        expand_paths([3])  # type: ignore[list-item]
