"""Fields that a recipe keeps go with their sample, in batches and to a collate_fn, and change nothing else."""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from own_modalities import cloud
from own_samples import EXPECTED, NUM_SAMPLES, OWN, RECIPE, SAMPLES, delivered, differ, loader
from shard_factory import RECIPE as PLAIN
from shard_factory import SKIP_ANY, jpeg, write_shard

import orchdata as od
from orchdata.engines.processes.message import plain, revive
from orchdata.ranks.wire import describe, read

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("mixed") / "mixed.tar", SAMPLES)


def fields_of(path: str | Path, recipe: od.Recipe) -> dict[str, Mapping[str, Any]]:
    dataset = od.ShardDataset(str(path), recipe=recipe)
    samples = [sample for batch in od.DataLoader(dataset, batch_size=4, collate_fn=list) for sample in batch]
    return {sample.key: sample.fields for sample in samples}


def test_keeping_changes_nothing_else(shard: str) -> None:
    keeping = od.Recipe(image=PLAIN.image, audio=PLAIN.audio, **OWN, keep=("json", "track", "npy"))
    received = delivered([list(loader(shard, recipe=keeping, balance=od.Balance(assignment="per_phase")))])
    assert differ(received, EXPECTED, mrope=False) == []
    plain, kept = (od.ShardDataset(shard, recipe=recipe).index() for recipe in (RECIPE, keeping))
    assert plain.totals["modalities"] == kept.totals["modalities"] and plain.fingerprint != kept.fingerprint
    parts = [sample.parts for batch in loader(shard, recipe=keeping, collate_fn=list) for sample in batch]
    assert len(parts) == NUM_SAMPLES


def batches_of(path: str | Path, keep: tuple[str, ...], **options: Any) -> list[od.Batch]:
    dataset = od.ShardDataset(str(path), recipe=od.Recipe(**OWN, keep=keep))
    return list(od.DataLoader(dataset, batch_size=4, **options))


def kept_of(batches: list[od.Batch]) -> dict[str, dict[str, Any]]:
    """Key -> name -> value."""
    found = {}
    for batch in batches:
        assert all(len(values) == len(batch.sample_ids) for values in batch.fields.values())
        for number, (_, key) in enumerate(batch.sample_ids):
            found[key] = {name: values[number] for name, values in batch.fields.items()}
    return found


@pytest.fixture
def labelled(tmp_path: Path) -> str:
    """Six samples, 3 without a label and 4 without points."""
    samples = [
        {"__key__": f"s{number}", "txt": b"one " * (number + 1), "cls": b"%d" % number, "npy": cloud(number + 4)}
        for number in range(6)
    ]
    del samples[3]["cls"], samples[4]["npy"]
    return write_shard(tmp_path / "labelled.tar", samples)


LABELS = {"s0": b"0", "s1": b"1", "s2": b"2", "s3": None, "s4": b"4", "s5": b"5"}


def test_values_are_of_the_type_of_the_container(tmp_path: Path) -> None:
    samples = [
        {"__key__": "a", "txt": b"a", "0.cls": b"x", "1.cls": b"y", "meta.json": b"{}"},
        {"__key__": "b", "txt.gz": gzip.compress(b"zipped"), "cls": b"3", "old.cls": b"2"},
    ]
    tar = write_shard(tmp_path / "a.tar", samples)
    assert kept_of(batches_of(tar, ("CLS", "txt", "meta.json"))) == {
        "a": {"cls": [b"x", b"y"], "txt": b"a", "meta.json": b"{}"},
        "b": {"cls": b"3", "txt": b"zipped", "meta.json": None},
    }
    path = tmp_path / "a.parquet"
    table = {
        "id": ["a", "b"],
        "text": ["one", "two"],
        "vector": pa.array([b"\0\1", None], pa.binary()),
        "url": ["x.com", None],
        "crops": pa.array([[b"1", b"2"], []], pa.list_(pa.binary())),
    }
    pq.write_table(pa.table(table), path)
    assert kept_of(batches_of(path, ("vector", "url", "crops", "text"))) == {
        "a": {"vector": b"\0\1", "url": "x.com", "crops": [b"1", b"2"], "text": "one"},
        "b": {"vector": None, "url": None, "crops": None, "text": "two"},
    }


def test_masking_a_sample_masks_its_fields(tmp_path: Path) -> None:
    samples = [{"__key__": f"s{n}", "txt": b"<points> x", "cls": b"%d" % n, "npy": cloud(40 + n)} for n in range(6)]
    shard = write_shard(tmp_path / "a.tar", samples)
    batch = batches_of(shard, ("cls",), balance=od.Balance(assignment="per_phase"))[0]
    assert kept_of([batch.to("cpu")]) == {key: {"cls": key[1:].encode()} for _, key in batch.sample_ids}
    masked = batch.masked({"points": torch.tensor([number != 1 for number in range(len(batch.sample_ids))])})
    failed = int(batch.llm.media_owners["points"][1])
    assert [number for number, value in enumerate(masked.fields["cls"]) if value is None] == [failed]
    assert None not in batch.fields["cls"]


def test_a_failed_sample_takes_its_fields_along(tmp_path: Path) -> None:
    samples = [{"__key__": "good", "txt": b"<image> a", "jpg": jpeg(40, 30), "cls": b"1"}]
    samples += [{"__key__": "bad", "txt": b"<image> a", "jpg": jpeg(40, 30)[:-200], "cls": b"2"}]
    shard = write_shard(tmp_path / "bad.tar", samples)
    assert kept_of(batches_of(shard, ("cls",), on_error=SKIP_ANY)) == {"good": {"cls": b"1"}}
    per_phase = batches_of(shard, ("cls",), balance=od.Balance(assignment="per_phase"), on_error=SKIP_ANY)
    assert kept_of(per_phase) == {"good": {"cls": b"1"}, "bad": {"cls": None}}


def test_a_mixture_has_the_fields_of_all_sources(labelled: str, tmp_path: Path) -> None:
    other = write_shard(tmp_path / "other.tar", [{"__key__": f"o{number}", "txt": b"other"} for number in range(6)])
    with_labels = od.ShardDataset(labelled, recipe=od.Recipe(keep=("cls",)))
    mixture = od.Mixture({"labelled": od.Source(with_labels), "other": od.Source(od.ShardDataset(other))}, stop="first")
    found = kept_of(list(od.DataLoader(mixture, batch_size=4)))
    assert {key[0] for key in found} == {"s", "o"}
    assert all(fields == {"cls": LABELS.get(key)} for key, fields in found.items())


# Names of fields are in order, as older releases of pyarrow sort them.
TYPED = {
    "label": [3, None, 1 << 40],
    "Score": [0.5, 1.5, None],
    "ok": [True, None, False],
    "vector": [[1.0, 2.0], [], None],
    "meta": [{"<class>": "Plan", "a": 1}, {"<class>": "x", "a": 2}, None],
    "tags": [[1, 2], [], None],
    "messages": [[{"content": "q", "role": "user"}]] * 3,
}
DAY = datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC)


def text_alone(record: dict[str, Any]) -> dict[str, Any]:
    return {"text": record["text"]}


def write_typed(folder: Path) -> dict[str, str]:
    """The same three samples in Parquet, Arrow and JSON Lines."""
    columns = {"id": ["a", "b", "c"], "text": ["one", "two", "three"], **TYPED}
    table = pa.table({**columns, "when": [DAY] * 3})
    pq.write_table(table, folder / "a.parquet")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        del row["messages"]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {path.suffix[1:]: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_typed(tmp_path_factory.mktemp("typed"))


OPTIONS: list[dict[str, Any]] = [{}, {"num_threads": 2}, {"num_workers": 1, "num_threads": 1}]


@pytest.mark.slow_cases("num_workers")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("record", [None, text_alone], ids=["plain", "record"])
@pytest.mark.parametrize("container", ["parquet", "arrow", "jsonl"])
def test_columns_and_keys_have_their_types(
    typed: dict[str, str], container: str, record: Any, options: dict[str, Any]
) -> None:
    names = [name.lower() for name in TYPED if (container, name) != ("jsonl", "messages")]
    dataset = od.ShardDataset(typed[container], recipe=od.Recipe(keep=tuple(names), record=record))
    (batch,) = od.DataLoader(dataset, batch_size=4, **options)
    order = [key for _, key in batch.sample_ids]
    for name in names:
        values = TYPED["Score" if name == "score" else name]
        expected = [values["abc".index(key)] for key in order]
        assert repr(batch.fields[name]) == repr(expected), name


def test_kept_keys_of_tables_and_of_members(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,rating\na,one,3\nb,two,\n")
    dataset = od.ShardDataset(tmp_path / "a.csv", recipe=od.Recipe(keep=("score",)), columns={"rating": "score"})
    assert kept_of(list(od.DataLoader(dataset, batch_size=4))) == {"a": {"score": "3"}, "b": {"score": ""}}
    samples = [
        {"__key__": "a", "txt": b"one", "json": b'{"score": 3, "twice": {"k": 1, "k": 2}}'},
        {"__key__": "b", "txt": b"two", "score": b"4", "json": b'{"score": 5}'},
        {"__key__": "c", "txt": b"three", "json": b"[1]"},
    ]
    tar = write_shard(tmp_path / "a.tar", samples)
    dataset = od.ShardDataset(tar, recipe=od.Recipe(keep=("score", "twice")))
    assert kept_of(list(od.DataLoader(dataset, batch_size=4))) == {
        "a": {"score": 3, "twice": {"k": 2}},
        "b": {"score": b"4", "twice": None},
        "c": {"score": None, "twice": None},
    }
    assert fields_of(tar, od.Recipe(keep=("score",)))["a"] == {"score": 3}


def test_a_value_that_is_nested_too_deeply_fails_its_sample(tmp_path: Path) -> None:
    deep = "[" * 60 + "]" * 60
    (tmp_path / "a.jsonl").write_text(f'{{"id": "a", "text": "x", "deep": {deep}}}\n{{"id": "b", "text": "y"}}\n')
    with pytest.raises(od.DataError, match="sample 'a', field 'deep': a value of lists and dicts nested more than 48"):
        batches_of(tmp_path / "a.jsonl", ("deep",))
    assert kept_of(batches_of(tmp_path / "a.jsonl", ("deep",), on_error=od.ErrorPolicy("skip", max_failures=9)))


def test_peers_get_values_of_any_type(typed: dict[str, str]) -> None:
    for batch in batches_of(typed["parquet"], ("meta", "vector", "label")):
        message = describe({"batches": plain([batch], batch.plan)})
        buffer = np.empty(message.num_bytes, np.uint8)
        message.write_to(buffer)
        (received,) = revive(read(buffer)["batches"], batch.plan)
        assert received.fields == batch.fields
        assert batch.to("cpu").fields == batch.fields


def with_fields(record: dict[str, Any]) -> dict[str, Any]:
    given = record.get("json", record)  # of a tar, or a row
    added = {"Label": len(given["question"]), "pair": [given["question"], None]}
    return {"text": f"{given['question']} {given['answer']}"} | ({"fields": added} if given["answer"] else {})


def written(rows: list[dict[str, Any]], path: Path) -> str:
    """Write records: as JSON in a tar, with their "id" as key, as rows of a table, or as lines."""
    if path.suffix == ".tar":
        write_shard(path, [{"__key__": row["id"], "json": json.dumps(row).encode()} for row in rows])
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("container", ["tar", "parquet", "jsonl"])
def test_a_function_of_the_users_adds_fields(tmp_path: Path, container: str) -> None:
    rows = [{"question": "q" * (n + 1), "answer": "a" * n, "label": "theirs", "id": f"k{n}"} for n in range(4)]
    path = written(rows, tmp_path / f"a.{container}")
    text = od.TextPreprocessor(max_tokens=6, overflow="split")
    recipe = od.Recipe(
        image=None, audio=None, text=text, keep=("label", "pair", "id"), record=with_fields, record_id="1"
    )
    dataset = od.ShardDataset(path, recipe)
    labels = {row["id"]: len(row["question"]) if row["answer"] else "theirs" for row in rows}
    for options in ({}, {"num_threads": 2}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        (batch,) = od.DataLoader(dataset, batch_size=10, **options)
        keys = [key for _, key in batch.sample_ids]
        assert len(keys) > len(rows)  # a text in pieces
        assert batch.fields["id"] == keys
        assert batch.fields["label"] == [labels[key] for key in keys]
        assert batch.fields["pair"] == [["q" * labels[key], None] if key != "k0" else None for key in keys]
    whole = od.ShardDataset(path, od.Recipe(image=None, audio=None, keep=("label",), record=with_fields, record_id="1"))
    (samples,) = od.DataLoader(whole, batch_size=4, collate_fn=list)
    assert [sample.fields["label"] for sample in samples[1:]] == [2, 3, 4]
