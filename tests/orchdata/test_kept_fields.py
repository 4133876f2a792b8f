"""Fields that a recipe keeps go with their sample, as bytes, and change nothing else."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from own_modalities import cloud
from own_samples import EXPECTED, NUM_SAMPLES, OWN, RECIPE, SAMPLES, delivered, differ, loader
from shard_factory import RECIPE as PLAIN
from shard_factory import write_shard

import orchdata as od


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
