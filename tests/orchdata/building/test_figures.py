"""Figures of a step: how they are measured, added and shown; and that one declaration does all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.building.figures import FIGURES, Figure, PlannedShare
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


@pytest.mark.parametrize(
    "engine", [{"num_threads": 0}, {"num_workers": 1, "multiprocessing_context": "fork"}], ids=["inline", "processes"]
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
