"""What a Batch says of itself: its names, where its samples lie, and errors for names of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard

import orchdata as od

TEXTS = {f"k{number}": b"sample"[: 3 + number] for number in range(3)}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("batch") / "a.tar"
    return write_shard(path, [{"__key__": key, "txt": text} for key, text in TEXTS.items()])


@pytest.fixture(scope="module")
def batch(shard: str) -> Any:
    return next(iter(od.DataLoader(od.ShardDataset(shard), batch_size=3, shuffle=False)))


def model(**arguments: Any) -> Any:
    return arguments


def test_a_batch_is_not_a_mapping_and_says_where_to_look(batch: Any) -> None:
    assert [key for _, key in batch.sample_ids] == ["k0", "k1", "k2"]
    with pytest.raises(AttributeError, match=r"batch\.sample_ids"):
        batch.keys  # noqa: B018
    with pytest.raises(AttributeError, match=r"no 'input_ids'.*model_inputs\(\)"):
        batch.input_ids  # noqa: B018
    with pytest.raises(TypeError, match=r"'input_ids'.*model_inputs\(\)"):
        batch["input_ids"]
    with pytest.raises(TypeError, match=r"not a mapping.*model_inputs\(\)"):
        dict(batch)
    with pytest.raises(TypeError, match="must be a mapping, not Batch"):
        model(**batch)
    assert "input_ids" in model(**batch.model_inputs())


@pytest.mark.parametrize(
    "layout", [od.Packed(), od.Packed(multiple_of=8), od.Packed(length=64), od.Padded(multiple_of=8)], ids=str
)
def test_samples_says_where_the_tokens_of_each_sample_are(shard: str, layout: Any) -> None:
    for batch in od.DataLoader(od.ShardDataset(shard), batch_size=2, collate_fn=layout):
        assert len(batch.samples) == len(batch.sample_ids) <= batch.num_step_samples
        for (_, key), where in zip(batch.sample_ids, batch.samples, strict=True):
            assert bytes(batch.llm.input_ids[where].tolist()) == TEXTS[key]


def test_samples_of_a_rank_without_any_are_none(shard: str) -> None:
    dataset = od.ShardDataset(shard)
    dataset.index()
    steps = [list(od.DataLoader(dataset, 4, dp=(rank, 4), num_threads=0)) for rank in range(4)]
    (empty,) = [batch for (batch,) in steps if not batch.sample_ids]
    assert empty.samples == () and empty.num_step_samples == 3
