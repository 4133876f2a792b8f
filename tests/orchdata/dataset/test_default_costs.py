"""Without `cost=` every phase of the data costs its positions, and one notice says how to do better."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shard_factory import omni_shards

import orchdata as od
from benchmarks.distributions import LARGE_VISION_COST
from orchdata.bench import OMNI_COST, synthetic_index
from orchdata.dataset.index_costs import IndexCosts
from orchdata.loaders.index.index import Index
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan

PHASES = ("image", "audio", "llm")
TOKENS = od.CostModel(llm=od.PhaseCost(1.0))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("omni") / "omni.index", 2_000, seed=3)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    return od.ShardDataset(omni_shards(tmp_path_factory.mktemp("mixed"), shards=1, samples=24))


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("orchdata.notices._warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def waits(plans: list[Plan], costs: IndexCosts) -> dict[str, float]:
    """What ranks wait for in each phase, over its mean, if samples cost this."""
    found = {}
    for phase in PHASES:
        loads = [np.bincount(plan.rank, costs.costs(phase, plan.row), minlength=plan.num_ranks) for plan in plans]
        found[phase] = float(sum(load.max() for load in loads) / sum(load.mean() for load in loads))
    return found


@pytest.mark.parametrize("model", [OMNI_COST, LARGE_VISION_COST])
def test_four_ranks_of_eight_are_about_as_even_as_with_costs(index: Index, model: od.CostModel) -> None:
    spec = PlanSpec(
        costs=IndexCosts(index, None),
        order=Order(index.num_rows, shuffle=Shuffle(), seed=0),
        batches=GlobalBatches(size=32, drop_last=True),
        balance=Balance(),
        num_ranks=4,
    )
    priced = IndexCosts(index, model)
    steps = [StepTask(0, step) for step in range(40)]
    plain, costed, tokens = (
        waits([make_plan(replace(spec, costs=costs), step) for step in steps], priced)
        for costs in (spec.costs, priced, IndexCosts(index, TOKENS))
    )
    for phase in PHASES:
        assert plain[phase] < 1.1 * costed[phase]
    assert tokens["audio"] > plain["audio"] and tokens["image"] > plain["image"]


def notices_of(dataset: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        od.DataLoader(dataset, num_threads=0, **{"batch_size": 4, "dp": (1, 2)} | options)
    return [str(each.message) for each in caught if "no cost= is given" in str(each.message)]


def test_one_notice_in_a_process_names_what_gives_costs(mixed: od.ShardDataset, unwarned: None) -> None:
    mixed.index()
    for quiet in ({"dp": (0, 1)}, {"balance": "none"}, {"cost": TOKENS}):
        assert notices_of(mixed, **quiet) == []
    (notice,) = notices_of(mixed)
    assert "image, audio, llm" in notice and "od.hf.cost(model)" in notice and "od.TransformerCost" in notice
    assert notices_of(mixed) == []
