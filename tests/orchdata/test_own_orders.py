"""An order of the user's own, and plans written as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od


@pytest.fixture
def dataset(tmp_path: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=2, samples=15), RECIPE)
    dataset.index()
    return dataset


def loader_of(dataset: Any, rank: int = 0, ranks: int = 1, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset, dp=(rank, ranks), num_threads=0, **options)


def keys_of(loader: od.DataLoader) -> list[tuple[str, str]]:
    return [key for batch in loader for key in batch.sample_ids]


@pytest.mark.parametrize("size", [{"batch_size": 4}, {"global_batch_tokens": 600}])
def test_samples_come_in_the_order_of_an_array(dataset: od.ShardDataset, size: dict[str, int]) -> None:
    index = dataset.index()
    shortest_first = np.argsort(index.llm_tokens, kind="stable")[:25]
    wanted = [(index.shard_of(row).url, index.key(row)) for row in shortest_first.tolist()]
    loader = loader_of(dataset, shuffle=shortest_first, **size)
    assert [keys_of(loader) for _ in range(2)] == [wanted, wanted], "the same in each epoch"
    state = loader.state_dict()
    with pytest.raises(od.StateError, match="the order of your own, shuffle=array,"):
        loader_of(dataset, shuffle=shortest_first[::-1].copy(), **size).load_state_dict(state)
    left_out = [wanted[3]]
    assert keys_of(loader_of(dataset, shuffle=shortest_first, quarantine=left_out, **size)) == wanted[:3] + wanted[4:]
    workers = od.DataLoader(dataset, dp=(0, 1), num_workers=1, num_threads=1, shuffle=shortest_first, **size)
    assert keys_of(workers) == wanted


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.array([0, 1, 1]), "distinct rows"),
        (np.array([0.0, 1.0]), "distinct rows, integers"),
        (np.array([[0, 1]]), "distinct rows, integers"),
        (np.array([0, 30]), "names rows 0 to 30, and the index has 30"),
        (np.array([-1, 3]), "names rows -1 to 3"),
    ],
)
def test_what_is_no_order_is_refused(dataset: od.ShardDataset, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loader_of(dataset, shuffle=rows)


def test_an_array_is_for_one_data_set_of_shards(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="use sampler="):
        od.DataLoader(Numbers(5), shuffle=np.arange(5))
    with pytest.raises(ValueError, match="the sources of a mixture are merged"):
        loader_of(od.Mixture({"a": od.Source(dataset)}), shuffle=np.arange(5))


def test_plans_are_written_as_they_are_delivered(dataset: od.ShardDataset, tmp_path: Path) -> None:
    mixture = od.Mixture(
        {"a": od.Source(dataset, weight=2), "b": od.Source(dataset)}, stop="repeat", epoch_tokens=6_000
    )
    options = {
        "global_batch_tokens": 900,
        "shuffle": True,
        "balance": od.Balance(max_tokens=400, oversize="own"),
    }
    ours = [loader_of(mixture, rank, 2, **options) for rank in range(2)]
    rows = ours[0].export_plan(tmp_path / "plan.arrow", epochs=(0, 1))
    table = pa.ipc.open_file(tmp_path / "plan.arrow").read_all()
    assert table.num_rows == rows
    assert json.loads(table.schema.metadata[b"orchdata"])["num_ranks"] == 2
    written = {tuple(row.values()) for row in table.select(_COLUMNS).to_pylist()}
    delivered = {
        (epoch, batch.step, batch.plan.sources[source], *key, rank, batch.microbatch)
        for epoch in range(2)
        for rank, loader in enumerate(ours)
        for batch in loader
        for key, source in zip(batch.sample_ids, batch.sources.tolist(), strict=True)
    }
    assert written == delivered
    some = ours[0].export_plan(tmp_path / "some.arrow", steps=range(2, 4))
    again = pa.ipc.open_file(tmp_path / "some.arrow").read_all()
    assert some == again.num_rows
    assert set(again["step"].to_pylist()) == {2, 3}
    with pytest.raises(ValueError, match="it needs an od.ShardDataset"):
        od.DataLoader(Numbers(5)).export_plan(tmp_path / "none.arrow")


_COLUMNS = ["epoch", "step", "source", "shard", "key", "rank", "microbatch"]
