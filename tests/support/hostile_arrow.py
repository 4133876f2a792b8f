"""Damaged Arrow files: good files of many schemas, and what a hostile hand makes of each -> tried in a child process.

    good_files() --mutations(data)--> cases --try_cases()--> a limited child --> how it ended, and what was wrong

Each case is tried twice: it is indexed, and it is read with the facts of the good file, as a training process does
whose file was damaged afterwards.
"""

from __future__ import annotations

import datetime
import io
import itertools
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from PIL import Image

ROWS = 6
MEMORY_BYTES = 192 << 20
"""That a child may take beyond what it had before its first case: the limits that it reads with are far below."""

_WORDS = (-1, 0, 1, 7, 8, 1 << 16, 1 << 31, 1 << 36, (1 << 61) + 1, 1 << 62, (1 << 63) - 1, -(1 << 63))
_HALVES = (-1, 0, 1, 8, 1 << 16, (1 << 31) - 1, -(1 << 31))


class Case(NamedTuple):
    """One damaged file: what was done to which good one."""

    schema: str
    name: str
    data: bytes


def good_files() -> dict[str, bytes]:
    """Small files of many schemas, as streams and as files, always the same."""
    texts = [None if number == 2 else f"text {number} " * number for number in range(ROWS)]
    turns = [[{"role": "user", "content": "x" * turn} for turn in range(number)] for number in range(ROWS)]
    structs = [{"bytes": data, "path": None if number % 2 else "a.png"} for number, data in enumerate(_payloads())]
    view_lists = pa.array([_payloads()[:2]] * ROWS, pa.list_view(pa.binary_view()))
    features = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    labels = pa.table({"label": pa.array([0, 1, -1] * 2), "text": texts})
    tables = {
        "media": pa.table({"image": structs, "text": texts, "messages": turns}),
        "plain": pa.table({"image": pa.array(_payloads()), "text": pa.array(texts, pa.large_string())}),
        "listed": pa.table({"images": pa.array([_payloads()[:2]] * ROWS), "captions": [["a", None], [], None] * 2}),
        "nested": pa.table({"messages": _deep()}),
        "weightless": pa.table({"messages": _weightless()}),
        "ignored": pa.table({"text": texts, **_unread()}),
        "encoded": pa.table({"text": texts, "kind": pa.array(texts).dictionary_encode()}),
        "views": pa.table({"text": pa.array(texts, pa.string_view()), "images": view_lists}),
        "labels": labels.replace_schema_metadata({"huggingface": json.dumps(features)}),
    }
    files = {name: written(table) for name, table in tables.items()}
    files |= {f"{name} file": written(tables[name], file=True) for name in ("media", "ignored")}
    for codec in ("zstd", "lz4"):
        files[codec] = written(tables["media"], options=pa.ipc.IpcWriteOptions(compression=codec))
    return files


def mutations(schema: str, data: bytes, seed: int) -> Iterator[Case]:
    """Without an end: by turns a number of a description or buffer set to an edge, with -1 after it where it may be the
    length of a node, and random damage.
    """
    draw = random.Random(f"{schema} {seed}")
    for number in itertools.count():
        changed = bytearray(data)
        if number % 2 == 0:
            (form, edges), *_ = draw.choices((("<q", _WORDS), ("<i", _HALVES)), (2, 1))
            size = struct.calcsize(form)
            at, value = draw.randrange(len(data) // size - 1) * size, draw.choice(edges)
            struct.pack_into(form, changed, at, value)
            if form == "<q" and value > 0 and draw.randrange(2):
                struct.pack_into(form, changed, at + size, -1)
            name = f"{form} at {at} is {value}"
        elif number % 8 == 1:
            name = f"cut at {(at := draw.randrange(len(data)))}"
            del changed[at:]
        else:
            name = f"damage {number}"
            for _ in range(draw.choice((1, 1, 2, 3, 8))):
                at = draw.randrange(len(data))
                changed[at] = draw.choice((0, 1, 127, 128, 255, changed[at] ^ 1 << draw.randrange(8)))
        yield Case(schema, name, bytes(changed))


def huge_batch(rows: int) -> bytes:
    """336 bytes: a batch of text that claims so many rows, and not to know how many of them are null."""
    data = bytearray(written(pa.table({"text": ["abc", "d"]})))
    start, body = [(at, stop) for at, stop, _ in _messages(bytes(data))][1]
    for at in range(start, body - 15, 8):
        if struct.unpack_from("<qq", data, at) == (2, 0):  # a field node
            struct.pack_into("<qq", data, at, rows, -1)
        elif struct.unpack_from("<q", data, at) == (2,):  # the batch
            struct.pack_into("<q", data, at, rows)
    return bytes(data)


def written(table: pa.Table, *, file: bool = False, options: Any = None) -> bytes:
    """A table as a stream or file, in two batches."""
    sink = io.BytesIO()
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=ROWS // 2)
    return sink.getvalue()


def try_cases(folder: Path, cases: Sequence[Case], *, end_at: int = -1) -> str:
    """What was wrong with the first case that went wrong; nothing where none did."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases):
        (folder / f"{number}.arrow").write_bytes(case.data)
    listed = folder / "cases.json"
    listed.write_text(json.dumps([[case.schema, case.name] for case in cases]))
    ended = subprocess.run(
        [sys.executable, __file__, str(folder), str(end_at)], capture_output=True, text=True, timeout=600, check=False
    )
    if ended.returncode == 0:
        return ""
    end = f"exit {ended.returncode}" if ended.returncode > 0 else signal.Signals(-ended.returncode).name
    *_, at = ended.stdout.strip().splitlines() or ["before the first"]
    return f"{at}: {end}: {ended.stderr[-1500:]}"


def _payloads() -> list[bytes]:
    """Small images."""
    payloads = []
    for number in range(ROWS):
        stream = io.BytesIO()
        Image.new("L", (4 + number, 3), number).save(stream, "PNG")
        payloads.append(stream.getvalue())
    return payloads


def _deep() -> pa.Array:
    """A chat whose turns hold values of every type that is read."""
    now = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    fields: dict[str, tuple[pa.DataType, Any]] = {
        "role": (pa.string(), "user"),
        "content": (pa.large_string(), "look"),
        "flags": (pa.list_(pa.bool_()), [True, False, None]),
        "pairs": (pa.list_(pa.int16(), 2), [1, 2]),
        "raw": (pa.binary(3), b"abc"),
        "many": (pa.large_list(pa.list_(pa.int64())), [[1], [], [2, 3]]),
        "price": (pa.decimal128(20, 3), None),
        "wide": (pa.decimal256(50, 3), None),
        "day": (pa.date32(), now.date()),
        "when": (pa.timestamp("us", "UTC"), now),
        "whole": (pa.timestamp("s"), now),
        "hour": (pa.time64("us"), now.time()),
        "took": (pa.duration("us"), datetime.timedelta(seconds=3)),
        "half": (pa.float32(), 0.5),
        "inner": (pa.struct({"a": pa.string(), "b": pa.struct({"c": pa.uint8()})}), {"a": "b", "b": {"c": 1}}),
    }
    turn = pa.struct({name: type_ for name, (type_, _) in fields.items()})
    value = {name: value for name, (_, value) in fields.items()}
    return pa.array([[value] * number for number in range(ROWS)], pa.list_(turn))


def _weightless() -> pa.Array:
    """A chat with values that take no bytes, so that nothing in the file says how many there may be."""
    fields = {
        "role": pa.string(),
        "content": pa.string(),
        "nothing": pa.null(),
        "nothings": pa.list_(pa.null()),
        "bare": pa.list_(pa.struct([])),
        "none of": pa.list_(pa.list_(pa.null(), 3)),
    }
    value = {"role": "user", "content": "a", "nothings": [None, None], "bare": [{}, {}]}
    return pa.array([[value] * number for number in range(ROWS)], pa.list_(pa.struct(fields)))


def _unread() -> dict[str, pa.Array]:
    """Columns that are left out, of every type that is not read."""
    numbers = pa.array(range(ROWS), pa.int32())
    codes = pa.array([0, 1] * 3, pa.int8())
    dense = pa.UnionArray.from_dense(codes, pa.array([0, 0, 1, 1, 2, 2], pa.int32()), [numbers, numbers])
    sparse = pa.UnionArray.from_sparse(codes, [numbers, numbers])
    return {
        "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int32())),
        "dense": dense,
        "sparse": sparse,
        "views": pa.array([{"n": "long enough for a buffer of its own"}] * ROWS, pa.struct({"n": pa.string_view()})),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([3, ROWS], pa.int32()), pa.array([1.5, None])),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), (2,)), pa.array([[1, 2]] * ROWS, pa.list_(pa.int8(), 2))
        ),
        "n": numbers,
        "listed view": pa.array([[1, 2]] * ROWS, pa.list_view(pa.int32())),
    }


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(start of the description, its end, end of the body) of each message of a good file."""
    at = 8 if data.startswith(b"ARROW1") else 0
    while (length := struct.unpack_from("<i", data, at + 4)[0]) > 0:
        stream = pa.BufferReader(data[at:])
        pa.ipc.read_message(stream)
        yield at + 8, at + 8 + length, at + stream.tell()
        at += stream.tell()


def scanned(path: Path, limits: Any) -> Any:
    """The facts of a file, read as a child of a build reads them, in this process."""
    from orchdata.loaders.shards.arrow import ArrowReader
    from orchdata.loaders.shards.children import scan
    from orchdata.loaders.shards.shard import shard_failure
    from orchdata.loaders.storage.local import LocalFile

    try:
        return scan(ArrowReader(LocalFile(path), limits), limits)[0]
    except Exception as error:
        return shard_failure(str(error))


def main(folder: Path, end_at: int) -> None:
    """The child: try each case, and say which it is before it is tried. Ends at the first that goes wrong."""
    from orchdata.loaders.limits import Limits
    from orchdata.loaders.shards.arrow import ArrowShard
    from orchdata.loaders.storage.local import LocalFile

    limits = Limits(column_bytes=1 << 22, member_bytes=1 << 22, text_bytes=1 << 18, sample_parts=1 << 12)

    good: dict[str, list[tuple[int, int, int, str]]] = {}
    for name, data in good_files().items():
        path = folder / "good.arrow"
        path.write_bytes(data)
        table = scanned(path, limits)
        good[name] = [
            (int(table.offset[row]), int(table.size[row]), int(table.encoding[row]), table.field[row])
            for row in range(len(table))
            if row not in table.errors
        ]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, (schema, name) in enumerate(json.loads((folder / "cases.json").read_text())):
        print(f"{schema}: {name} ({number}.arrow)", flush=True)
        if number == end_at:
            os.abort()
        path = folder / f"{number}.arrow"
        if not len(scanned(path, limits)):
            sys.exit("no facts, and no failure")
        with closing(ArrowShard(str(path), LocalFile(path), limits=limits)) as shard:
            _read(shard, good.get(schema, ()))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - held
        if grown > MEMORY_BYTES:
            sys.exit(f"takes {grown >> 20} MiB")


def _read(shard: Any, members: Sequence[tuple[int, int, int, str]]) -> None:
    from orchdata.loaders.errors import FieldError, ShardError

    for member in members:
        try:
            data = shard.read(*member)
        except (FieldError, ShardError) as error:
            if not error.args[1]:
                sys.exit("refused without a reason")
        else:
            if len(data) != member[1]:
                sys.exit(f"{len(data)} bytes of {member}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
