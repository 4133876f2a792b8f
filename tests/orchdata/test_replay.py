"""Any step of a run, once more: what `step_at` builds is what the iteration gave, and the loader stays where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import digest
from rank_loaders import loaders
from shard_factory import RECIPE, omni_shards
from torch.utils.data import BatchSampler, RandomSampler

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

NUMBERS = list(range(30))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), samples=12), RECIPE)
    dataset.index()
    return dataset


def digests(step: list[Any]) -> list[str]:
    return [digest(batch) for batch in step]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_batch_tokens": [(0, 400), (2000, 900)]},
        {"global_batch_tokens": None, "global_batch_size": 7, "balance": od.Balance(max_tokens=300, oversize="own")},
        {"balance": od.Balance(assignment="per_phase")},
        {"collate_fn": od.Padded()},
        {"shuffle": od.Shuffle(window=1, streams=2), "num_threads": 2},
    ],
)
def test_every_step_of_every_rank_is_built_again(dataset: od.ShardDataset, options: dict[str, Any]) -> None:
    ours = loaders(dataset, 3, **options)
    given = [[[digests(step) for step in loader.steps()] for _ in range(2)] for loader in ours]
    asked = loaders(dataset, 3, **options)[0]
    asked.set_epoch(1)
    before = asked.state_dict()
    for epoch in range(2):
        for step in range(len(given[0][epoch])):
            plan = asked.plan_at(epoch, step)
            for rank in range(3):
                again = asked.step_at(epoch, step, rank=rank)
                assert digests(again) == given[rank][epoch][step]
                assert all(batch.plan.hash == plan.hash for batch in again)
        with pytest.raises(IndexError, match=f"step {step + 1} is outside"):
            asked.step_at(epoch, step + 1)
    assert digests(asked.step_at(1, 0)) != digests(asked.step_at(0, 0))
    assert asked.state_dict() == before
    assert asked.stats()["steps"] == 0


def test_a_run_that_was_cut_again_is_rebuilt_from_its_state(dataset: od.ShardDataset) -> None:
    run = loaders(dataset, 1, global_batch_tokens=300)[0]
    steps = run.steps()
    for _ in range(3):
        next(steps)
    resumed = loaders(dataset, 1, run.state_dict(), ["global_batch_tokens"], global_batch_tokens=800)[0]
    given = [digests(step) for step in resumed.steps()]
    laptop = loaders(dataset, 1, global_batch_tokens=800)[0]
    assert digests(laptop.step_at(0, 3)) != given[0]  # before it loads the state
    middle = loaders(dataset, 1, run.state_dict(), ["global_batch_tokens"], global_batch_tokens=800)[0]
    laptop.load_state_dict(middle.state_dict())
    assert [digests(laptop.step_at(0, 3 + number)) for number in range(len(given))] == given
    with pytest.raises(IndexError, match="cut in another way"):
        laptop.step_at(0, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True, "seed": 5},
        {"batch_size": 4},
        {"batch_size": 4, "sampler": range(0, 30, 2)},
        {"batch_sampler": BatchSampler(range(30), 4, drop_last=False)},
    ],
)
def test_map_style_steps(options: dict[str, Any]) -> None:
    loader = od.DataLoader(NUMBERS, collate_fn=list, **options)
    state = torch.get_rng_state()
    asked = [loader.step_at(0, step) for step in range(len(loader))]
    assert torch.equal(torch.get_rng_state(), state)
    assert asked == [[batch] for batch in loader]


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("kind", [{"shuffle": True}, {"sampler": RandomSampler(NUMBERS, num_samples=30)}])
def test_a_state_tells_what_torch_drew(kind: dict[str, Any]) -> None:
    loader = od.DataLoader(NUMBERS, batch_size=4, collate_fn=list, **kind)
    steps = iter(loader)
    given = [next(steps) for _ in range(3)]
    state = saved(loader)
    laptop = od.DataLoader(NUMBERS, batch_size=4, collate_fn=list, **kind)
    with pytest.raises(ValueError, match="load a state of that epoch"):
        laptop.step_at(0, 1)
    laptop.load_state_dict(state)
    given += steps
    assert [laptop.step_at(0, step) for step in range(len(given))] == [[batch] for batch in given]
