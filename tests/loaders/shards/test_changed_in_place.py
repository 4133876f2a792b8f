"""A shard that is changed in place while it is open: the run ends, and its samples do not fail one by one."""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hostile import tar_of
from hostile_shards import sparse_1_0

import orchdata as od
from orchdata.loaders.errors import StaleIndexError
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.cache import CacheFolder

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

SAMPLES = 12
TEXTS = [f"text {number} " * (20 + number) for number in range(SAMPLES)]
TURNS = [[{"role": "user", "content": text}] for text in TEXTS]
TABLE = pa.table({"text": TEXTS, "messages": TURNS})


class Container(NamedTuple):
    """How a shard is written."""

    name: str  # of its file
    write: Callable[[Path], object]  # it
    is_copied: bool = False  # whether it is read from a copy in the cache folder


def tar() -> bytes:
    members: dict[str, bytes] = {}
    for number, text in enumerate(TEXTS):
        members |= {f"{number}.txt": text.encode(), f"{number}.json": json.dumps(TURNS[number]).encode()}
    return tar_of(members)


def sparse_tar() -> bytes:
    pieces = b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512
    return b"".join(sparse_1_0(f"{number}.txt", 700, pieces) for number in range(SAMPLES)) + bytes(1024)


def gzipped_members(path: Path) -> None:
    path.write_bytes(tar_of({f"{at}.txt.gz": gzip.compress(text.encode()) for at, text in enumerate(TEXTS)}))


def arrow(path: Path, new: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> None:
    with new(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=5)


def media_in_folder(path: Path) -> None:
    records = []
    for number, text in enumerate(TEXTS):
        (path.parent / f"{number}.png").write_bytes(b"\x89PNG" + bytes(number))
        records.append({"image": f"{number}.png", "text": text})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def table_of_media(path: Path) -> None:
    for number in range(SAMPLES):
        (path.parent / f"{number}.png").write_bytes(b"\x89PNG" + bytes(number))
    rows = "".join(f"{number}.png,{text}\n" for number, text in enumerate(TEXTS))
    path.write_text("file_name,text\n" + rows)


CONTAINERS = {
    "tar": Container("a.tar", lambda path: path.write_bytes(tar())),
    "sparse tar": Container("a.tar", lambda path: path.write_bytes(sparse_tar())),
    "gzipped members": Container("a.tar", gzipped_members),
    "tar.gz": Container("a.tar.gz", lambda path: path.write_bytes(gzip.compress(tar())), True),
    "tar.zst": Container("a.tar.zst", lambda path: path.write_bytes(zstandard.compress(tar())), True),
    "parquet": Container("a.parquet", lambda path: pq.write_table(TABLE, path, row_group_size=5)),
    "arrow stream": Container("a.arrow", lambda path: arrow(path, pa.ipc.new_stream)),
    "arrow file": Container("a.arrow", lambda path: arrow(path, pa.ipc.new_file)),
    "lines": Container(
        "a.jsonl", lambda path: path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    ),
    "array": Container("a.json", lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS]))),
    "csv": Container("a.csv", lambda path: path.write_text("text\n" + "\n".join(TEXTS) + "\n")),
    "media in its folder": Container("metadata.jsonl", media_in_folder),
    "table of media": Container("metadata.csv", table_of_media),
}

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(0).randbytes(len(data)),
    "cut": lambda data: data[: len(data) // 3],
    "first half": lambda data: bytes(len(data) // 2) + data[len(data) // 2 :],
    "shifted": lambda data: b"   " + data[:-3],
}


class Written(NamedTuple):
    """A container on disk, measured."""

    path: Path
    data: bytes  # of its file
    members: list[tuple[int, int, int, str]]  # all of them

    def opened(self, cache: Path) -> Shard:
        return open_shard(str(self.path), limits=Limits(), cache=CacheFolder(cache))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Return containers by name, in their first version; each is measured once."""

    @functools.cache
    def measured(kind: str) -> Written:
        path = tmp_path_factory.mktemp("data") / CONTAINERS[kind].name
        CONTAINERS[kind].write(path)
        with closing(open_shard(str(path), limits=Limits(), cache=CacheFolder(path.parent / "cache"))) as shard:
            table = shard.facts().table
        members = list(zip(table.offset, table.size, table.encoding, table.field, strict=True))
        assert len(members) >= SAMPLES
        return Written(path, path.read_bytes(), members)

    def again(kind: str) -> Written:
        case = measured(kind)
        case.path.write_bytes(case.data)
        return case

    return again


def change(path: Path, damage: str) -> None:
    """Overwrite it in place, with another modification time."""
    data = DAMAGES[damage](path.read_bytes())
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))
    os.utime(path, ns=(10**18, 10**18))


def ways(shard: Shard, members: list[tuple[int, int, int, str]]) -> list[Callable[[], object]]:
    return [
        *(lambda member=member: bytes(shard.read(*member)) for member in members),
        *(lambda member=member: list(map(bytes, shard.read_many([member]))) for member in members),
        lambda: list(map(bytes, shard.read_many(members))),
    ]


@pytest.mark.parametrize("first_read", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_read_of_a_changed_shard_is_right_or_stale(
    tmp_path: Path, written: Callable[[str], Written], kind: str, damage: str, first_read: bool
) -> None:
    shard_file = written(kind)
    members = shard_file.members
    with closing(shard_file.opened(tmp_path)) as shard:
        wanted = [way() for way in ways(shard, members)]
    with closing(shard_file.opened(tmp_path)) as shard:
        if first_read:
            shard.read(*members[0])
        copies = [path for path in tmp_path.rglob("*") if path.stat().st_size > 5000]
        change(copies[0] if CONTAINERS[kind].is_copied else shard_file.path, damage)
        stale = 0
        for read, content in zip(ways(shard, members), wanted, strict=True):
            try:
                assert read() == content
            except StaleIndexError as error:
                assert "was changed while it was open" in str(error)
                stale += 1
    # Columns that are already decoded in memory stay valid: in Parquet, a column of a row group.
    assert stale >= len(members) if kind == "parquet" else stale == len(wanted)


@pytest.mark.parametrize("kind", ["tar.gz", "tar.zst"])
def test_a_copy_outlives_its_source(tmp_path: Path, written: Callable[[str], Written], kind: str) -> None:
    shard_file = written(kind)
    with closing(shard_file.opened(tmp_path)) as shard:
        wanted = [way() for way in ways(shard, shard_file.members)]
        change(shard_file.path, "noise")
        assert [way() for way in ways(shard, shard_file.members)] == wanted


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow stream", "arrow file", "lines"])
def test_a_run_over_a_changed_shard_ends_under_skip(written: Callable[[str], Written], kind: str) -> None:
    path = written(kind).path
    recipe = od.Recipe(text=od.TextPreprocessor(fields=("text", "txt")))
    batches = iter(od.DataLoader(od.ShardDataset([path], recipe), batch_size=2, on_error="skip", num_threads=0))
    next(batches)
    change(path, "noise")
    with pytest.raises(StaleIndexError, match="was changed while it was open"):
        list(batches)
