"""Tars are read as webdataset and tarfile read them."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import rows, shard, write_tar
from webdataset.tariterators import group_by_keys, tar_file_expander

from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.shards.fields import SPARSE
from orchdata.loaders.shards.tar_walk import UnusualTar, walk_any, walk_plain
from orchdata.loaders.storage.local import LocalFile


def samples_by_webdataset(path: Path) -> list[dict[str, Any]]:
    with open(path, "rb") as stream:
        return list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))


def samples_by_us(path: Path) -> list[dict[str, Any]]:
    opened = shard(path)
    samples: list[dict[str, Any]] = []
    for row in opened.facts().table.arrow().to_pylist():
        assert row["error"] is None or row["kind"] != OTHER, row
        if row["sample"] == len(samples):
            samples.append({"__key__": row["key"], "__url__": str(path)})
        encoding = row["encoding"] if row["encoding"] == SPARSE else 0
        samples[-1][row["field"]] = bytes(opened.read(row["offset"], row["size"], encoding, row["field"]))
    return samples


def test_every_shard_of_others_reads_as_webdataset_reads_it(fixtures_dir: Path) -> None:
    paths = sorted((fixtures_dir / "wds").rglob("*.tar"))
    assert len(paths) >= 9
    for path in paths:
        assert samples_by_us(path) == samples_by_webdataset(path), path


def test_what_webdataset_writes_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(50):
            writer.write({"__key__": f"dir.x/{i:04d}", "0.JPG": b"x" * i, "txt": "t", "json": {"a": i}})
    list(walk_plain(LocalFile(path), hashlib.blake2b()))  # its PAX headers are no reason for the slow walk
    assert samples_by_us(path) == samples_by_webdataset(path)
    assert samples_by_us(path)[7]["0.jpg"] == b"x" * 7


NAMES = st.lists(
    st.text(st.sampled_from("ab./_é-"), min_size=1, max_size=12).filter(
        lambda name: name[-1] != "/" and "/._" not in name
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(names=NAMES, form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_names_group_as_webdataset_groups_them(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], form: int
) -> None:
    path = write_tar(tmp_path_factory.mktemp("t") / "a.tar", [(name, name.encode()) for name in names], form)
    try:
        expected = samples_by_webdataset(path)
    except ValueError:  # a duplicate field
        assert any("comes twice" in (row["error"] or "") for row in rows(path))
        return
    keys = [sample["__key__"] for sample in expected]
    fact_rows = rows(path)
    if len(set(keys)) < len(keys):
        assert any("comes back" in (row["error"] or "") for row in fact_rows)
    elif not keys:
        assert len(fact_rows) == 1 and fact_rows[0]["error"]
    else:
        assert [(r["key"], r["field"]) for r in fact_rows] == [
            (sample["__key__"], field) for sample in expected for field in sample if field not in ("__key__", "__url__")
        ]


def tarfile_members(path: Path, limit: int = 1 << 20) -> tuple[list[tuple[str, int, bytes | None]], bool]:
    """(name, size, content) of files and hard links as tarfile reads them, and whether it fails."""
    members: list[tuple[str, int, bytes | None]] = []
    try:
        with tarfile.open(path, "r:", encoding="utf-8") as tar:
            for info in tar:
                if info.isreg():
                    reader = tar.extractfile(info)
                    assert reader is not None
                    members.append((info.name, info.size, reader.read() if info.size <= limit else None))
                elif info.islnk():
                    linked = tar.extractfile(info)
                    assert linked is not None
                    content = linked.read()
                    members.append((info.name, len(content), content))
    except (tarfile.TarError, OSError):
        return members, True
    return members, False


def our_members(path: Path, walk: Callable[..., Any]) -> tuple[list[tuple[str, int, bytes | None]], bool]:
    opened = shard(path)
    members: list[tuple[str, int, bytes | None]] = []
    damaged = False
    for batch in walk(opened._file, hashlib.blake2b()):
        damaged = batch.damage is not None
        columns = zip(batch.names, batch.offsets, batch.sizes, batch.encodings, strict=True)
        for i, (name, offset, size, encoding) in enumerate(columns):
            if i in batch.unread:
                continue
            content = bytes(opened.read(offset, size, encoding, "x")) if size <= 1 << 20 else None
            members.append((name, size, content))
    return members, damaged


def odd_tars(fixtures_dir: Path) -> list[Path]:
    return sorted((fixtures_dir / "hostile" / "go-archive-tar").rglob("*.tar"))


def test_odd_tars_read_as_tarfile_reads_them(fixtures_dir: Path) -> None:
    paths = odd_tars(fixtures_dir)
    assert len(paths) > 35
    plain = 0
    for path in paths:
        expected, fails = tarfile_members(path)
        table = shard(path).facts().table.arrow().to_pylist()
        if not expected:
            assert len(table) == 1 and table[0]["error"] and table[0]["kind"] == OTHER, path
            continue
        members, damaged = our_members(path, walk_any)
        assert members == expected, path
        assert damaged or not fails, path
        try:
            members, damaged = our_members(path, walk_plain)
        except UnusualTar:
            continue
        plain += 1
        assert members == expected, path
        assert damaged or not fails, path
    assert plain >= 8
