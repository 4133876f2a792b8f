"""Pages: samples are known by their place, memory is asked for by its size, and every slice of it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shard_factory import RECIPE, SKIP_ANY, omni_shards
from spec_job import delivered

import orchdata as od
from orchdata.building.media_pages import Media
from orchdata.building.pages import Pages
from orchdata.building.step import BuildSpec, BuiltStep
from orchdata.order.steps import StepTask

COST = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0))
WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed by 8, mrope": {"collate_fn": od.Packed(multiple_of=8, positions="mrope")},
    "one length": {
        "collate_fn": od.Packed(length=320, encoder_lengths={"image": (64, 480), "audio": (120, 1200)}),
        "cost": COST,
    },
    "padded": {"collate_fn": od.Padded(multiple_of=4)},
    "padded encoders": {"collate_fn": od.Padded(encoders="padded")},
    "nothing for empty ranks": {"collate_fn": od.Packed(empty="zero")},
    "microbatches": {"balance": od.Balance(max_tokens=500, oversize="own")},
    "per phase": {"balance": od.Balance(assignment="per_phase", max_tokens=500, oversize="own"), "cost": COST},
    "per phase, padded": {"balance": od.Balance(assignment="per_phase"), "cost": COST, "collate_fn": od.Padded()},
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


@pytest.mark.parametrize("way", WAYS)
def test_what_memory_held_before_is_in_no_batch(shards: list[str], way: str) -> None:
    for rank in (0, 1):
        spec = spec_of(shards, rank, 2, **WAYS[way])
        assert len({delivered(built(spec, content)[0]) for content in (0, 0xA5, 0xFF)}) == 1


@pytest.mark.parametrize("assignment", ["joint", "per_phase"])
def test_what_failed_before_leaves_nothing_of_memory_either(shards: list[str], tmp_path: Path, assignment: str) -> None:
    spec = spec_of(shards, on_error=SKIP_ANY, cost=COST, balance=od.Balance(assignment=assignment))
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
