"""Positions of packed and padded batches against their definition: those of each sample alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shard_factory import RECIPE, omni_samples, write_shard

import orchdata as od

LAYOUTS = [
    od.Packed(positions="mrope"),
    od.Packed(positions="mrope", multiple_of=8),
    od.Packed(positions="mrope", empty="zero"),
    od.Padded(positions="mrope"),
    od.Padded(positions="mrope", multiple_of=8, encoders="padded"),
]


def rows(batch: od.Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """(..., T) or (..., num_samples, L) as a tensor a sample, its padding included."""
    if batch.llm.attention_mask is not None:
        return list(values.unbind(-2))
    return list(values.split(batch.llm.cu_seqlens.diff().tolist(), dim=-1))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    path: Path = tmp_path_factory.mktemp("shards") / "a.tar"
    return od.ShardDataset(write_shard(path, omni_samples(12)), recipe=RECIPE)


def batches(dataset: od.ShardDataset, size: int, layout: od.Packed | od.Padded) -> list[od.Batch]:
    return list(od.DataLoader(dataset, batch_size=size, collate_fn=layout, num_threads=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sample_has_the_positions_it_has_alone(dataset: od.ShardDataset, layout: od.Packed | od.Padded) -> None:
    alone = {batch.sample_ids[0]: batch.llm for batch in batches(dataset, 1, od.Packed(positions="mrope"))}
    lengths = {key: int(llm.cu_seqlens[1]) for key, llm in alone.items()}
    for batch in batches(dataset, 5, layout):
        llm = batch.llm
        assert llm.restart_position_ids.shape == llm.input_ids.shape
        assert llm.position_ids.shape == (3, *llm.input_ids.shape)
        assert "restart_position_ids" not in batch.model_inputs()
        restart, mrope = rows(batch, llm.restart_position_ids), rows(batch, llm.position_ids)
        assert len(restart) == len(mrope) == len(batch.sample_ids) + bool(llm.dummies)
        for key, counted, turned in zip(batch.sample_ids, restart, mrope, strict=False):
            length = lengths[key]
            assert torch.equal(counted, torch.arange(len(counted)))  # padding counts on
            assert torch.equal(alone[key].restart_position_ids[:length], torch.arange(length))
            assert torch.equal(turned[:, :length], alone[key].position_ids[:, :length])
            rest = len(counted) - length
            assert torch.equal(
                turned[:, length:], turned[:, length - 1 : length].amax() + 1 + torch.arange(rest).expand(3, -1)
            )


def test_a_rank_without_samples_has_them_too(dataset: od.ShardDataset) -> None:
    batches(dataset, 1, od.Packed())  # builds the index
    loader = od.DataLoader(
        dataset, global_batch_size=1, collate_fn=od.Packed(positions="mrope", multiple_of=4), dp=(1, 2), num_threads=0
    )
    batch = next(batch for batch in loader if not batch.sample_ids)
    assert batch.llm.restart_position_ids.tolist() == [0, 1, 2, 3]
    assert batch.llm.position_ids.tolist() == [[0, 1, 2, 3]] * 3
