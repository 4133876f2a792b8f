"""Figures of a step: how they are measured, added and shown; and that one declaration does all of it."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.building.figures import FIGURES, Figure, PlannedShare
from orchdata.delivery.stats import Stats
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import make_plan


@pytest.mark.parametrize("kind", ["shards", "costs", "equal", "empty"])
def test_figures_of_one_rank_alone_are_those_worked_out_in_full(kind: str, tmp_path: Path) -> None:
    cost = od.CostModel(image=od.PhaseCost(2.0), audio=od.PhaseCost(1.0, 0.5), llm=od.PhaseCost(1.0))
    data, options = {
        "shards": (od.ShardDataset(omni_shards(tmp_path, shards=1, samples=12), recipe=RECIPE), {"cost": cost}),
        "costs": (Numbers(12), {"cost": list(range(12))}),
        "equal": (Numbers(12), {}),
        "empty": (Numbers(12), {}),
    }[kind]
    arguments: dict[str, Any] = options  # type: ignore[assignment]
    spec = od.DataLoader(data, batch_size=5, dp=(0, 1), **arguments)._runtime.prepared.spec.plan
    rows = {"equal": np.arange(5), "empty": np.arange(0), "costs": np.array([3, 0, 11])}.get(kind)
    plan = make_plan(spec, StepTask(0, 0, rows))
    alone, full = PlannedShare(spec, plan, 0), PlannedShare(spec, plan, 0)
    assert alone.is_alone
    full.is_alone = False
    assert FIGURES
    for figure in FIGURES:
        assert figure.measure(alone) == figure.measure(full), figure.name


def test_numbers_are_added_each_by_its_own_rule() -> None:
    figure = Figure("any", lambda share: None, lambda total, num_steps: total, {}, (operator.add, max))
    total: Any = {}
    for numbers in ({"a": (1, 5)}, None, {"a": (2, 3), "b": (1, 1)}):
        total = figure.added(total, numbers)
    assert total == {"a": (3, 5), "b": (1, 1)} and figure.start == {}


@pytest.mark.parametrize(
    "engine",
    [{"num_threads": 0}, {"num_workers": 1, "multiprocessing_context": "fork"}],
    ids=["inline", "processes"],
)
def test_a_new_figure_is_its_declaration_alone(engine: dict[str, Any], tmp_path: Path) -> None:
    longest = Figure("longest", lambda share: int(share.lengths.max()), lambda total, num_steps: total, 0, max)
    data = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=12), recipe=RECIPE)
    FIGURES.append(longest)
    try:
        loader = od.DataLoader(data, batch_size=3, **engine)
        batches = list(loader)
        assert loader.stats()["longest"] == max(int(batch.plan.llm_positions.max()) for batch in batches) > 0
        assert (loader.stats()["milliseconds"]["handing_over"] > 0) == ("num_workers" in engine)
        loader.close()
    finally:
        FIGURES.remove(longest)


def test_names_of_stats_stay() -> None:
    stats = Stats().as_dict()
    assert (
        list(stats)
        == (
            "since steps samples loss_tokens overflow phases microbatches step_imbalance step_imbalance_unbalanced "
            "saved padding_if_padded fill own_streams features sources read_amplification reads milliseconds failures"
        ).split()
    )
    assert list(stats["milliseconds"]) == "waiting planning reading decoding packing handing_over".split()
    assert stats["overflow"] == {"truncated": 0, "cut_tokens": 0, "split": 0, "pieces": 0}
    none = {"fill": None, "own_streams": None, "read_amplification": None, "reads": None}
    zero = {"samples": 0, "loss_tokens": 0, "microbatches": 0, "padding_if_padded": 0, "saved": 0}
    one = {"step_imbalance": 1, "step_imbalance_unbalanced": 1}
    empty = {"phases": {}, "features": {}, "sources": {}}
    assert stats == stats | none | zero | one | empty
