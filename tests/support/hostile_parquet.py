"""Parquet files that decode to more than they hold, count what is not there, or are damaged."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostile import EITHER, FAILS, HostileShard
from shard_factory import jpeg


def write_parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(dict(columns)), path, **options)


def repeated(path: Path, kind: str, value: bytes, rows: int) -> None:
    """One value `rows` times, kept once: a dictionary page, and indices in a run."""
    values = pa.array([value], pa.binary())
    if kind == "text":
        values = values.cast(pa.string())
    indices = pa.array(np.zeros(rows, np.int32))
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False}
    column = pa.DictionaryArray.from_arrays(indices, values)
    write_parquet(path, {kind: column}, **options, dictionary_pagesize_limit=1 << 30)


def large_pages(path: Path, kind: str, value_bytes: int, groups: int, rows: int = 1) -> None:
    """Zeros, deflated: each row group of `rows` values."""
    type_ = pa.large_string() if kind == "text" else pa.large_binary()
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * value_bytes)
    data = pa.py_buffer(np.zeros(rows * value_bytes, np.uint8))
    table = pa.table({kind: pa.Array.from_buffers(type_, rows, [None, offsets, data])})
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False
    ) as writer:
        for _ in range(groups):
            writer.write_table(table)


def false_footer(path: Path, old: int, new: int, *, inside: str) -> None:
    """Write another count of rows into the footer: of the file or its row group. One byte each, as zigzag numbers."""
    write_parquet(path, {"text": [f"row {n}" for n in range(old)]}, compression="none")
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [at for at in range(footer, len(data) - 8) if data[at] == 2 * old and data[at - 1] == 0x16]
    for at in places if inside == "everywhere" else places[:1] if inside == "file" else places[1:]:
        data[at] = 2 * new
    assert places
    path.write_bytes(data)


def nested(depth: int) -> pa.Array:
    array = pa.array(["x"])
    for _ in range(depth):
        array = pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), array)
    return array


def parquet_shards() -> Iterator[HostileShard]:
    def one(name: str, write: Callable[[Path], None], fate: str = EITHER, *, heavy: bool = False) -> HostileShard:
        return HostileShard(name, ".parquet", fate, write, heavy=heavy)

    for kind in ("text", "image"):
        yield one(
            f"one {kind} of 100 KB 50,000 times",
            lambda path, kind=kind: repeated(path, kind, bytes(100_000), 50_000),
            heavy=True,
        )
        yield one(
            f"one {kind} of 100 MB 50 times", lambda path, kind=kind: repeated(path, kind, bytes(10**8), 50), heavy=True
        )
        yield one(
            f"one {kind} of a byte 20,000,000 times",
            lambda path, kind=kind: repeated(path, kind, b"x", 20_000_000),
            heavy=True,
        )
        yield one(
            f"{kind} pages of 800 MB", lambda path, kind=kind: large_pages(path, kind, 4 * 10**8, 1, 2), heavy=True
        )
        yield one(f"10 {kind} groups of 100 MB", lambda path, kind=kind: large_pages(path, kind, 10**8, 10), heavy=True)
    nulls = lambda rows: lambda path: write_parquet(path, {"text": pa.nulls(rows, pa.string())}, row_group_size=1 << 26)
    yield one("20,000 null rows", nulls(20_000))
    yield one("30 million null rows", nulls(30 * 10**6), heavy=True)
    wide = lambda path: write_parquet(
        path,
        {"images": pa.ListArray.from_arrays(pa.array([0, 2_000_000], pa.int32()), pa.nulls(2_000_000, pa.binary()))},
    )
    yield one("two million images in one cell", wide, heavy=True)
    turns = [[{"role": "user", "content": "a"}] * 500_000]
    yield one("500,000 turns in one cell", lambda path: write_parquet(path, {"messages": pa.array(turns)}), heavy=True)
    for inside in ("file", "group", "everywhere"):
        yield one(
            f"a footer that counts more rows: {inside}",
            lambda path, inside=inside: false_footer(path, 5, 60, inside=inside),
        )
        yield one(
            f"a footer that counts fewer rows: {inside}",
            lambda path, inside=inside: false_footer(path, 60, 5, inside=inside),
        )
    yield one("5,000 columns", lambda path: write_parquet(path, {f"text{n}": ["x"] for n in range(5000)}), heavy=True)
    yield one("a list in a list, 200 deep", lambda path: write_parquet(path, {"text": nested(200)}))
    yield one(
        "a column named with 5,000 digits", lambda path: write_parquet(path, {"1" * 5000 + ".jpg": [jpeg(40, 40)]})
    )
    yield one("a column named with nothing", lambda path: write_parquet(path, {"": ["x"], "text": ["y"]}))
    twice = lambda path: pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    yield one("two columns of one name", twice)
    yield one(
        "a hundred thousand equal keys",
        lambda path: write_parquet(path, {"__key__": ["k"] * 100_000, "text": ["t"] * 100_000}),
        heavy=True,
    )
    keys = {"numbers": [1, 1, 2], "lists": [[1], [2], [3]], "structs": [{"a": 1}] * 3, "floats": [float("nan")] * 3}
    for name, values in keys.items():
        yield one(
            f"keys that are {name}",
            lambda path, values=values: write_parquet(path, {"__key__": values, "text": ["a"] * 3}),
        )
    path_struct = pa.array([{"bytes": None, "path": "/etc/passwd"}, {"bytes": b"x", "path": "a\0b.png"}])
    yield one("paths in place of bytes", lambda path: write_parquet(path, {"image": path_struct}))
    latin = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"\xe9\xff\xfe")]
    )
    yield one("strings that are not UTF-8", lambda path: write_parquet(path, {"__key__": latin, "text": latin}))
    meta = lambda text: (
        lambda path: pq.write_table(
            pa.table({"image": [jpeg(40, 40)]}).replace_schema_metadata({"huggingface": text}), path
        )
    )
    yield one("features that nest 100,000 deep", meta(b"[" * 100_000))
    yield one("features of another shape", meta(b'{"info": {"features": {"image": [[["Image"]]]}}}'))
    yield one("features that are a list", meta(b'{"info": {"features": []}}'))
    yield one("features that are null", meta(b'{"info": null}'))
    yield one(
        "a row group without columns", lambda path: pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    )
    yield one("no columns", lambda path: pq.write_table(pa.table({}), path))
    yield one("a footer of 2 GiB", lambda path: path.write_bytes(b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"), FAILS)
    yield one("a footer of nothing", lambda path: path.write_bytes(b"PAR1\0\0\0\0PAR1"), FAILS)
    yield one("an encrypted footer", lambda path: path.write_bytes(b"PARE" + bytes(100) + b"\x10\0\0\0PARE"), FAILS)
    for part in range(1, 8):
        yield one(f"cut to {part} eighths", lambda path, part=part: _cut(path, part), FAILS)
    for seed in range(40):
        yield one(f"flipped bits, seed {seed}", lambda path, seed=seed: _flip(path, seed))


def _mixed(path: Path, **options: Any) -> bytes:
    rows = {"text": [f"row {n}" for n in range(50)], "image": [jpeg(30, 30, n % 3) for n in range(50)]}
    write_parquet(path, rows, row_group_size=20, **options)
    return path.read_bytes()


def _cut(path: Path, eighths: int) -> None:
    data = _mixed(path)
    path.write_bytes(data[: len(data) * eighths // 8])


def _flip(path: Path, seed: int) -> None:
    """Three bits of the footer or of a page header, which are what is parsed."""
    random = np.random.default_rng(seed)
    data = bytearray(_mixed(path, compression=("none", "snappy", "zstd", "gzip")[seed % 4]))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = (footer, len(data)) if seed % 2 else (4, 200)
    for at in random.integers(*places, size=3):
        data[int(at)] ^= 1 << int(random.integers(8))
    path.write_bytes(data)
