"""`stats()` says what steps would cost without balancing, since when it counts, and every key is in the docs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from map_dataset import Numbers

import orchdata as od
from orchdata.building import step as building
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import PlanSpec, make_plan

pytestmark = pytest.mark.usefixtures("same_cache")

COST = od.CostModel(image=od.PhaseCost(2.0), audio=od.PhaseCost(1.0, 0.5), llm=od.PhaseCost(1.0, 0.01))


def make(dataset: Any, **options: Any) -> od.DataLoader:
    fixed = {"batch_size": 4, "dp": (0, 3), "shuffle": True, "num_threads": 0, "cost": COST}
    return od.DataLoader(dataset, **fixed | options)


def spec_of(loader: od.DataLoader) -> PlanSpec:
    return loader._runtime.prepared.spec.plan


def shown(spec: PlanSpec) -> dict[str, Any]:
    """The figures of an epoch that a loader of this spec would show."""
    totals = building.START
    for step in range(spec.num_steps):
        totals = building.added(totals, building.step_figures(spec, make_plan(spec, StepTask(0, step)), 0, 0))
    return building.shown(totals, spec.num_steps)


@pytest.mark.parametrize("layout", [od.Packed(), od.Padded()])
@pytest.mark.parametrize("objective", ["barrier", "sum"])
def test_without_balancing_is_what_dealing_in_turn_costs(dataset: od.ShardDataset, objective: Any, layout: Any) -> None:
    spec = spec_of(make(dataset, balance=od.Balance(objective=objective), collate_fn=layout))
    found = shown(spec)
    dealt = shown(replace(spec, balance=replace(spec.balance, scope="none")))
    assert found["step_imbalance_unbalanced"] == dealt["step_imbalance"] == dealt["step_imbalance_unbalanced"]
    assert dealt["saved"] == 0
    assert found["saved"] == pytest.approx(1 - found["step_imbalance"] / found["step_imbalance_unbalanced"])
    assert 0.05 < found["saved"] < 1
    for phase, ratios in found["phases"].items():
        assert ratios["imbalance_unbalanced"] == dealt["phases"][phase]["imbalance"]
        assert ratios["imbalance_unbalanced_in_micro_steps"] == dealt["phases"][phase]["imbalance_in_micro_steps"]


def test_an_interval_has_its_own_steps(dataset: od.ShardDataset) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    loader = make(dataset)
    steps = iter(loader.steps())
    for _ in range(3):
        next(steps)
    first = loader.stats(reset=True)
    assert before <= datetime.fromisoformat(first["since"]) <= datetime.now(UTC)
    assert first["steps"] == 3 and first["reads"]["used_bytes"] > 0
    empty = loader.stats()
    assert (empty["steps"], empty["samples"], empty["phases"], empty["milliseconds"]["waiting"]) == (0, 0, {}, 0)
    assert empty["reads"] == dict.fromkeys(empty["reads"], 0) and empty["read_amplification"] is None
    assert datetime.fromisoformat(empty["since"]) >= datetime.fromisoformat(first["since"])
    next(steps)
    second, whole = loader.stats(), make(dataset)
    list(whole.steps())
    assert second["steps"] == 1
    assert first["samples"] + second["samples"] == whole.stats()["samples"]
    assert first["loss_tokens"] + second["loss_tokens"] == whole.stats()["loss_tokens"]


def test_failures_are_counted_since_the_loader_was_made(dataset: od.ShardDataset, tmp_path: Path) -> None:
    class Broken(Numbers):
        def __getitem__(self, row: int) -> Any:
            if row == 3:
                raise ValueError("broken")
            return super().__getitem__(row)

    loader = od.DataLoader(Broken(8), batch_size=2, on_error="skip", num_threads=1)
    list(loader)
    assert loader.stats(reset=True)["failures"]["count"] == 1
    assert loader.stats()["failures"]["count"] == 1 and len(loader.gather_failures()) == 1


def keys_of(stats: dict[str, Any]) -> Iterator[str]:
    """All keys but names of phases, sources and reasons."""
    for key, value in stats.items():
        yield key
        inner = list(value.values()) if key in ("phases", "features", "sources") else [value]
        for each in inner:
            if isinstance(each, dict) and key != "by_reason":
                yield from keys_of(each)


def test_every_key_is_in_the_docs(dataset: od.ShardDataset) -> None:
    mixture = od.Mixture({"one": od.Source(dataset), "two": od.Source(dataset)})
    found = set()
    for data, options in ((dataset, {"balance": od.Balance(assignment="per_phase")}), (mixture, {})):
        loader = make(data, **options)
        next(iter(loader.steps()))
        found |= set(keys_of(loader.stats()))
    assert {"rows", "passes", "imbalance", "waiting", "by_reason", "cut_tokens", "used_bytes"} <= found
    page = Path(__file__).resolve().parents[3].joinpath("docs", "stats.md").read_text()
    assert sorted(key for key in found if f"`{key}`" not in page) == []
