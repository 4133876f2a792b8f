"""The list of samples to leave out: it appears whole, and a cut one is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shard_factory import omni_samples, write_shard
from typer.testing import CliRunner

from orchdata.cli import app
from orchdata.loaders.errors import DataError, StorageError
from orchdata.quarantine import read_quarantine, write_quarantine

FAILURES = [DataError("a.tar", f"s{n}", "jpg", "a reason,\n of two lines \u2028 or three") for n in range(5)]
PAIRS = [(failure.shard, failure.key) for failure in FAILURES]


@pytest.mark.parametrize("count", [1, 5])
def test_a_list_that_is_cut_anywhere_is_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES[:count])
    data = path.read_bytes()
    assert data.count(b"\n") == count
    for size in range(1, len(data) - 1):  # without the last newline it is whole
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"jsonl(, line \d: expected| is cut after \d samples)"):
            read_quarantine(path)
    path.write_bytes(data[:-1])
    assert read_quarantine(path) == PAIRS[:count]


def test_samples_that_a_user_takes_out_are_no_cut_where_he_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert read_quarantine(path) == [PAIRS[0], *PAIRS[2:]]
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(ValueError, match="remove that blank too"):
        read_quarantine(path)
    path.write_text("\n".join(lines[:-1]).lstrip() + "\n")
    assert read_quarantine(path) == PAIRS[:-1]


@pytest.mark.parametrize("line", ['{"shard": "a", "key": 1}', '["shard", "key"]', "[" * 50_000, "5", '"x"'])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: expected"):
        read_quarantine(tmp_path / "bad.jsonl")


def test_a_write_that_fails_leaves_the_older_list(
    tmp_path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES[:1])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"bad\.jsonl: cannot be written: No space left"):
            write_quarantine(path, FAILURES)
    assert read_quarantine(path) == PAIRS[:1] and os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_before_the_work(tmp_path: Path, make: object) -> None:
    path = tmp_path / "bad.jsonl"
    make(path)  # type: ignore[operator]
    for use in (lambda: read_quarantine(path), lambda: write_quarantine(path, FAILURES)):
        with pytest.raises(ValueError, match=r"bad\.jsonl is not a regular file"):
            use()
    shard = write_shard(tmp_path / "a.tar", omni_samples(2))
    result = CliRunner().invoke(app, ["verify", shard, "--out", str(path)])
    assert result.exit_code == 1 and "is not a regular file" in result.output
    assert not list(Path(os.environ["ORCHDATA_CACHE"]).rglob("*.index"))
