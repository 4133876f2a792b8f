"""Data sets of Hugging Face on disk: Arrow files, read by position."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hostile_arrow import Case, good_files, huge_batch, mutations, scanned, try_cases, written
from shard_factory import audio, png

from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.arrow import ArrowReader, ArrowShard, read_layout
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.shards.shard import FactsTable
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.paths import expand_paths
from orchdata.loaders.text.preprocessor import TextPreprocessor

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")


def photo(seed: int) -> bytes:
    return png(28 * (2 + seed % 4), 56, seed)


def clip(seed: int) -> bytes:
    return audio(0.5 + seed / 160, seed=seed)


def write_stream(path: Path, table: pa.Table, rows: int = 7, options: Any = None, *, is_file: bool = False) -> str:
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


def stored(index: Index, row: int, recipe: Recipe) -> StoredSample:
    return StoredSample(index, OpenShards(limits=recipe.limits, cache=CacheFolder()), row)


@pytest.mark.slow
def test_a_saved_data_set_is_read_without_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    count = 23
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "audio": datasets.Audio(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
        }
    )
    rows = {
        "image": [{"bytes": photo(i), "path": None} if i % 3 else None for i in range(count)],
        "audio": [{"bytes": clip(i), "path": None} if i % 4 == 0 else None for i in range(count)],
        "label": [i % 3 - 1 for i in range(count)],
        "text": [f"say {i} " * (i + 1) for i in range(count)],
    }
    table = pa.table({name: pa.array(column, features[name].pa_type) for name, column in rows.items()})
    # Not from_dict: it needs torchcodec, even for a clip that is already encoded.
    whole = datasets.Dataset(datasets.table.InMemoryTable(table), info=datasets.DatasetInfo(features=features))
    whole.select(range(1, count)).save_to_disk(tmp_path / "saved", num_shards=3)
    urls = expand_paths(str(tmp_path / "saved"))
    assert [Path(url).name for url in urls] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    recipe = Recipe(text=TextPreprocessor(fields=("label", "text")))
    index = build_index(urls, recipe)
    assert index.bad_rows().tolist() == [] and index.num_samples == count - 1
    assert build_index(urls, Recipe()).llm_tokens.sum() > index.llm_tokens.sum()
    for row in range(count - 1):
        number = row + 1
        sample = stored(index, row, recipe)
        payloads = {sample.members[at].field: bytes(data) for at, data in sample.read(recipe).items()}
        wanted: dict[str, bytes | None] = {
            "image": photo(number) if number % 3 else None,
            "audio": clip(number) if number % 4 == 0 else None,
            "label": [b"cat", b"dog"][number % 3 - 1] if number % 3 else None,
            "text": rows["text"][number].encode() if number % 3 == 0 else None,
        }
        assert {name: payloads.get(name) for name in wanted} == wanted
        assert len(sample.decode(recipe).parts) == sum(data is not None for data in wanted.values())


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({"_data_files": [{"filename": "../x.arrow"}]}, "does not list"),
        ({"_data_files": [{"filename": "\ud800.arrow"}]}, "does not list"),
        ({"_data_files": []}, "does not list"),
        ({"_data_files": 3}, "does not list"),
        ({"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}, "save the data"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_what_a_folder_says_of_itself_is_checked(tmp_path: Path, state: Any, wanted: str) -> None:
    (tmp_path / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(ValueError, match=wanted):
        expand_paths(str(tmp_path))


TYPES: dict[str, Callable[[random.Random], Any]] = {
    "string": lambda draw: "ä" * draw.randrange(9),
    "large_string": lambda draw: "b" * draw.randrange(9),
    "binary": lambda draw: draw.randbytes(draw.randrange(9)),
    "int16": lambda draw: draw.randrange(-9, 9),
    "double": lambda draw: draw.random(),
    "bool": lambda draw: draw.random() < 0.5,
    "fixed": lambda draw: draw.randbytes(3),
    "turns": lambda draw: [{"role": "user", "content": "x" * draw.randrange(5)} for _ in range(draw.randrange(4))],
    "lists": lambda draw: [[draw.randrange(9)] * draw.randrange(3) for _ in range(draw.randrange(3))],
    "pairs": lambda draw: [draw.randrange(9), draw.randrange(9)],
    "nothing": lambda draw: None,
}
ARROW = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "int16": pa.int16(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "fixed": pa.binary(3),
    "turns": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    "lists": pa.large_list(pa.list_(pa.int64())),
    "pairs": pa.list_(pa.int32(), 2),
    "nothing": pa.null(),
}


@pytest.mark.parametrize("nulls", [0.0, 0.4])
def test_rows_of_every_type_are_those_that_pyarrow_reads(tmp_path: Path, nulls: float) -> None:
    draw = random.Random(5)
    columns = {
        name: pa.array([None if draw.random() < nulls else make(draw) for _ in range(60)], ARROW[name])
        for name, make in TYPES.items()
    }
    table = pa.table(columns)
    file = LocalFile(write_stream(tmp_path / "a.arrow", table, rows=25))
    layout = read_layout(file)
    assert layout.schema.equals(table.schema) and [batch.num_rows for batch in layout.batches] == [25, 25, 10]
    reader = ArrowReader(file, Limits(column_bytes=1 << 20))
    for number, batch in enumerate(layout.batches):
        for name in table.column_names:
            wanted = table.column(name).slice(25 * number, batch.num_rows).to_pylist()
            for start, length in ((0, batch.num_rows), (3, 1), (7, 2), (batch.num_rows - 1, 1), (5, 0)):
                taken = reader._take(number, name, start, length)
                taken.validate(full=True)
                assert taken.to_pylist() == wanted[start : start + length], name
    with pytest.raises(ValueError, match="values 9 to 11 of 10"):
        reader._take(2, "string", 9, 2)


def cells(url: str) -> list[dict[str, bytes]]:
    recipe = Recipe()
    index = build_index([url], recipe)
    assert index.bad_rows().tolist() == []
    found = []
    for row in range(index.num_samples):
        sample = stored(index, row, recipe)
        found.append({sample.members[at].field: bytes(data) for at, data in sample.read(recipe).items()})
    return found


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("kind", ["plain", "encoded", "views", "lists of views"])
def test_what_is_read_whole_has_the_cells_of_plain_columns(
    tmp_path: Path, kind: str, compression: str | None, is_file: bool
) -> None:
    texts = pa.array([None if row % 5 == 4 else f"text {row % 7}" for row in range(30)])
    images = pa.array([photo(row % 4) for row in range(30)])
    table = pa.table({"text": texts, "image": images, "id": [str(row) for row in range(30)]})
    if kind == "lists of views":
        table = table.set_column(1, "image", pa.array([[data.as_py()] for data in images]))
    wanted = cells(write_stream(tmp_path / "plain.arrow", table))
    if kind == "encoded":
        table = pa.table({name: table[name].combine_chunks().dictionary_encode() for name in table.column_names})
    elif kind != "plain":
        image = pa.list_view(pa.binary_view()) if kind == "lists of views" else pa.binary_view()
        values = [
            pa.array(column.to_pylist(), type_)
            for column, type_ in zip(table.columns, (pa.string_view(), image, pa.string_view()), strict=True)
        ]
        table = pa.table(values, table.column_names)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    url = write_stream(tmp_path / "a.arrow", table, options=options, is_file=is_file)
    assert cells(url) == wanted and {"text", "id"} & wanted[0].keys()


def test_a_stream_may_replace_and_extend_its_dictionaries(tmp_path: Path) -> None:
    schema = pa.schema({"text": pa.dictionary(pa.int32(), pa.string())})
    batches = [pa.array(each).dictionary_encode() for each in (["a", "b"], ["a", "b", "c"], ["d", "b"])]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    path = str(tmp_path / "a.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(pa.record_batch([batch], schema=schema))
    assert [cell["text"] for cell in cells(path)] == [b"a", b"b", b"a", b"b", b"c", b"d", b"b"]


def test_a_row_costs_its_own_bytes_alone(tmp_path: Path) -> None:
    images = [photo(i) * 20 for i in range(90)]
    url = write_stream(tmp_path / "a.arrow", pa.table({"image": images, "text": ["a"] * 90}), rows=40)
    index = build_index([url], Recipe())
    shards = OpenShards(limits=Limits(), cache=CacheFolder())
    StoredSample(index, shards, 0).read(Recipe())
    before = shards.reads.storage.value
    assert bytes(StoredSample(index, shards, 17).read(Recipe())[0]) == images[17]
    assert shards.reads.storage.value - before < len(images[17]) + 500


def test_chats_and_lists_of_images_are_read_as_in_parquet(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image> or <image>?"}, {"role": "assistant", "content": "the first"}]
    images = [{"bytes": photo(0), "path": "a.png"}, {"bytes": photo(1), "path": None}]
    table = pa.table({"id": ["one", "two"], "messages": [turns] * 2, "images": [images, images[::-1]]})
    index = build_index([write_stream(tmp_path / "a.arrow", table)], Recipe())
    assert index.bad_rows().tolist() == [] and [index.key(row) for row in range(2)] == ["one", "two"]
    assert index.part_tokens.tolist() == [*index.part_tokens[:2].tolist(), *index.part_tokens[:2].tolist()[::-1]]
    assert len(stored(index, 0, Recipe()).decode(Recipe()).parts) == 6


# Damaged and hostile Arrow files: each is refused with a reason, and none ends a process or takes memory at will.


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


@pytest.mark.slow
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


@pytest.mark.slow
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
