"""Batches of one length: every microbatch is as long, its padding says nothing, and samples are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from shard_factory import RECIPE, SKIP_ANY, omni_shards, png, write_shard
from spec_job import delivered

import orchdata as od
from orchdata.building.arrays import Media
from orchdata.building.pages import Pages
from orchdata.building.step import BuildSpec, BuiltStep
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


OMNI = {"shards": 2, "samples": 20}


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


@pytest.mark.slow
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
        ({"encoder_lengths": {"image": [50]}}, {}, "of image are multiples of 4 positions, got"),
    ],
)
def test_refused_by_a_loader(dataset: od.ShardDataset, layout: Any, balance: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(dataset, collate_fn=od.Packed(**layout), cost=COST, balance=od.Balance(**balance))


# Pages: samples are known by their place, memory is asked for by its size, and every slice of it is written.


PHASES = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0))
PAGED: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed by 8, mrope": {"collate_fn": od.Packed(multiple_of=8, positions="mrope")},
    "one length": {
        "collate_fn": od.Packed(length=320, encoder_lengths={"image": (64, 480), "audio": (120, 1200)}),
        "cost": PHASES,
    },
    "padded": {"collate_fn": od.Padded(multiple_of=4)},
    "padded encoders": {"collate_fn": od.Padded(encoders="padded")},
    "nothing for empty ranks": {"collate_fn": od.Packed(empty="zero")},
    "microbatches": {"balance": od.Balance(max_tokens=500, oversize="own")},
    "per phase": {"balance": od.Balance(assignment="per_phase", max_tokens=500, oversize="own"), "cost": PHASES},
    "per phase, padded": {"balance": od.Balance(assignment="per_phase"), "cost": PHASES, "collate_fn": od.Padded()},
}


class Filled:
    """Memory of a fixed content, whose pieces are remembered."""

    def __init__(self, content: int) -> None:
        self.content = content
        self.pieces: list[NDArray[np.uint8]] = []

    def reserve(self, num_bytes: int) -> None:
        pass

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        self.pieces.append(np.full(num_bytes, self.content, np.uint8))
        return self.pieces[-1]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=15)


def spec_of(shards: list[str], rank: int = 0, num_ranks: int = 1, **options: Any) -> BuildSpec:
    dataset = od.ShardDataset(shards, recipe=RECIPE)
    dataset.index()
    given = {"global_batch_size": 12, "seed": 3, "shuffle": True} | options
    return od.DataLoader(dataset, dp=(rank, num_ranks), **given)._runtime.prepared.spec


def built(spec: BuildSpec, content: int, step: int = 0) -> tuple[BuiltStep, Filled]:
    memory = Filled(content)
    started = spec.open(allocate=lambda _: memory).start(StepTask(0, step))
    for fill in started.tasks:
        fill()
    assert sum(len(piece) for piece in memory.pieces) == started.num_bytes
    return started.finish(), memory


@pytest.mark.parametrize("way", PAGED)
def test_what_memory_held_before_is_in_no_batch(shards: list[str], way: str) -> None:
    for rank in (0, 1):
        spec = spec_of(shards, rank, 2, **PAGED[way])
        assert len({delivered(built(spec, content)[0]) for content in (0, 0xA5, 0xFF)}) == 1


@pytest.mark.parametrize("assignment", ["joint", "per_phase"])
def test_what_failed_before_leaves_nothing_of_memory_either(shards: list[str], tmp_path: Path, assignment: str) -> None:
    spec = spec_of(shards, on_error=SKIP_ANY, cost=PHASES, balance=od.Balance(assignment=assignment))
    data = Path(shards[0]).read_bytes()
    at = data.index(b"\xff\xd8\xff")  # the first image
    try:
        with Path(shards[0]).open("r+b") as file:
            file.seek(at + 200)
            file.write(bytes(300))
        found = [built(spec, content, step) for step in (0, 1, 2) for content in (0, 0xA5)]
    finally:
        with Path(shards[0]).open("r+b") as file:
            file.write(data)
    assert any(step.failures for step, _ in found)
    assert all(delivered(found[i][0]) == delivered(found[i + 1][0]) for i in (0, 2, 4))


@pytest.mark.parametrize(
    ("owner", "method", "message"),
    [
        (Media, "put", r"tokens of \w+ parts \[.*\] of a microbatch were never written"),
        (Pages, "write", r"samples \[.*\] of a microbatch were never written"),
        (Media, "decode", r"\w+ parts \[.*\] of a microbatch were never written"),
    ],
)
def test_a_slice_that_was_never_written_fails_the_build(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, owner: type, method: str, message: str
) -> None:
    spec = spec_of(shards)
    built(spec, 0)
    monkeypatch.setattr(owner, method, lambda *_: None)
    with pytest.raises(RuntimeError, match=message):
        built(spec, 0)
