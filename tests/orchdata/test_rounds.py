"""Rounds: encoders that run once for several micro-steps train as those that run in each, on gloo ranks in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from albums import Album
from rank_jobs import run_ranks
from rounds_job import CASES
from rounds_job import __file__ as JOB
from shard_factory import RECIPE, jpeg, omni_samples, omni_shards, write_shard
from torch import Tensor, nn

import orchdata as od
from orchdata.balancers import lower_bound
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.ranks.agreement import Agreement

pytestmark = pytest.mark.usefixtures("same_cache")

TOLERANCE = 1e-12  # of the largest gradient


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps of 12: all kinds, one with a part that fails; texts alone; one image among texts; a rest of one sample."""
    samples = omni_samples(24)
    samples[1]["jpg"] = jpeg(90, 90)[:-200]
    texts = [{"__key__": f"t{number}", "txt": b"word " * (5 + number)} for number in range(24)]
    texts[15] |= {"jpg": jpeg(60, 60)}
    return write_shard(
        tmp_path_factory.mktemp("rounds") / "shard.tar", [*samples, *texts, *omni_samples(1, prefix="z")]
    )


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4)])
def trained(request: pytest.FixtureRequest, shards: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("job")
    return run_ranks(JOB, shards, json.dumps(list(CASES)), folder / "saved", num_ranks=request.param, folder=folder)


def test_gradients_are_those_of_encoding_every_micro_step(trained: list[dict[str, Any]]) -> None:
    for name, case in CASES.items():
        off = max(rank[name]["off"] for rank in trained)
        assert off > 1e-6 if case.spoilt else off < TOLERANCE, name


def test_parts_on_two_meshes_are_clipped_by_one_norm_and_saved_together(trained: list[dict[str, Any]]) -> None:
    for found in (rank["clipped"] for rank in trained if rank["clipped"]):
        for norm in (found["norm 2.0"], found["norm inf"]):
            assert norm["off"] < TOLERANCE
        assert found["norm 2.0"]["one"] < 0.9  # of one mesh alone
        assert found["left"] == 0 < found["moved"]
        assert set(found["steps"]) == {1}


def test_encoders_run_once_a_round(trained: list[dict[str, Any]]) -> None:
    for name, case in CASES.items():
        for rank in trained:
            for step in rank[name]["steps"]:
                assert step["calls"].count("image") == step["calls"].count("audio"), name
                assert step["calls"].count("image") == step["rounds"] * (1 + case.recompute), name
                if not case.capped:
                    most = step["micro_steps"] if case.encode == "step" else case.encode
                    assert step["rounds"] == -(-step["micro_steps"] // most), name
    steps = trained[0]["two ddp"]["steps"]
    in_twos = [(step["micro_steps"], step["rounds"]) for step in trained[0]["one ddp, rounds of 2"]["steps"]]
    assert (5, 3) in in_twos or (len(trained) == 4 and max(in_twos) > (2, 1)), in_twos
    assert any(1 < step["rounds"] < step["micro_steps"] for step in trained[0]["capped"]["steps"])
    assert any(not step["parts"]["image"] for step in steps)
    assert sum(step["failed"] for rank in trained for step in rank["two ddp"]["steps"]) == 1


OMNI = {"shards": 1, "samples": 60}


def steps_of(dataset: od.ShardDataset, encode: Any = "step", **options: Any) -> Any:
    """Whole steps of one rank, in several micro-steps."""
    balance = od.Balance(assignment="per_phase", max_tokens=100, oversize="own", encode=encode)
    return od.DataLoader(
        dataset, global_batch_size=10, balance=balance, num_threads=0, **({"dp": (0, 1)} | options)
    ).steps()


class Toy(nn.Module):
    """Returns two tensors of rows, as with deepstack; with dropout, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"image": nn.Linear(192, 4), "audio": nn.Linear(16, 4)})
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, name: str, media: Any) -> tuple[Tensor, Tensor]:
        (inputs,) = (media.arrays[each] for each in ("patches", "features") if each in media.arrays)
        rows = self.layers[name](inputs)
        rows = self.dropout(self.norm(rows.unflatten(0, (media.num_tokens or 1, -1)).mean(1)))
        return rows, rows.tanh()


def run(group: Any) -> None:
    for batch in group:
        for first, second in group.features(batch).values():
            (first.square().sum() + second.sum()).backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_round_is_run_backward_once_after_all_its_micro_steps(dataset: od.ShardDataset, recompute: bool) -> None:
    steps = steps_of(dataset)
    iterator = iter(steps)
    step = next(iterator)
    with pytest.raises(ValueError, match="all microbatches of a step"):
        next(od.rounds(step[1:], Toy()))
    group = next(following := od.rounds(step, Toy(), recompute=recompute))
    assert len(group) == len(step) > 2
    next(iter(group))
    with pytest.raises(RuntimeError, match=f"after 1 of its {len(step)} micro-steps"):
        group.backward()
    if recompute:  # whether encoders are trained shows in the first gradient
        run(group)
    for ask in (steps.state_dict, lambda: next(iterator), lambda: next(following)):
        with pytest.raises(RuntimeError, match="before backward"):
            ask()
    run(group)
    group.backward()
    with pytest.raises(RuntimeError, match="twice"):
        group.backward()
    with pytest.raises(ValueError, match="features were freed"):
        group.features(step[0])
    assert steps.state_dict()["step"] == 1
    next(iterator)


@pytest.mark.parametrize("recompute", [False, True])
def test_encoders_without_a_graph_need_no_backward(dataset: od.ShardDataset, recompute: bool) -> None:
    iterator = iter(steps_of(dataset, encode=2))
    step, frozen = next(iterator), Toy().requires_grad_(False).eval()
    groups = list(od.rounds(step, frozen, recompute=recompute))
    assert [len(group) for group in groups] == [2] * (len(step) // 2) + [1] * (len(step) % 2)
    for group in groups:
        found = [rows.requires_grad for batch in group for both in group.features(batch).values() for rows in both]
        assert recompute or not any(found)
        group.backward()
    next(iterator)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("failing", ["loss", "encoder"])
def test_a_step_that_failed_is_given_up_by_leaving_its_loop(
    dataset: od.ShardDataset, recompute: bool, failing: str
) -> None:
    steps, toy = steps_of(dataset, encode=2), Toy()
    iterator, state = iter(steps), None

    def encode(name: str, media: Any) -> Any:
        rows = toy(name, media)
        if failing == "encoder" and rows[0].requires_grad:
            rows[0].register_hook(lambda _: 1 / 0)
        return rows

    with pytest.raises(ZeroDivisionError):
        for group in od.rounds(next(iterator), encode, recompute=recompute):
            try:
                run(group)
                1 / (failing != "loss")
                group.backward()
            finally:
                if failing == "encoder":
                    state = steps.state_dict()  # inside of the loop: this round is over
    assert state in (None, steps.state_dict())
    group = next(od.rounds(next(iterator), toy, recompute=recompute))
    run(group)
    with pytest.raises(RuntimeError, match=r"call group.drop\(\)"):
        next(iterator)
    group.drop()
    next(iterator)


def test_what_would_train_encoders_on_nothing_is_refused(dataset: od.ShardDataset) -> None:
    steps, toy = steps_of(dataset, encode=2), Toy()
    iterator = iter(steps)
    step = next(iterator)
    for recompute in (False, True):
        group = next(groups := od.rounds(step, toy, recompute=recompute))
        for batch in group:
            group.features(batch)
        with pytest.raises(ValueError, match="not of this round, of 2 micro-steps"):
            group.features(step[2])
        with pytest.raises(RuntimeError, match="no gradient in any row"):
            group.backward()
        groups.close()
    for output in (None, (), {"rows": torch.ones(3, 4)}, torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"encode\('image', media\) returned"):
            next(od.rounds(step, lambda *_, output=output: output))


def test_a_run_left_inside_a_round_goes_on_by_micro_step_on_other_ranks(dataset: od.ShardDataset) -> None:
    seen: list[Any] = []
    for rank in range(2):
        steps = steps_of(dataset, dp=(rank, 2))
        iterator = iter(steps)
        seen += [key for batch in next(iterator) for key in batch.sample_ids]
        state = steps.state_dict()
        next(od.rounds(next(iterator), Toy()))
    for rank in range(3):
        steps = steps_of(dataset, "micro_step", dp=(rank, 3))
        steps.load_state_dict(state)
        seen += [key for step in steps for batch in step for key in batch.sample_ids]
    assert len(seen) == len(set(seen)) == steps.num_samples


@pytest.mark.parametrize("autocast", [False, True])
def test_a_recomputed_round_has_the_same_gradients_and_statistics(dataset: od.ShardDataset, autocast: bool) -> None:
    step, found = next(iter(steps_of(dataset))), []
    for recompute in (False, True):
        toy = Toy()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for group in od.rounds(step, toy, recompute=recompute):
                run(group)
                group.backward()
        found.append([parameter.grad for parameter in toy.parameters()] + list(toy.buffers()) + [torch.rand(1)])
        assert toy.norm.num_batches_tracked == 2  # images and audio
    for kept, recomputed in zip(*found, strict=True):
        assert kept is not None
        assert torch.equal(kept, recomputed)


# Encoders balanced apart: what is refused, and how features cross nodes; `test_per_phase_job` trains.


PER_PHASE = od.Balance(assignment="per_phase")


def loader(dataset: od.ShardDataset, rank: int = 0, num_ranks: int = 1, **options: Any) -> od.DataLoader:
    options = {"global_batch_size": 10, "num_threads": 0, "balance": PER_PHASE} | options
    return od.DataLoader(dataset, dp=(rank, num_ranks), **options)


def test_parts_travel_and_every_phase_is_balanced(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=2, samples=15), RECIPE)
    dataset.index()
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
