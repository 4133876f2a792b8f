"""Fields that a recipe keeps go with their sample, in batches and to a collate_fn, and change nothing else."""

from __future__ import annotations

import gzip
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
from shard_factory import jpeg, write_shard

import orchdata as od
from orchdata.engines.processes.message import plain, revive
from orchdata.ranks.wire import describe, read


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("mixed") / "mixed.tar", SAMPLES)


def fields_of(path: str | Path, recipe: od.Recipe) -> dict[str, Mapping[str, bytes]]:
    dataset = od.ShardDataset(str(path), recipe=recipe)
    samples = [sample for batch in od.DataLoader(dataset, batch_size=4, collate_fn=list) for sample in batch]
    return {sample.key: sample.fields for sample in samples}


def test_kept_fields_go_with_a_sample_as_bytes(tmp_path: Path) -> None:
    meta = b'{"source": "web"}'
    samples = [
        {"__key__": "a", "npy": cloud(5), "txt": b"<points> a", "cls": b"3", "json": meta, "md": b"no"},
        {"__key__": "b", "txt.gz": gzip.compress(b"zipped"), "0.cls": b"\0\xff", "side.cls": b"x"},
        {"__key__": "c", "txt": b"plain"},
    ]
    shard = write_shard(tmp_path / "a.tar", samples)
    assert fields_of(shard, od.Recipe(**OWN)) == {"a": {}, "b": {}, "c": {}}
    assert fields_of(shard, od.Recipe(**OWN, keep=("cls", "json"))) == {
        "a": {"cls": b"3", "json": meta},
        "b": {"0.cls": b"\0\xff", "side.cls": b"x"},
        "c": {},
    }
    assert fields_of(shard, od.Recipe(**OWN, keep=("txt", "npy"))) == {
        "a": {"txt": b"<points> a", "npy": cloud(5)},
        "b": {"txt.gz": b"zipped"},
        "c": {"txt": b"plain"},
    }


def test_kept_columns_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = {
        "id": ["a", "b"],
        "text": ["one", "two"],
        "embedding": pa.array([b"\0\1", None], pa.binary()),
        "url": ["x.com", "y.com"],
        "label": [3, 4],
        "points": pa.array([cloud(4), cloud(5)], pa.binary()),
    }
    pq.write_table(pa.table(table), path)
    kept = ("embedding", "url", "points")
    assert fields_of(path, od.Recipe(**OWN, keep=kept)) == {
        "a": {"embedding": b"\0\1", "url": b"x.com", "points": cloud(4)},
        "b": {"url": b"y.com", "points": cloud(5)},
    }
    with pytest.raises(od.DataError, match="field 'label': the recipe requests this column, but it has neither bytes"):
        fields_of(path, od.Recipe(**OWN, keep=("label",)))


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


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"collate_fn": od.Padded()}], ids=str)
def test_batches_have_kept_fields(labelled: str, options: dict[str, Any]) -> None:
    assert all(batch.fields == {} for batch in batches_of(labelled, ()))
    assert kept_of(batches_of(labelled, ("cls",), **options)) == {key: {"cls": LABELS[key]} for key in LABELS}


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
    assert kept_of(batches_of(shard, ("cls",), on_error="skip")) == {"good": {"cls": b"1"}}
    per_phase = batches_of(shard, ("cls",), balance=od.Balance(assignment="per_phase"), on_error="skip")
    assert kept_of(per_phase) == {"good": {"cls": b"1"}, "bad": {"cls": None}}


def test_a_mixture_has_the_fields_of_all_sources(labelled: str, tmp_path: Path) -> None:
    other = write_shard(tmp_path / "other.tar", [{"__key__": f"o{number}", "txt": b"other"} for number in range(6)])
    with_labels = od.ShardDataset(labelled, recipe=od.Recipe(keep=("cls",)))
    mixture = od.Mixture({"labelled": od.Source(with_labels), "other": od.Source(od.ShardDataset(other))}, stop="first")
    found = kept_of(list(od.DataLoader(mixture, batch_size=4)))
    assert {key[0] for key in found} == {"s", "o"}
    assert all(fields == {"cls": LABELS.get(key)} for key, fields in found.items())


def test_peers_get_what_their_reader_sends(labelled: str) -> None:
    for batch in batches_of(labelled, ("cls", "txt")):
        message = describe({"batches": plain([batch], batch.plan)})
        buffer = np.empty(message.num_bytes, np.uint8)
        message.write_to(buffer)
        (received,) = revive(read(buffer)["batches"], batch.plan)
        assert received.fields == batch.fields and received.samples == batch.samples


def test_a_name_that_no_sample_has_is_warned_of_once(labelled: str) -> None:
    with pytest.warns(UserWarning, match="Recipe.keep names 'clz', and no sample of") as seen:
        batches = batches_of(labelled, ("cls", "clz"))
        batches_of(labelled, ("cls", "clz"))
    assert len(seen) == 1 and all(set(batch.fields["clz"]) == {None} for batch in batches)
