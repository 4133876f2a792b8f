"""Batches of one length: every microbatch is as long, its padding says nothing, and samples are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shard_factory import RECIPE, SKIP_ANY, omni_shards, png, write_shard

import orchdata as od
from orchdata.order.steps import StepTask

COST = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0, 0.01))
LENGTH = 320  # the longest sample has fewer
RANKS = 4
WAYS: dict[str, dict[str, Any]] = {
    "tokens alone": {},
    "phases": {"cost": COST},
    "per phase": {"cost": COST, "balance": od.Balance(assignment="per_phase")},
    "grouped": {"cost": COST, "balance": od.Balance(scope="grouped", group_size=2)},
    "grid": {"cost": COST, "balance": od.Balance(scope="grid", group_size=2)},
    "in turn": {"balance": "none"},
    "equal counts": {"cost": COST, "balance": od.Balance(equal_count=True)},
    "waits at the end": {"cost": COST, "balance": od.Balance(objective="sum")},
    "encoder caps": {"cost": COST, "balance": od.Balance(max_tokens={"image": 200, "audio": 400})},
    "by 8, mrope": {"cost": COST, "collate_fn": od.Packed(length=LENGTH, multiple_of=8, positions="mrope")},
    "no dummies": {"collate_fn": od.Packed(length=LENGTH, empty="zero")},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    found = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=20), recipe=RECIPE)
    found.index()
    return found


def loader_of(dataset: od.ShardDataset, rank: int = 0, num_ranks: int = 1, **options: Any) -> od.DataLoader:
    given = {"global_batch_size": 16, "seed": 3, "shuffle": True, "collate_fn": od.Packed(length=LENGTH)} | options
    dataset.index()
    return od.DataLoader(dataset, dp=(rank, num_ranks), **{"num_threads": 0, **given})


@pytest.mark.parametrize("way", WAYS)
def test_every_microbatch_is_as_long_and_every_sample_is_in_one(dataset: od.ShardDataset, way: str) -> None:
    delivered, hashes, counts, places = [], set(), set(), 0
    for rank in range(RANKS):
        loader = loader_of(dataset, rank, RANKS, **WAYS[way])
        for batch in loader:
            llm = batch.llm
            assert llm.input_ids.shape == llm.labels.shape == (LENGTH,)
            assert llm.position_ids.shape[-1] == llm.max_seqlen == int(llm.cu_seqlens[-1]) == LENGTH
            assert (llm.cu_seqlens.diff() > 0).all()
            delivered += [(batch.step, key) for key in batch.sample_ids]
            hashes.add((batch.step, batch.plan.hash))
            counts.add((batch.step, batch.num_microbatches))
            places += LENGTH
        stats = loader.stats()
    tokens = int(dataset.index().llm_tokens.sum())
    multiple = getattr(WAYS[way].get("collate_fn"), "multiple_of", 1)
    assert len(delivered) == len(set(delivered)) == 40
    assert len(hashes) == len(counts) == 3
    assert tokens / places == stats["fill"] if multiple == 1 else tokens / places < stats["fill"]


def test_padding_is_a_last_sequence_without_loss(dataset: od.ShardDataset) -> None:
    for batch in loader_of(dataset, collate_fn=od.Packed(length=LENGTH, positions="mrope"), cost=COST):
        bounds = batch.llm.cu_seqlens.tolist()
        dummies = sum(batch.llm.dummies.values())
        start = bounds[len(batch.sample_ids)] + dummies
        assert bounds[len(batch.sample_ids) :] == sorted({bounds[len(batch.sample_ids)], start, LENGTH})
        assert (batch.llm.labels[bounds[len(batch.sample_ids)] :] == -100).all()
        assert (batch.llm.input_ids[start:] == 0).all()
        count = torch.arange(LENGTH - start)
        assert batch.llm.restart_position_ids is not None
        assert torch.equal(batch.llm.restart_position_ids[start:], count)
        assert torch.equal(batch.llm.position_ids[:, start:], count.expand(3, -1))
        assert all((where < start).all() for where in batch.llm.media_positions.values())


def test_a_rank_without_samples_has_padding_alone(dataset: od.ShardDataset) -> None:
    batches = [batch for rank in range(3) for batch in loader_of(dataset, rank, 3, global_batch_size=1)]
    empty = [batch for batch in batches if not batch.sample_ids]
    assert empty
    for batch in empty:
        assert batch.llm.cu_seqlens.tolist() == [0, sum(batch.llm.dummies.values()), LENGTH]
        assert set(batch.llm.dummies) == {"image", "audio"}
    bare = od.Packed(length=LENGTH, empty="zero")
    batches = [
        batch for rank in range(3) for batch in loader_of(dataset, rank, 3, global_batch_size=1, collate_fn=bare)
    ]
    assert {tuple(batch.llm.cu_seqlens.tolist()) for batch in batches if not batch.sample_ids} == {(0, LENGTH)}


def test_the_samples_are_those_of_packed_batches(dataset: od.ShardDataset) -> None:
    def by_key(layout: od.Packed) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        found = {}
        for batch in loader_of(dataset, collate_fn=layout):
            llm = batch.llm
            for place, (_, key) in enumerate(batch.sample_ids):
                mine = slice(int(llm.cu_seqlens[place]), int(llm.cu_seqlens[place + 1]))
                found[key] = (llm.input_ids[mine], llm.labels[mine], llm.position_ids[mine])
        return found

    packed, fixed = by_key(od.Packed()), by_key(od.Packed(length=LENGTH))
    assert packed.keys() == fixed.keys()
    assert all(torch.equal(*each) for key in packed for each in zip(packed[key], fixed[key], strict=True))


def test_what_fails_leaves_more_padding(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n}", "txt": b"a text", "png": png(16, 16)} for n in range(4)]
    samples[1]["png"] = samples[1]["png"][:40] + bytes(len(samples[1]["png"]) - 40)
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    layout = od.Packed(length=64)
    (batch,) = od.DataLoader(dataset, batch_size=4, collate_fn=layout, on_error=SKIP_ANY, num_threads=0)
    assert [key for _, key in batch.sample_ids] == ["0", "2", "3"]
    assert batch.llm.input_ids.shape == (64,)


def test_encoders_get_one_of_a_few_lengths(dataset: od.ShardDataset) -> None:
    lengths = {"image": [32, 96, 480], "audio": [60, 240, 1200]}
    layout = od.Packed(length=LENGTH, encoder_lengths=lengths)
    plain = {batch.sample_ids: batch for batch in loader_of(dataset, cost=COST)}
    seen: dict[str, set[int]] = {"image": set(), "audio": set()}
    for batch in loader_of(dataset, cost=COST, collate_fn=layout):
        for name, array, rows in (("image", "patches", 1), ("audio", "features", 2)):
            held = batch.media[name]
            seen[name].add(len(held.arrays[array]) // rows)
            assert held.max_seqlen == int(held.cu_seqlens[-1]) == len(held.arrays[array])
            if (twin := plain.get(batch.sample_ids)) is not None:
                count = len(twin.media[name].arrays[array])
                assert torch.equal(held.arrays[array][:count], twin.media[name].arrays[array])
                assert not held.arrays[array][count:].any()
                assert held.num_tokens == twin.media[name].num_tokens
        rows = {name: held.num_tokens + held.padding_tokens for name, held in batch.media.items()}
        batch.merge(torch.zeros(LENGTH, 8), {name: torch.ones(count, 8) for name, count in rows.items()})
        grid = batch.media["image"].grid_hw
        assert int(grid.prod(dim=1).sum()) == len(batch.media["image"].patches)
    assert all(seen[name] <= set(lengths[name]) for name in lengths)
    assert plain and all(len(found) > 0 for found in seen.values())


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 16, 1000])
def test_a_plan_has_as_few_micro_steps_as_bins_allow(dataset: od.ShardDataset, length: int) -> None:
    layout = od.Packed(length=length)
    loader = loader_of(dataset, 0, RANKS, global_batch_size=40, collate_fn=layout)
    plan = loader._runtime.prepared.spec.open().start(StepTask(0, 0)).plan
    tokens = int(dataset.index().llm_tokens.sum())
    assert plan.num_microbatches == -(-tokens // (RANKS * (length - 2)))  # 2 for dummies
    assert plan.filled == (tokens, RANKS * plan.num_microbatches * length)


@pytest.mark.parametrize(
    ("layout", "balance", "message"),
    [
        ({"length": LENGTH}, {"oversize": "own"}, "oversize='own' gives .* use oversize='drop', a larger length"),
        (
            {"length": LENGTH},
            {"max_tokens": 100},
            "caps llm at 100, and Packed.length=320. .* leave the cap of llm out",
        ),
        (
            {"length": 20},
            {},
            r"has \d+ llm positions, max_tokens allows 18 .*length=20, minus the positions of dummies",
        ),
        ({"length": 2}, {}, "length=2 has no room for samples next to 2 tokens of dummies"),
        ({"encoder_lengths": {"image": [50]}}, {}, "has 50, and parts have multiples of 4 positions: use 48"),
    ],
)
def test_refused_by_a_loader(dataset: od.ShardDataset, layout: Any, balance: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(dataset, collate_fn=od.Packed(**layout), cost=COST, balance=od.Balance(**balance))
