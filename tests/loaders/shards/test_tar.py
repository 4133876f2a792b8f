"""Tar shards: what webdataset and tarfile read, and what is damaged."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from tars import rows, shard, write_tar
from webdataset.tariterators import group_by_keys, tar_file_expander

from orchdata.loaders.errors import FieldError, StaleIndexError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.shards.fields import SPARSE, split_at_last_dot
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.shards.tar_walk import UnusualTar, walk_any, walk_plain
from orchdata.loaders.storage.local import LocalFile


def test_a_hard_link_is_the_file_it_names_and_any_other_link_is_an_error(tmp_path: Path) -> None:
    """GNU tar writes the second of two names of a file as a link, as in a folder that was de-duplicated."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            content = name.encode() if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

        add("./0.txt")
        add("./1.txt", tarfile.LNKTYPE, "./0.txt")
        add("2.txt", tarfile.LNKTYPE, "1.txt")
        add("3.txt", tarfile.LNKTYPE, "9.txt")
        add("3.json")
        add("4.txt", tarfile.SYMTYPE, "0.txt")
        add("5.txt", tarfile.FIFOTYPE)
        add("6.txt", tarfile.CHRTYPE)
        add("7.txt", tarfile.DIRTYPE)
        add("latest", tarfile.SYMTYPE, "0.txt")
        add("8.txt")
        add("9.txt", tarfile.LNKTYPE, "8.txt")
    opened = shard(path)
    facts = opened.facts()
    fact_rows = {row["key"] + "." + row["field"]: row for row in facts.table.arrow().to_pylist()}
    contents = {
        name: bytes(opened.read(row["offset"], row["size"], row["encoding"], "txt"))
        for name, row in fact_rows.items()
        if row["error"] is None
    }
    assert contents == {
        "./0.txt": b"./0.txt",
        "./1.txt": b"./0.txt",
        "2.txt": b"./0.txt",
        "3.json": b"3.json",
        "8.txt": b"8.txt",
        "9.txt": b"8.txt",
    }
    errors = {name: row["error"] for name, row in fact_rows.items() if row["error"] is not None}
    assert list(errors) == ["3.txt", "4.txt", "5.txt", "6.txt"]
    assert all(fact_rows[name]["kind"] == OTHER for name in errors)  # so that their samples fail under every recipe
    assert "a link to '9.txt': links are not read; write with `tar --hard-dereference -h`" in errors["3.txt"]
    assert "a link to '0.txt'" in errors["4.txt"]
    assert "a pipe" in errors["5.txt"] and "a device" in errors["6.txt"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("zeroed", [512, 1024, 4096])
def test_a_zeroed_run_loses_nothing_without_a_word(tmp_path: Path, form: int, zeroed: int) -> None:
    """A block of zeros instead of a header ends the archive for all readers."""
    members = [(f"{i:03d}\u00e9.txt", b"x" * 600) for i in range(40)]  # a name that needs a PAX header in that form
    path = write_tar(tmp_path / "a.tar", members, form)
    with tarfile.open(path) as tar:
        info = tar.getmembers()[20]
    content = bytearray(path.read_bytes())
    content[info.offset : info.offset + zeroed] = bytes(zeroed)
    path.write_bytes(content)
    facts = shard(path).facts()
    assert list(facts.table.errors) == [19] and len(facts.table) == 20
    assert "data after the end of the archive at byte " in facts.table.errors[19]
    assert facts.meta.lost_bytes >= len(content) - info.offset


@pytest.mark.parametrize("name", ["0.txt", "0" * 200 + ".txt"])  # the latter for the walk of tarfile, with `global`
def test_joined_archives_are_an_error_and_padding_is_none(tmp_path: Path, name: str) -> None:
    form = {"format": tarfile.PAX_FORMAT, "pax_headers": {"comment": "global"}} if len(name) > 100 else {}
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", **form) as tar:  # type: ignore[call-overload]
        info = tarfile.TarInfo(name)
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    alone = path.read_bytes()
    path.write_bytes(alone + bytes(3 << 20))
    assert [row["error"] for row in rows(path)] == [None]
    path.write_bytes(alone + bytes(3 << 20) + alone)
    assert [f"at byte {len(alone) + (3 << 20)}: what follows is lost" in row["error"] for row in rows(path)] == [True]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b.c/22.05.PNG", ("a/b.c/22.05", "png")),
        ("a.b.json.gz", ("a.b", "json.gz")),
        ("a.gz", ("a", "gz")),
        (".hidden", None),
        ("a/._22.05.png", None),
        ("__meta__/x.txt", None),
        ("000", None),
    ],
)
def test_names_at_the_last_dot(name: str, expected: tuple[str, str] | None) -> None:
    assert split_at_last_dot(name) == expected


def test_what_macos_adds_to_a_folder_is_no_member(tmp_path: Path) -> None:
    members = [(f"p/{dots}{i}.{e}", b"x") for i in range(2) for e in ("bin", "txt") for dots in ("._", "")]
    path = write_tar(tmp_path / "a.tar", [("./._p", b"x"), ("p/.DS_Store", b"x"), *members, ("p/.hidden", b"x")])
    found = [(row["key"], row["field"]) for row in rows(path)]
    assert found == [*((f"p/{i}", e) for i in range(2) for e in ("bin", "txt")), ("p/", "hidden")]


def test_names_are_compared_in_nfc(tmp_path: Path) -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    path = write_tar(tmp_path / "a.tar", [(f"{apart}.bin", b"x"), (f"{composed}.txt", b"x"), ("b.txt", b"x")])
    assert [(row["sample"], row["key"], row["error"]) for row in rows(path)] == [
        *((0, apart, None), (0, apart, None)),  # as it is written
        (1, "b", None),
    ]
    path = write_tar(tmp_path / "b.tar", [(f"{apart}.txt", b"x"), (f"{composed}.txt", b"x"), (f"a.{apart}", b"x")])
    assert [(row["field"], row["error"]) for row in rows(path)] == [
        ("txt", None),
        ("txt", f"field 'txt' comes twice in sample {apart!r}"),
        (composed, None),
    ]


def test_many_members_in_few_blocks(tmp_path: Path) -> None:
    """More members than one batch, of all sizes around the ends of blocks."""
    rng = np.random.default_rng(1)
    members = [(f"{i:05d}.{'txt' if i % 3 else 'bin'}", rng.bytes(int(rng.integers(0, 9_000)))) for i in range(2_500)]
    members += [(f"x{i}.txt", b"") for i in range(1_500)]
    path = write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT)
    opened = shard(path)
    fact_rows = opened.facts().table.arrow().to_pylist()
    assert [f"{row['key']}.{row['field']}" for row in fact_rows] == [name for name, _ in members]
    for row, (_, content) in zip(fact_rows, members, strict=True):
        assert bytes(opened.read(row["offset"], row["size"], row["encoding"], row["field"])) == content


@pytest.mark.parametrize(
    ("members", "bad_keys", "message"),
    [
        ([("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"3")], {"a"}, "field 'txt' comes twice in sample 'a'"),
        ([("a.txt", b"1"), ("b.txt", b"2"), ("a.jpg", b"3")], {"a"}, "key 'a' comes back after other keys"),
    ],
)
def test_a_field_twice_and_a_key_that_comes_back(
    tmp_path: Path, members: list[tuple[str, bytes]], bad_keys: set[str], message: str
) -> None:
    fact_rows = rows(write_tar(tmp_path / "a.tar", members))
    errors = [row for row in fact_rows if message in (row["error"] or "")]
    assert {row["key"] for row in errors} == bad_keys
    assert all(row["kind"] == OTHER for row in errors)
    bad_samples = {row["sample"] for row in errors}
    expected = {row["sample"] for row in fact_rows if row["key"] in bad_keys}
    assert bad_samples == expected  # both occurrences of a returning key


@pytest.mark.parametrize("left", [0, 100, 5_000])
def test_an_archive_that_is_cut_while_it_is_walked_is_stale(tmp_path: Path, left: int) -> None:
    """No reader waits forever for the rest of a header."""
    path = write_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 3_000) for i in range(40)])

    class Cut(LocalFile):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            if offset > 20_000:
                os.truncate(path, left)
            return super().read_into(offset, buffer)

    opened = TarShard(str(path), Cut(path), limits=Limits())
    with pytest.raises(StaleIndexError, match=r"a\.tar: was changed while it was open"):
        opened.facts()


@given(cut=st.integers(1, 5_000).filter(lambda cut: cut % 1024))  # a cut between two members cannot be noticed
def test_any_cut_leaves_a_prefix_of_good_samples(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("t") / "a.tar"
    write_tar(path, [(f"{i}.{field}", b"x" * 300) for i in range(3) for field in ("txt", "bin")])
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    complete = sum(1 for i in range(3) if cut >= 1024 * 2 * (i + 1))
    fact_rows = rows(path)
    bad = {row["sample"] for row in fact_rows if row["error"]}
    good = {row["sample"] for row in fact_rows} - bad
    assert good >= set(range(min(complete, 3) - 1))
    assert good <= set(range(complete)) or (complete == 0 and not good)
    for row in fact_rows:
        if row["sample"] in good:
            assert bytes(shard(path).read(row["offset"], row["size"], 0, row["field"])) == b"x" * 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"hello world" * 100, r"not a tar \(.*\): starts with 'hello wo'"),
        (b"short", r"not a tar \(.*\): starts with 'short'"),
        (bytes(10_240), "no samples: the archive has no files"),
    ],
)
def test_a_file_that_is_no_shard_is_one_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    (row,) = rows(path)
    assert (row["sample"], row["key"], row["field"], row["kind"]) == (0, "", "", OTHER)
    assert re.search(message, row["error"])


def test_gzipped_text_is_read_within_its_limit(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [("a.txt.gz", gzip.compress(b"hello") + gzip.compress(b" you")), ("b.txt.gz", gzip.compress(bytes(10_000)))],
    )
    small, large = rows(path)
    opened = shard(path, Limits(text_bytes=9_999))
    assert opened.read(small["offset"], small["size"], small["encoding"], "txt.gz") == b"hello you"
    with pytest.raises(FieldError, match="more than 9999 bytes decompressed"):
        opened.read(large["offset"], large["size"], large["encoding"], "txt.gz")
    with pytest.raises(FieldError, match="damaged gzip"):
        opened.read(small["offset"], small["size"] - 9, small["encoding"], "txt.gz")


# Tars are read as webdataset and tarfile read them.


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
