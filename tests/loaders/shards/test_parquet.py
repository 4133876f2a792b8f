"""Parquet shards: Hugging Face columns, plain bytes, text and chats; damage is one row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import audio, png

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.columns import COLUMNS, ParquetShard
from orchdata.loaders.shards.fields import PARQUET
from orchdata.loaders.storage.local import LocalFile

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")


def flac(frames: int) -> bytes:
    return audio(frames / 16_000, suffix="flac")


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def shard(path: Path, limits: Limits | None = None) -> ParquetShard:
    return ParquetShard(str(path), LocalFile(path), limits=limits or Limits())


def rows(path: Path, limits: Limits | None = None) -> list[dict[str, Any]]:
    return shard(path, limits).facts().table.arrow().to_pylist()


def read(opened: ParquetShard, row: dict[str, Any]) -> bytes:
    return opened.read(row["offset"], row["size"], row["encoding"], row["field"])


@pytest.mark.slow
def test_hugging_face_structs_plain_bytes_and_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        {
            "id": ["x", "y"],
            "image": [{"bytes": png(4, 3), "path": "a.png"}, None],
            "audio": [None, {"bytes": flac(700), "path": None}],
            "jpg": [png(5, 6), None],
            "payload": [flac(9), png(8, 8)],
            "text": ["hi", "grüße"],
            "count": [1, 2],
        },
    )
    opened = shard(path)
    fact_rows = opened.facts().table.arrow().to_pylist()
    assert [(row["sample"], row["key"], row["field"], row["kind"]) for row in fact_rows] == [
        (0, "x", "image", 1),
        (0, "x", "jpg", 1),
        (0, "x", "payload", 2),  # by its first bytes
        (0, "x", "text", 0),
        (1, "y", "audio", 2),
        (1, "y", "payload", 1),
        (1, "y", "text", 0),
    ]
    assert all(row["encoding"] == PARQUET and row["error"] is None for row in fact_rows)
    assert [(row["header0"], row["header1"]) for row in fact_rows[:5]] == [
        (4, 3),
        (5, 6),
        (9, 16_000),
        (0, 0),
        (700, 16_000),
    ]
    assert read(opened, fact_rows[0]) == png(4, 3)
    assert read(opened, fact_rows[-1]) == "grüße".encode()


def test_lists_give_a_field_for_each_item(tmp_path: Path) -> None:
    images = [[{"bytes": png(1, 2), "path": None}, {"bytes": png(3, 4), "path": None}], [], None]
    path = write(tmp_path / "a.parquet", {"images": images, "clips": [[flac(5)], [], [flac(6), flac(7)]]})
    opened = shard(path)
    fact_rows = opened.facts().table.arrow().to_pylist()
    assert [(row["key"], row["field"], row["header0"]) for row in fact_rows] == [
        ("0", "images.0", 1),
        ("0", "images.1", 3),
        ("0", "clips.0", 5),
        ("1", "", 0),  # a row with nothing in it is still a sample
        ("2", "clips.0", 6),
        ("2", "clips.1", 7),
    ]
    assert read(opened, fact_rows[1]) == png(3, 4)
    assert read(opened, fact_rows[5]) == flac(7)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
PARTS = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        ("messages", CHAT, CHAT),
        ("conversations", [{"from": "human", "value": "hi"}], [{"from": "human", "value": "hi"}]),
        ("messages", PARTS, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]),
        (
            "conversations",
            {"from": ["human", "gpt"], "value": ["a", "b"]},
            [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        ),
        ("sample", {"messages": CHAT, "source": "x"}, {"messages": CHAT, "source": "x"}),
    ],
)
def test_chats_are_read_as_json(tmp_path: Path, column: str, cell: Any, expected: Any) -> None:
    path = write(tmp_path / "a.parquet", {column: [cell]})
    opened = shard(path)
    (row,) = opened.facts().table.arrow().to_pylist()
    assert (row["field"], row["kind"]) == (column, 0)
    assert json.loads(read(opened, row)) == expected


def test_keys_come_from_key_then_id_then_the_row(tmp_path: Path) -> None:
    text = {"text": ["a", "b"]}
    assert [r["key"] for r in rows(write(tmp_path / "a.parquet", {"__key__": ["k", "l"], "id": [1, 2], **text}))] == [
        "k",
        "l",
    ]
    assert [r["key"] for r in rows(write(tmp_path / "b.parquet", {"id": [7, 8], **text}))] == ["7", "8"]
    assert [r["key"] for r in rows(write(tmp_path / "c.parquet", text))] == ["0", "1"]


def test_a_key_given_twice_makes_both_rows_bad(tmp_path: Path) -> None:
    first, other, second = rows(write(tmp_path / "a.parquet", {"__key__": ["x", "y", "x"], "text": ["a", "b", "c"]}))
    assert other["error"] is None
    reason = "rows 0 and 2 both have the key 'x': give each row a different __key__"
    assert first["error"] == second["error"]
    assert first["error"].startswith(reason)
    assert first["kind"] == second["kind"] == OTHER


def test_a_string_that_is_not_utf8_is_one_rows(tmp_path: Path) -> None:
    offsets, data = np.array([0, 2, 4, 6], np.int32), b"ok\xff\xfeko"
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(data))
    path = write(tmp_path / "a.parquet", {"id": bad, "txt": bad, "caption": bad.dictionary_encode()})
    fact_rows = rows(path)
    assert [row["key"] for row in fact_rows[::2]] == ["ok", "\\xff\\xfe", "ko"]
    opened = shard(path)
    assert all(row["error"] is None for row in fact_rows)
    assert [read(opened, row) for row in fact_rows] == [b"ok", b"ok", b"\xff\xfe", b"\xff\xfe", b"ko", b"ko"]
    roles = pa.StructArray.from_arrays([bad, bad], ["role", "content"])
    chat = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), roles)
    errors = [row["error"] for row in rows(write(tmp_path / "b.parquet", {"messages": chat}))]
    assert errors == [None, "contains a string that is not valid UTF-8: invalid start byte", None]


def test_a_path_without_bytes_is_not_followed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", {"image": [{"bytes": None, "path": "/etc/passwd"}, {"bytes": png(1, 1), "path": ""}]}
    )
    bad, good = rows(path)
    assert bad["error"].startswith("contains a path, not bytes: '/etc/passwd'") and bad["kind"] == 1
    assert good["error"] is None
    with pytest.raises(FieldError, match="contains a path, not bytes"):
        shard(path).read(0, 0, PARQUET, "image")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"PAR1 and then nothing of the kind", "not a readable Parquet file: "),
        (b"PAR1" + bytes(100) + b"PAR1", "not a readable Parquet file: "),
    ],
)
def test_a_file_that_is_no_parquet_is_one_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    (row,) = rows(path)
    assert row["error"].startswith(message) and (row["sample"], row["key"], row["kind"]) == (0, "", OTHER)


def test_eight_threads_read_what_one_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    texts = ["x" * int(n) for n in rng.integers(0, 200, 500)]
    path = write(tmp_path / "a.parquet", {"text": texts, "other": texts[::-1]}, row_group_size=37)
    opened = shard(path)
    fact_rows = opened.facts().table.arrow().to_pylist()
    expected = [(texts if row["field"] == "text" else texts[::-1])[row["offset"]].encode() for row in fact_rows]
    order = rng.integers(0, len(fact_rows), 3_000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: read(opened, fact_rows[i]), order)) == [expected[i] for i in order]
    before = COLUMNS.cached_bytes
    opened.close()
    assert COLUMNS.cached_bytes < before
    with pytest.raises(ValueError, match="read after close"):
        read(opened, fact_rows[0])


def test_another_cell_than_was_indexed_is_an_error(tmp_path: Path) -> None:
    opened = shard(write(tmp_path / "a.parquet", {"text": ["abc"], "images": [[png(1, 1)]]}))
    for offset, size, field in ((0, 9, "text"), (5, 3, "text"), (0, 3, "absent"), (0, 3, "images.4"), (0, 3, "images")):
        with pytest.raises(FieldError, match="index the shard again"):
            opened.read(offset, size, PARQUET, field)


def test_parquet_of_others(fixtures_dir: Path) -> None:
    paths = sorted((fixtures_dir / "multimodal").rglob("*.parquet"))
    assert paths
    for path in paths:
        opened = shard(path)
        for row in opened.facts().table.arrow().to_pylist():
            assert row["error"] is None, (path, row)
            assert len(read(opened, row)) == row["size"]


def test_rows_of_one_id_are_samples_of_their_own(tmp_path: Path):
    path = write(tmp_path / "a.parquet", {"id": ["x", "x#2", "x", "x"], "text": ["a", "b", "c", "d"]})
    fact_rows = rows(path)
    assert [row["key"] for row in fact_rows] == ["x", "x#2", "x#2#2", "x#3"]
    assert [row["error"] for row in fact_rows] == [None] * 4


def test_a_page_that_does_not_fit_its_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["these letters are in the page", "others"]})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    for checksum in (False, True):
        pq.write_table(table, path, write_page_checksum=checksum, **options)
        assert build_index([str(path)], Recipe(), force=True).totals["bad"] == 0
        data = path.read_bytes()
        path.write_bytes(data.replace(b"letters", b"Letters", 1))
        index = build_index([str(path)], Recipe(), force=True)
        assert index.totals["bad"] == int(checksum)
    assert "CRC checksum verification failed" in index.failure(0).reason
