"""Figures of a step: of one rank alone, whose loads are sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.building.figures import step_figures
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import make_plan
from orchdata.planning.sharing.packed import NoPadding


@pytest.mark.parametrize("kind", ["shards", "costs", "equal", "empty"])
def test_figures_of_one_rank_alone_are_those_worked_out_in_full(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    alone = step_figures(spec, plan, 0, 0)
    monkeypatch.setattr(NoPadding, "adds_up", False)
    assert step_figures(spec, plan, 0, 0) == alone
