"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchdata.loaders.storage.atomic import new_file, replaced, write_at, write_once, write_whole


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
