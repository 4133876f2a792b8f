"""Costs of the items of a map-style data set: by workers or here, kept under a name, and never silently old."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shard_factory import SKIP_ANY, omni_shards

import orchdata as od
from benchmarks.distributions import LARGE_VISION_COST
from orchdata.bench import OMNI_COST, synthetic_index
from orchdata.dataset import map_style as kept
from orchdata.dataset.indexed import IndexCosts
from orchdata.dataset.map_style import ItemCosts
from orchdata.engines.engine import Workers
from orchdata.loaders.errors import FunctionError
from orchdata.loaders.index.index import Index
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan

HERE, TWO = Workers(), Workers(num_workers=2, multiprocessing_context=multiprocessing.get_context("fork"))


class Items:
    """Items with a value; some cannot be loaded."""

    def __init__(self, values: list[Any], bad: tuple[int, ...] = ()) -> None:
        self.values = values
        self.bad = bad

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number in self.bad:
            raise OSError("disk on fire")
        return {"value": self.values[number], "pid": os.getpid()}


class Counted:
    """A cost that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: dict[str, Any]) -> int:
        self.calls += 1
        return int(item["value"])


def value_of(item: dict[str, Any]) -> int:
    return item["value"]  # type: ignore[no-any-return]


def loader(values: list[Any], cost: Any, bad: tuple[int, ...] = (), **options: Any) -> od.DataLoader[Any]:
    return od.DataLoader(Items(values, bad), batch_size=4, cost=cost, **options)


def costs_in(made: od.DataLoader[Any]) -> Any:
    return made.state_dict()["fingerprint"]["dataset"]["costs"]


def test_workers_and_this_process_find_the_same() -> None:
    values = list(range(100))
    before, seen = torch.get_rng_state(), []
    for workers in (HERE, TWO):
        items = ItemCosts(Items(values, bad=(3, 70)), value_of, skip_errors=True)
        costs, failures = items.measured(np.arange(100), workers, lambda done, total: seen.append((done, total)))
        assert costs.tolist() == [-1 if number in (3, 70) else number for number in values]
        assert [failure.key for failure in failures] == ["3", "70"] and "disk on fire" in failures[0].reason
        assert seen[-1] == (100, 100) and seen == sorted(seen) and len(seen) > 3
        seen.clear()
    assert torch.equal(torch.get_rng_state(), before)  # epochs draw from it
    assert costs_in(loader(values, value_of)) == costs_in(loader(values, value_of, num_workers=2))


@pytest.mark.parametrize("workers", [HERE, TWO], ids=["here", "workers"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0.5, "returned 0.5: costs are integers; scale and round them"),
        (True, "returned True"),
        (-1, "returned -1: costs are integers from 0"),
        (2**63, ".*costs are integers from 0"),
        (ZeroDivisionError, "raised TypeError"),
    ],
)
def test_what_is_no_cost_names_function_and_item(workers: Workers, value: Any, reason: str) -> None:
    cost: Callable[[Any], Any] = (lambda item: item["value"] + 0) if value is ZeroDivisionError else value_of
    items = ItemCosts(Items([1] * 40 + [value]), cost, skip_errors=True)
    with pytest.raises(FunctionError, match=rf"cost: .* of item 40 of Items {reason}"):
        items.measured(np.arange(41), workers)
    assert not multiprocessing.active_children()


def test_ctrl_c_leaves_no_worker() -> None:
    def interrupt(done: float, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ItemCosts(Items([1] * 500), value_of, skip_errors=False).measured(np.arange(500), TWO, interrupt)
    assert not multiprocessing.active_children()


def test_costs_are_kept_under_a_name_alone() -> None:
    cost, values = Counted(), list(range(50))
    for _ in range(2):
        loader(values, cost)
    assert cost.calls == 100
    first = costs_in(loader(values, cost, cost_id="values, 1"))
    assert cost.calls == 150
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs_in(loader(values, cost, cost_id="values, 1")) == first
    assert cost.calls == 158  # some are compared
    loader(values, cost, cost_id="values, 2")
    loader(values[:-1], cost, cost_id="values, 1")
    assert cost.calls == 158 + 50 + 49


def test_old_costs_are_measured_again_with_a_warning() -> None:
    values = list(range(50))
    loader(values, value_of, cost_id="old")
    with pytest.warns(
        UserWarning, match=r"'old' \(cost_id\) are measured again: item \d+ had the cost \d+, and now has"
    ):
        made = loader([2 * value + 1 for value in values], value_of, cost_id="old")
    assert costs_in(made) == costs_in(loader([2 * value + 1 for value in values], value_of))

    def other(item: dict[str, Any]) -> int:
        return int(item["value"]) + 0

    with pytest.warns(UserWarning, match="source text of the function is another one"):
        loader([2 * value + 1 for value in values], other, cost_id="old")


def test_a_data_set_with_another_fingerprint_has_other_costs() -> None:
    cost, data = Counted(), Items(list(range(20)))
    for fingerprint in ("a", "b", "a"):
        data._fingerprint = fingerprint  # type: ignore[attr-defined]
        od.DataLoader(data, batch_size=4, cost=cost, cost_id="hf")
    assert cost.calls == 20 + 20 + 8


def test_items_that_failed_are_tried_again() -> None:
    cost, values = Counted(), list(range(1, 51))
    failed = loader(values, cost, bad=(7, 9), on_error=SKIP_ANY, cost_id="again")
    assert failed.stats()["failures"]["count"] == 2 and cost.calls == 48
    repaired = loader(values, cost, on_error=SKIP_ANY, cost_id="again")
    assert repaired.stats()["failures"]["count"] == 0 and cost.calls == 48 + 8 + 2
    assert costs_in(repaired) == costs_in(loader(values, value_of))
    loader(values, cost, on_error="raise", cost_id="again")
    assert cost.calls == 48 + 8 + 2 + 8  # all are kept now


def test_one_rank_measures_and_the_others_wait_for_it() -> None:
    cost, entered = Counted(), threading.Event()
    made: list[Any] = []

    def waiting(item: dict[str, Any]) -> int:
        entered.set()
        return cost(item)

    def make(rank: int) -> None:
        made.append(costs_in(loader(list(range(50)), waiting, cost_id="ranks", dp=(rank, 2))))

    ranks = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    ranks[0].start()
    assert entered.wait(60)
    ranks[1].start()
    for rank in ranks:
        rank.join()
    assert made[0] == made[1] and cost.calls == 50 + 8


def test_ranks_of_a_job_need_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path))
    asked: dict[str, str] = {}
    job = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setattr(kept, "dist", job)
    monkeypatch.setattr(kept, "done_by_first", lambda name, work: asked.setdefault(name, work()))
    cost = Counted()
    for _ in range(2):  # of each rank: loaders of training and evaluation data
        monkeypatch.setattr(kept, "_made_in_job", Counter())
        for values in (list(range(50)), list(range(7, 57))):
            costs, _ = kept.costs_of_items(ItemCosts(Items(values), cost, False), None, HERE, is_shared=True)
            assert costs.tolist() == values
    assert len(asked) == 2 and cost.calls == 2 * (50 + 8)
    files = list((tmp_path / "item_costs").iterdir())
    assert len(files) == 2 and all(path.name.startswith("job-") for path in files)
    os.utime(files[0], (0, 0))
    kept.costs_of_items(ItemCosts(Items([1]), cost, False), None, HERE, is_shared=True)
    assert not files[0].exists() and files[1].exists()
    kept.costs_of_items(ItemCosts(Items([1, 2]), cost, False), None, HERE)  # a loader of this rank alone
    assert len(list((tmp_path / "item_costs").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cost": [1, 2, 3], "cost_id": "a"}, ValueError),
        ({"cost_id": "a"}, ValueError),
        ({"cost": value_of, "cost_id": ""}, TypeError),
        ({"cost": value_of, "cost_id": 5}, TypeError),
    ],
)
def test_a_name_without_a_function_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="cost_id"):
        od.DataLoader(Items([1, 2, 3]), **options)


# Without `cost=` every phase of the data costs its positions, and one notice says how to do better.


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
