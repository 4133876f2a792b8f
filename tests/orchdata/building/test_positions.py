"""Positions of packed and padded batches against their definition: those of each sample alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from own_modalities import Points, cloud
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


# Parts with text between their tokens, as tiles have: where features go, and what the sequence says around them.


MARK, GROUP = 300, 2


@dataclass(frozen=True, kw_only=True)
class Rows(Points):
    """Every two tokens are a row of their own; what is left over makes the last."""

    slot = od.Slot(mark="<points>", token_id=MARK)
    lost: int = 0

    def expand(self, size: od.PartSize) -> tuple[str | int, ...]:
        whole, rest = divmod(size.tokens - self.lost, 2)
        rows = [2] * whole + [rest] * (rest > 0)
        return tuple(piece for number, row in enumerate(rows) for piece in (f"[{number}", row, "]"))


def batch_of(folder: Path, recipe: od.Recipe, layout: od.Packed | od.Padded = od.Packed()) -> od.Batch:  # noqa: B008
    samples = [
        {"__key__": "0", "txt": b"a<points>b", "npy": cloud(GROUP * 5)},
        {"__key__": "1", "txt": b"c", "npy": cloud(GROUP * 2, seed=1)},
    ]
    shard = write_shard(folder / "a.tar", samples)
    dataset = od.ShardDataset(shard, recipe=recipe)
    (batch,) = od.DataLoader(dataset, batch_size=2, collate_fn=layout)
    return batch


def text_of(ids: torch.Tensor) -> str:
    return "".join("." if token == MARK else chr(token) for token in ids.tolist())


def test_a_part_stands_where_its_pieces_do(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, od.Recipe(points=Rows(group=GROUP)))
    assert text_of(batch.llm.input_ids) == "a[0..][1..][2.]b[0..]c"
    assert (batch.llm.labels[batch.llm.input_ids == ord("[")] == -100).all()
    features = torch.arange(1.0, 8.0)[:, None].expand(7, 3)
    merged = batch.merge(torch.zeros(len(batch.llm.input_ids), 3), {"points": features})[:, 0]
    assert merged[batch.llm.input_ids == MARK].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert merged.count_nonzero() == 7


def test_custom_collate_functions_get_the_same_sequence(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "0", "txt": b"a<points>b", "npy": cloud(GROUP * 3)}])
    dataset = od.ShardDataset(shard, recipe=od.Recipe(points=Rows(group=GROUP)))
    (samples,) = od.DataLoader(dataset, collate_fn=lambda samples: samples)
    (sample,) = samples
    texts = [bytes(part.token_ids.tolist()).decode() for part in sample.parts if hasattr(part, "token_ids")]
    assert texts == ["a", "[0", "][1", "]", "b"]
    assert sum(hasattr(part, "modality") for part in sample.parts) == 1


def test_numbers_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(od.DataError, match=r"expand\(\) of points gives 4 tokens"):
        batch_of(tmp_path, od.Recipe(points=Rows(group=GROUP, lost=1)))
