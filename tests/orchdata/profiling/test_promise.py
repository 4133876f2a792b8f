"""What a profile says is what training gets: the same data, seed and options in DataLoaders of all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_factory import omni_shards, write_shard

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.planning.balance import Layout
from orchdata.planning.plan import Plan, make_plan
from orchdata.profiling import planned
from orchdata.profiling.content import Figures
from orchdata.profiling.profile import profile

RECIPE = od.Recipe(image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=1, max_tokens=64))
COST = od.CostModel(image=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.1))
RANKS, GROUP, STREAMS, SEED = 4, 2, 4, 7
CAPPED = od.Balance(max_tokens=200, oversize="own")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    return od.ShardDataset(omni_shards(tmp_path_factory.mktemp("promise"), shards=3, samples=20), recipe=RECIPE)


def texts(folder: Path, *lengths: int) -> Index:
    samples = [{"__key__": f"{number}", "txt": b"x" * length} for number, length in enumerate(lengths)]
    return build_index([write_shard(folder / "a.tar", samples)], RECIPE)


def train(dataset: od.ShardDataset, balance: od.Balance, layout: Layout) -> tuple[list[Plan], dict[str, Any]]:
    """The plans of an epoch, and what loaders say of it, which is the same on every rank."""
    dataset.index()  # which ranks of their own would not build
    plans, stats = [], []
    for rank in range(RANKS):
        loader = od.DataLoader(
            dataset,
            global_batch_size=12,
            shuffle=od.Shuffle(streams=STREAMS),
            seed=SEED,
            drop_last=True,
            cost=COST,
            balance=balance,
            collate_fn=layout,
            dp=(rank, RANKS),
            num_threads=0,
        )
        plans = [microbatches[0].plan for microbatches in loader.steps()]
        stats.append(loader.stats())
    for name in ("phases", "step_imbalance", "microbatches"):
        assert all(of_rank[name] == stats[0][name] for of_rank in stats)
    return plans, stats[0]


def look(dataset: od.ShardDataset, balance: od.Balance, layout: Layout, steps: int = 5) -> Figures:
    """The profile over the first steps of a run."""
    result = profile(
        dataset.index(),
        cost=COST,
        balance=balance,
        layout=layout,
        ranks=(RANKS,),
        batch_size=3,
        group_size=GROUP,
        streams=STREAMS,
        seed=SEED,
        steps=steps,
        most_steps=steps,
    )
    return result.scales[0]


@pytest.mark.slow_cases("Packed1", "Packed2", "Packed3", "Packed4", "Packed6")
@pytest.mark.parametrize(
    ("balance", "layout"),
    [
        (od.Balance(), od.Packed()),
        (CAPPED, od.Packed()),
        (od.Balance(max_tokens={"llm": 200, "image": 256}, oversize="own", assignment="per_phase"), od.Packed()),
        (replace(CAPPED, oversize="drop", scope="grouped", group_size=GROUP), od.Packed()),
        (replace(CAPPED, scope="grid", group_size=GROUP), od.Packed()),
        (replace(CAPPED, objective="sum"), od.Packed()),
        (replace(CAPPED, scope="none"), od.Packed(multiple_of=16)),
        (CAPPED, od.Padded(multiple_of=8)),
        (od.Balance(equal_count=True, max_tokens=200, oversize="own"), od.Packed()),
    ],
    ids=lambda value: "" if isinstance(value, od.Balance) else type(value).__name__,
)
def test_a_loader_reports_what_its_profile_said(dataset: od.ShardDataset, balance: od.Balance, layout: Layout) -> None:
    plans, stats = train(dataset, balance, layout)
    scale = look(dataset, balance, layout, len(plans))
    name = "per_phase" if balance.assignment == "per_phase" else balance.scope
    said = scale.settings["joint" if name == "global" else name]
    assert scale.steps == stats["steps"] == len(plans) > 3
    assert stats["microbatches"] == said.microbatches
    assert balance.max_tokens is None or said.microbatches > 1
    assert stats["step_imbalance"] == pytest.approx(1 / (1 - said.waiting))
    costs = [plan.cost(balance.price, COST.phases) for plan in plans]
    assert said.costliest == pytest.approx(max(costs) / np.mean(costs) / (1 - said.waiting))


def test_micro_steps_worked_out_by_hand(tmp_path: Path) -> None:
    # Texts of 160 together on two ranks, at most 40 in a microbatch: two microbatches of exactly 40 each.
    lengths = (30, 20, 20, 10, *[10] * 8)
    shard = write_shard(
        tmp_path / "a.tar", [{"__key__": f"{n}", "txt": b"x" * length} for n, length in enumerate(lengths)]
    )
    index = build_index([shard], RECIPE)
    balance = od.Balance(max_tokens=40)
    (scale,) = profile(index, balance=balance, ranks=(2,), batch_size=6).scales
    assert (scale.settings["joint"].microbatches, scale.settings["joint"].waiting) == (2, 0.0)


@pytest.mark.parametrize(("policy", "order"), [("own", 4), ("drop", 3)])
def test_samples_above_a_cap_are_counted(tmp_path: Path, policy: Any, order: int) -> None:
    index = texts(tmp_path, 20, 90, 20, 20)
    result = profile(index, balance=od.Balance(max_tokens=50, oversize=policy), ranks=(1,), batch_size=order)
    assert result.caps is not None
    assert (result.caps.above, result.caps.samples, result.samples) == ({"llm": 1}, 1, 4)
    assert not result.scales[0].less_than_a_step
    with pytest.raises(ValueError, match=r"'1' has 90 llm positions, max_tokens allows 50 \(the largest of 1 sample"):
        profile(index, balance=od.Balance(max_tokens=50))
    with pytest.raises(ValueError, match="all 4 usable samples are above max_tokens"):
        profile(index, balance=od.Balance(max_tokens=5, oversize="drop"))


def test_what_training_would_refuse_is_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="names phase 'video'"):
        profile(dataset.index(), balance=od.Balance(max_tokens={"video": 9}))
    with pytest.raises(ValueError, match=r"od.CostModel, as of od.hf.cost\(model\), got builtin"):
        profile(dataset.index(), cost=len)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="caps image, which od.Padded"):
        profile(dataset.index(), balance=od.Balance(max_tokens={"image": 999}), layout=od.Padded(encoders="padded"))
    with pytest.raises(ValueError, match="order='1f1b' is not profiled"):
        profile(dataset.index(), balance=od.Balance(order="1f1b", num_stages=2))
    with pytest.raises(ValueError, match="which teams cut"):
        profile(dataset.index(), balance=od.Balance(teams=od.Teams(largest=2, cut="trainer")), encoder_peers=2)


@pytest.mark.slow
@pytest.mark.parametrize("encode", ["micro_step", "step"])
def test_peers_share_what_each_of_them_would_encode(
    dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch, encode: Any
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(planned, "make_plan", lambda *its: plans.append(make_plan(*its)) or plans[-1])
    balance = od.Balance(max_tokens=200, oversize="own", assignment="per_phase", encode=encode)
    alone, settings = (
        dataset.profile(cost=COST, balance=balance, ranks=(RANKS,), most_steps=8, encoder_peers=peers)
        .scales[0]
        .settings
        for peers in (1, 3)
    )
    shared = [plan for plan in plans if plan.num_peers > 1]
    image, llm = (sum(int(plan.costs[phase].sum()) for plan in shared) for phase in COST.phases)
    # Of an even step's time, other settings have three times their encoder, and their LLM as it was.
    for name in alone.keys() - {"tokens"}:
        was, now = (
            [of[name].phases[phase] / (1 - of[name].waiting) for phase in COST.phases] for of in (alone, settings)
        )
        assert now == pytest.approx([3 * was[0] + 2 * image / (image + llm), was[1]])
    # Shared, the GPU counts that has most, by the rank and peer of its parts.
    cost = 0
    for plan in shared:
        parts, rounds = plan.parts["image"], plan.microbatch if plan.rounds is None else plan.rounds[plan.microbatch]
        loads = np.zeros((RANKS, 3, plan.num_microbatches), np.int64)
        np.add.at(loads, (parts.rank, parts.peer, rounds[parts.sample]), parts.costs)
        cost += 3 * int(loads.max(axis=(0, 1)).sum()) + int(plan.cells("llm").max(axis=0).sum())
    assert 1 / (1 - settings["peers"].waiting) == pytest.approx(cost * RANKS / (image + llm))
