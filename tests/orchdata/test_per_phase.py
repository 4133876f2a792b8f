"""Encoders balanced apart: what is refused, and how features cross nodes; `test_per_phase_job` trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from albums import Album

import orchdata as od
from orchdata.balancers import lower_bound
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
from orchdata.ranks.agreement import Agreement

PER_PHASE = od.Balance(assignment="per_phase")


def loader(dataset: od.ShardDataset, rank: int = 0, num_ranks: int = 1, **options: Any) -> od.DataLoader:
    options = {"global_batch_size": 10, "num_threads": 0, "balance": PER_PHASE} | options
    return od.DataLoader(dataset, dp=(rank, num_ranks), **options)


def test_parts_travel_and_every_phase_is_balanced(dataset: od.ShardDataset) -> None:
    batches = [next(iter(loader(dataset, rank, 3, global_batch_size=30))) for rank in range(3)]
    plan = batches[0].plan
    assert len({batch.plan.hash for batch in batches}) == 1
    for phase in ("image", "audio"):
        parts = plan.parts[phase]
        assert (parts.rank != plan.rank[parts.sample]).any()
        assert plan.loads(phase).max() <= lower_bound(parts.costs, 3) * 1.03
        assert plan.imbalance(phase) < plan.loads_unbalanced(phase).max() / plan.loads_unbalanced(phase).mean()
    assert plan.imbalance("llm") < 1.02


def test_whole_samples_cannot_be_taken_apart(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="a collate_fn gets whole samples"):
        loader(dataset, collate_fn=list)
    with pytest.raises(ValueError, match="map-style data set are whole"):
        od.DataLoader([1, 2, 3], balance=PER_PHASE)


def planned(
    seed: int = 0, num_ranks: int = 4, batch: int = 32, *, ranks_per_node: int | None = None, **balance: Any
) -> Plan:
    source = Album(batch, seed)
    spec = PlanSpec(
        costs=source,
        order=Order(batch, shuffle=Shuffle(), seed=seed),
        balance=od.Balance(assignment="per_phase", **balance),
        num_ranks=num_ranks,
        batches=GlobalBatches(size=batch, drop_last=True),
        ranks_per_node=ranks_per_node,
    )
    return make_plan(spec, StepTask(0, 0))


def test_features_rather_stay_on_their_node() -> None:
    plan = planned(1, num_ranks=64, batch=256)
    aware = planned(1, num_ranks=64, batch=256, ranks_per_node=8)
    assert aware.row.tolist() == plan.row.tolist()  # Membership is the order's.
    assert np.array_equal(aware.rank, plan.rank)
    assert aware.hash != plan.hash  # Ranks that know different nodes would send features that no rank expects.
    unaware = replace(plan, ranks_per_node=8).feature_rows("image")
    rows = aware.feature_rows("image")
    assert rows[2] < 0.8 * unaware[2]
    assert aware.cells("image").max(axis=0).sum() <= 1.002 * plan.cells("image").max(axis=0).sum()
    # The same rows as the routes carry.
    ways = np.zeros(3, np.int64)
    for rank, microbatch in np.ndindex(64, aware.num_microbatches):
        for other, sent in enumerate(aware.route("image", rank, microbatch).send_rows):
            ways[0 if other == rank else 1 if other // 8 == rank // 8 else 2] += sent
    assert rows.tolist() == ways.tolist()
    # Where nodes are not known every rank is one.
    assert plan.feature_rows("image")[1] == 0


def test_a_loader_knows_nodes_from_the_launcher_and_tells_what_crosses_them(
    dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Any] = []  # To the other ranks, which must agree.

    def make(self: Agreement, make: Any, describe: Any) -> Any:
        described.append(describe(made := make())["ranks_per_node"])
        return made

    monkeypatch.setattr(Agreement, "make", make)
    loader(dataset, 0, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    paired = loader(dataset, 0, 4)
    loader(dataset, 0, 3)  # Three ranks are not on nodes of two,
    loader(dataset, 0, 4, balance="global")  # and nothing else depends on nodes.
    assert described == [None, 2, None, None]
    assert paired._runtime.prepared.spec.plan.ranks_per_node == 2

    steps = iter(paired)
    next(steps)
    state = paired.state_dict()
    list(steps)
    features = paired.stats()["features"]["image"]
    assert features["rows"] > 0
    assert 0 <= features["between_nodes"] <= 1 - features["within_nodes"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    resumed = loader(dataset, 0, 4)
    resumed.load_state_dict(state)  # Another node size plans other routes of the same samples.
    next(iter(resumed))
    assert resumed.stats()["features"]["image"]["between_nodes"] == 0
