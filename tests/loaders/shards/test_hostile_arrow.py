"""Damaged and hostile Arrow files: each is refused with a reason, and none ends a process or takes memory at will.

What may end a process is tried in a child, so that it ends the child alone.
"""

from __future__ import annotations

import itertools
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hostile_arrow import Case, good_files, huge_batch, mutations, scanned, try_cases, written

from orchdata.loaders.errors import FieldError
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.arrow import ArrowShard
from orchdata.loaders.shards.shard import FactsTable
from orchdata.loaders.storage.local import LocalFile


def opened(folder: Path, data: bytes, limits: Limits | None = None) -> ArrowShard:
    path = folder / "a.arrow"
    path.write_bytes(data)
    return ArrowShard(str(path), LocalFile(path), limits=limits or Limits())


def facts(folder: Path, data: bytes, limits: Limits | None = None) -> FactsTable:
    path = folder / "a.arrow"
    path.write_bytes(data)
    return scanned(path, limits or Limits())


def chats(values: list[Any], **fields: pa.DataType) -> pa.Table:
    turn = pa.struct({"role": pa.string(), "content": pa.string(), **fields})
    return pa.table({"messages": pa.array(values, pa.list_(turn))})


def overflowing_offsets() -> bytes:
    """Offsets that seem to ascend if their differences overflow."""
    data = bytearray(written(pa.table({"text": pa.array(["a", "bc", "d"], pa.large_string())})))
    struct.pack_into("<qqqq", data, data.index(struct.pack("<qqqq", 0, 1, 3, 4)), 0, 2**63 - 1, -2, 4)
    return bytes(data)


HAND_MADE = {
    "68719476736 rows, above Limits.shard_rows": huge_batch(1 << 36),
    "batch 0, at byte 120: Buffer #0 too small in array of type": huge_batch(1 << 16),
    "offsets that go backwards": overflowing_offsets(),
}


def test_what_a_hostile_hand_makes_is_refused_with_the_reason(tmp_path: Path) -> None:
    cases = [Case("media", reason, data) for reason, data in HAND_MADE.items()]
    assert try_cases(tmp_path / "tried", cases) == ""
    for wanted, data in HAND_MADE.items():
        (reason,) = facts(tmp_path, data).errors.values()
        assert wanted in reason


@pytest.mark.parametrize("schema", ["zstd", "lz4", "encoded zstd"])
def test_what_compressed_buffers_become_is_compared_with_the_limits_first(tmp_path: Path, schema: str) -> None:
    table = pa.table({"text": ["a" * 1_000_000] * 3, "kind": ["b" * 50_000] * 3})
    if schema == "encoded zstd":
        table = table.set_column(1, "kind", table["kind"].combine_chunks().dictionary_encode())
    data = written(table, options=pa.ipc.IpcWriteOptions(compression=schema.split()[-1]))
    assert len(data) < 50_000 and facts(tmp_path, data).errors == {}
    taken = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    (reason,) = facts(tmp_path, data, Limits(column_bytes=1_000_000)).errors.values()
    assert "its buffers take" in reason and "above Limits.column_bytes=1000000" in reason
    assert pa.default_memory_pool().max_memory() == peak and pa.total_allocated_bytes() <= taken


def test_damaged_files_end_no_process(tmp_path: Path) -> None:
    each = (itertools.islice(mutations(schema, data, 0), 15) for schema, data in good_files().items())
    cases = list(itertools.chain(*each))
    assert len(cases) == 195
    assert try_cases(tmp_path, cases) == ""


def test_a_child_that_ends_is_reported(tmp_path: Path) -> None:
    report = try_cases(tmp_path, [Case("no such schema", "fine", b""), Case("media", "ends", b"")], end_at=1)
    assert report.startswith("media: ends (1.arrow): SIGABRT")


@pytest.mark.parametrize("schema", good_files())
def test_good_files_of_every_schema_have_no_failure(tmp_path: Path, schema: str) -> None:
    table = facts(tmp_path, good_files()[schema])
    assert table.errors == {} and len(set(table.sample)) == 6


@pytest.mark.parametrize(
    ("values", "field", "wanted"),
    [
        ([None] * 70_000, pa.list_(pa.null()), "a list of 70000 items, above Limits.sample_parts=65536"),
        ([[None] * 300] * 300, pa.list_(pa.list_(pa.null(), 300)), "a list of 90000 items, above"),
        ([{}] * 60_000, pa.list_(pa.struct({str(n): pa.null() for n in range(300)})), "values, more than Limits.text"),
    ],
)
def test_values_that_take_no_bytes_are_counted(tmp_path: Path, values: Any, field: pa.DataType, wanted: str) -> None:
    """While it is indexed, and in a file that was valid when it was indexed."""
    turn = {"role": "user", "content": "a"}
    good = facts(tmp_path, written(chats([[turn | {"held": []}]], held=field)))
    assert good.errors == {}
    bad = written(chats([[turn | {"held": values}]], held=field))
    (reason,) = facts(tmp_path, bad).errors.values()
    assert wanted in reason
    with closing(opened(tmp_path, bad)) as shard, pytest.raises(FieldError, match="above|more than") as raised:
        shard.read(good.offset[0], good.size[0], good.encoding[0], good.field[0])
    assert wanted in raised.value.reason


def test_a_file_without_its_end_is_cut(tmp_path: Path) -> None:
    data = good_files()["media file"]
    whole = facts(tmp_path, data)
    assert whole.errors == {}
    for size in (len(data) - 1, len(data) - 200, len(data) // 2):
        (reason,) = facts(tmp_path, data[:size]).errors.values()
        assert reason == "cut: it begins with ARROW1, as an Arrow file does, and does not end with it"
