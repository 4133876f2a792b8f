"""Named files under system errors: a failed call is retried, and a lost folder does not make samples bad."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_factory import jpeg

import orchdata as od
from orchdata.loaders.errors import StorageError, TooManyFailures
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.reading import Reading


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(jpeg(60, 60, number))
    return folder


@pytest.fixture
def url(tmp_path: Path, root: Path) -> str:
    path = tmp_path / "a.jsonl"
    records = [{"image": f"{number}.jpg", "text": f"<image> {number}"} for number in range(len(list(root.iterdir())))]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


class Failing:
    """A system call that fails some of the times."""

    def __init__(self, call: Callable[..., Any], number: int, times: set[int], path: str = "") -> None:
        self.call, self.number, self.times, self.path = call, number, times, path
        self.count = self.refused = 0

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if str(target).startswith(self.path):
            self.count += 1
            if self.count in self.times:
                self.refused += 1
                raise OSError(self.number, os.strerror(self.number))
        return self.call(target, *args, **kwargs)


def loader(url: str, root: Path, **options: Any) -> od.DataLoader:
    return od.DataLoader(od.ShardDataset([url], media_root=root), batch_size=4, num_threads=0, **options)


def keys(loader: od.DataLoader) -> list[Any]:
    return sorted(key for batch in loader for key in batch.sample_ids)


@pytest.mark.parametrize("call", ["fstat", "readlink", "open", "pread"])
def test_one_call_that_fails_costs_a_run_a_retry(
    url: str, root: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    failing = Failing(getattr(os, call), errno.ESTALE, {3, 8, 13})
    monkeypatch.setattr(os, call, failing)
    assert len(keys(data_loader)) == 12
    assert failing.refused == 3 and data_loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("when", ["indexing", "loading"])
def test_an_empty_folder_is_a_mount_that_is_lost(
    url: str, root: Path, no_pauses: None, tmp_path: Path, when: str
) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)) if when == "loading" else None
    if data_loader is not None:
        data_loader.dataset.index()
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(StorageError, match="media: media_root is an empty folder.*mount"):
        build_index(
            [url], Recipe(), reading=Reading(media_root=str(root)), retry_seconds=0
        ) if data_loader is None else keys(data_loader)
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert len(keys(loader(url, root))) == 12


def test_a_folder_that_holds_none_of_many_files_ends_a_build(url: str, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "README").touch()
    with pytest.raises(StorageError, match=r"other: .*none of the files .*'0\.jpg', '1\.jpg', '2\.jpg'.* media_root="):
        build_index([url], Recipe(), reading=Reading(media_root=str(other)))
    with pytest.raises(StorageError, match="none of the files"):  # also with cached costs
        build_index([url], Recipe(), reading=Reading(media_root=str(other)))
    shutil.copy(root / "7.jpg", other)
    assert len(build_index([url], Recipe(), reading=Reading(media_root=str(other))).bad_rows()) == 11


def test_files_that_were_missing_are_looked_for_again_by_a_new_data_set(url: str, root: Path, tmp_path: Path) -> None:
    moved = {name: root / name for name in ("3.jpg", "8.jpg")}
    for name, path in moved.items():
        path.rename(tmp_path / name)
    assert len(keys(loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)))) == 10
    assert len(keys(loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)))) == 10
    (tmp_path / "8.jpg").rename(moved["8.jpg"])
    with pytest.warns(UserWarning, match=r"a\.jsonl changed since the index was built"):
        data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    assert len(keys(data_loader)) == 11


def test_copies_with_other_times_are_measured_again(url: str, root: Path) -> None:
    assert len(keys(loader(url, root))) == 12
    for path in root.iterdir():
        os.utime(path, ns=(1, 1))
    with pytest.warns(UserWarning, match=r"a\.jsonl changed since the index was built"):
        data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    assert len(keys(data_loader)) == 12


def test_an_epoch_that_delivers_nothing_does_not_end_in_silence(url: str, root: Path) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    data_loader.dataset.index()
    for path in root.iterdir():
        os.utime(path, ns=(1, 1))
    with pytest.raises(TooManyFailures, match="delivered nothing .*same size, but another modification time.*`cp -a`"):
        keys(data_loader)
