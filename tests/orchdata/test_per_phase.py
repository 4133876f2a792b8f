"""Encoders balanced apart: every part is encoded once, its features arrive where its sample is, and all else stays.

All ranks of a step are made in this process, and what `exchange` would carry is carried by hand along their routes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from albums import Album
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import RECIPE, omni_shards
from torch import Tensor

import orchdata as od
from orchdata.balancers import lower_bound
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.layout import Layout
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.ranks.agreement import Agreement

PER_PHASE = od.Balance(assignment="per_phase")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=15)


@pytest.fixture
def dataset(shards: list[str]) -> od.ShardDataset:
    dataset = od.ShardDataset(shards, recipe=RECIPE)
    dataset.index()
    return dataset


def loader(dataset: od.ShardDataset, rank: int = 0, num_ranks: int = 1, **options: Any) -> od.DataLoader:
    options = {"global_batch_size": 10, "num_threads": 0, "balance": PER_PHASE} | options
    return od.DataLoader(dataset, dp=(rank, num_ranks), **options)


def rows_of_tokens(batch: od.Batch, name: str) -> Tensor:
    """What the encoder would make tokens of: (num_tokens, values a token)."""
    media = getattr(batch, name)
    rows = media.patches if name == "image" else media.features
    return rows.reshape(-1, rows.shape[-1] * 4)[: media.num_tokens]  # 2 x 2 patches, or 4 frames


def carry(features: list[Tensor], routes: list[Route]) -> list[Tensor]:
    """What `exchange` does on all ranks, by hand."""
    grouped = []
    for rows, route in zip(features, routes, strict=True):
        assert len(rows) == route.num_rows_in
        if route.zeroed is not None:
            rows = rows.index_fill(0, torch.from_numpy(route.zeroed), 0)
        assert route.send_order is None and route.receive_order is None  # nothing is copied to group or order it
        grouped.append(rows.split(route.send_rows.tolist()))
    for rank, route in enumerate(routes):
        assert [len(theirs[rank]) for theirs in grouped] == route.receive_rows.tolist()
    return [torch.cat([theirs[rank] for theirs in grouped]) for rank in range(len(routes))]


def delivered(steps: list[list[od.Batch]]) -> dict[str, tuple[Tensor, ...]]:
    """Key -> ids, labels, positions and what stands where its features go, from the batches [rank][microbatch]."""
    columns_of = {}
    for batches in zip(*steps, strict=True):
        carried = {}
        for name in ("image", "audio"):
            rows = [rows_of_tokens(batch, name) for batch in batches]
            if batches[0].routes:
                rows = carry(rows, [batch.route(name) for batch in batches])
            carried[name] = rows
        for rank, batch in enumerate(batches):
            llm = batch.llm
            columns = [llm.input_ids, llm.labels, llm.position_ids]
            for name in ("image", "audio"):
                where = getattr(llm, f"{name}_positions")
                placed = torch.zeros(llm.input_ids.numel(), carried[name][rank].shape[-1])
                placed[where] = carried[name][rank].float()
                columns.append(placed.reshape(*llm.input_ids.shape, -1).movedim(-1, 0))
            for number, (_, key) in enumerate(batch.sample_ids):
                if llm.attention_mask is None:
                    start, stop = llm.cu_seqlens[number : number + 2].tolist()
                    columns_of[key] = tuple(column[..., start:stop] for column in columns)
                else:
                    length = int(llm.attention_mask[number].sum())
                    columns_of[key] = tuple(column[..., number, :length] for column in columns)
    return columns_of


def epoch(dataset: od.ShardDataset, num_ranks: int, **options: Any) -> dict[str, tuple[Tensor, ...]]:
    return delivered([list(loader(dataset, rank, num_ranks, **options)) for rank in range(num_ranks)])


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("layout", "max_tokens"),
    [
        (od.Packed(positions="mrope", multiple_of=8), 150),
        (od.Packed(), {"llm": 150, "image": 60}),
        (od.Padded(positions="mrope"), {"llm": 300, "image": 80}),
    ],
)
def test_samples_get_the_features_they_would_have_at_home(
    dataset: od.ShardDataset, layout: Layout, max_tokens: Any, num_ranks: int
) -> None:
    home = epoch(dataset, 1, collate_fn=type(layout)(positions=layout.positions), balance="none")
    balance = od.Balance(assignment="per_phase", max_tokens=max_tokens, oversize="own")
    received = epoch(dataset, num_ranks, collate_fn=layout, balance=balance)
    assert received.keys() == home.keys()
    for key, columns in home.items():
        for ours, theirs in zip(received[key], columns, strict=True):
            padded = ours.shape[-1] - theirs.shape[-1]
            assert 0 <= padded < 8 and torch.equal(ours[..., : theirs.shape[-1]], theirs)


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


# Plans


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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 7),
    batch=st.integers(1, 40),
    llm=st.sampled_from([None, 700, 1_500]),
    image=st.sampled_from([None, 1_200, 2_000]),
    scope=st.sampled_from(["none", "grouped", "grid", "global"]),
)
def test_each_part_is_encoded_once_in_its_samples_micro_step(
    seed: int, num_ranks: int, batch: int, llm: int | None, image: int | None, scope: str
) -> None:
    caps = {phase: cap for phase, cap in (("llm", llm), ("image", image)) if cap}
    group = {"group_size": 2} if scope in ("grouped", "grid") else {}
    plan = planned(seed, num_ranks, batch, scope=scope, max_tokens=caps or None, **group)
    parts = plan.parts["image"]
    for microbatch in range(plan.num_microbatches):
        encoded = [plan.encoded("image", rank, microbatch) for rank in range(num_ranks)]
        arriving = [plan.arriving("image", rank, microbatch) for rank in range(num_ranks)]
        members = np.flatnonzero(plan.microbatch[parts.sample] == microbatch)
        assert np.array_equal(np.sort(np.concatenate(encoded)), members)
        assert np.array_equal(np.sort(np.concatenate(arriving)), members)
        for rank in range(num_ranks):
            route = plan.route("image", rank, microbatch)
            assert route.num_rows_in == parts.tokens[encoded[rank]].sum()
            assert route.num_rows_out == parts.tokens[arriving[rank]].sum()
            assert route.parts.num_rows_out == len(arriving[rank])
            assert set(plan.rank[parts.sample[arriving[rank]]]) <= {rank}
            if image:
                assert parts.positions[encoded[rank]].sum() <= image
            if llm:
                assert plan.llm_positions[plan.places(rank, microbatch)].sum() <= llm
    home = plan.rank[parts.sample]
    if scope == "none":
        assert np.array_equal(parts.rank, home)
    if scope == "grouped":
        assert np.array_equal(parts.rank // 2, home // 2)
    assert plan.cells("image").sum() == parts.costs.sum()
    assert np.array_equal(plan.assignment("image"), parts.rank)


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


# Failures
