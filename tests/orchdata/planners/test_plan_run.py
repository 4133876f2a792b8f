"""Plans of runs: what is promised is simulated, what changes nothing changes nothing, and bad input is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planned_call_job
import pytest
from planned_again import made_up
from shard_factory import RECIPE, omni_shards
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.cli.plan_run import _modules
from orchdata.planners import (
    Assumed,
    Cluster,
    Columns,
    Layout,
    Module,
    Placement,
    RunPlan,
    Workload,
    cells,
    plan_run,
    simulate,
)
from orchdata.planners.cluster import Means
from orchdata.planners.run import call_of, candidates

SEEDS = range(5)
TOKENS = (4096, 16384)
SHAPE = {"hidden": 256, "layers": 2, "ffn": 512, "heads": 2}


def least(modules: Any, workload: Workload, cluster: Cluster) -> float:
    """The optimum of the closed form."""
    found, _ = candidates(modules, Means(workload, cluster), TOKENS, {}, 1)
    return min((ranked[0].seconds for ranked in found.values() if ranked), default=np.inf)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_gpus_and_faster_links_are_never_worse(seed: int) -> None:
    modules, workload, cluster = made_up(seed, modules=2 + seed % 2)
    now = least(modules, workload, cluster)
    assert least(modules, workload, replace(cluster, gpus=cluster.gpus + 1 + seed)) <= now
    assert least(modules, workload, replace(cluster, between=2 * cluster.between)) <= now
    assert least(modules, workload, replace(cluster, within=2 * cluster.within)) <= now


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_simulated_steps_are_within_two_percent_of_that(seed: int) -> None:
    modules, workload, cluster = made_up(seed, modules=2 + seed % 2)
    now = plan_run(modules, workload, cluster).choices[0].seconds
    faster = {"between": 2 * cluster.between}, {"within": 2 * cluster.within}, {"gpus": cluster.gpus + 1 + seed}
    for changes in faster:
        assert plan_run(modules, workload, replace(cluster, **changes)).choices[0].seconds <= 1.02 * now
    halved = {name: getattr(cluster, name) / 2 for name in ("operations", "memory_bandwidth", "within", "between")}
    slow = replace(cluster, **halved)
    assert least(modules, workload, slow) == pytest.approx(2 * least(modules, workload, cluster), rel=1e-12)
    assert plan_run(modules, workload, slow).choices[0].seconds == pytest.approx(2 * now, rel=0.02)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[2:])])
def test_promised_seconds_are_simulated_in_any_order_of_modules(seed: int) -> None:
    modules, workload, cluster = made_up(seed, modules=2 + seed % 2)
    plan = plan_run(modules, workload, cluster)
    assert RunPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan_run(modules[::-1], workload, cluster) == plan
    for choice in plan.choices:
        found = simulate(Layout.from_dict(choice.layout.to_dict()), workload, cluster)
        assert (choice.seconds, choice.memory) == (found.seconds.mean(), found.bytes)
        assert max(choice.memory.values()) <= 0.9 * cluster.memory
    assert [choice.seconds for choice in plan.choices] == sorted(choice.seconds for choice in plan.choices)
    assert plan.assumptions[0].startswith("declared")


def test_what_this_loader_does_not_serve_is_marked_and_not_recommended() -> None:
    modules, workload, cluster = made_up(1, gpus=16)
    plan = plan_run(modules, workload, cluster)
    marks = {choice.layout.kind: choice.runs for choice in plan.choices}
    assert marks["own"] == "Megatron-LM MIMO, not this loader"
    assert plan.choices[plan.recommended or 0].runs == marks["one"] == ""


def test_encoders_shared_among_peers_run_without_a_pipeline() -> None:
    modules, workload, cluster = made_up(1, gpus=16)
    plan = plan_run(modules, workload, cluster, keep={"llm": {"tp": 2, "pp": 1}})
    shared = next(choice for choice in plan.choices if choice.layout.kind == "shared")
    assert shared.runs == ""
    call = call_of(shared.layout, workload, cluster)
    assert 'dp=od.DataParallel(mesh, encoder_dims=("tp",))' in call
    assert 'assignment="per_phase", encode="micro_step"' in call


def test_what_is_kept_is_kept() -> None:
    modules, workload, cluster = made_up(1, gpus=16)
    heads = modules[-1].cost.heads
    plan = plan_run(modules, workload, cluster, keep={"llm": {"tp": heads, "dp": 2}}, max_tokens=16_384)
    assert {(each.layout.llm.tp, each.layout.llm.dp) for each in plan.choices} == {(heads, 2)}
    assert {each.layout.microbatch_tokens for each in plan.choices} == {16_384}
    assert f"of {cluster.gpus} GPUs stay idle" in plan.call


def test_cells_fit_and_say_their_gpus() -> None:
    modules, workload, cluster = made_up(2, gpus=8)
    found = cells(modules[-1], workload, cluster)
    assert all(cell.bytes <= 0.9 * cluster.memory and cell.placement.gpus <= 8 for cell in found)
    assert {cell.placement.sharding for cell in found} == {None, "optimizer", "full"}
    assert len({str(cell.to_dict() | {"seconds": 0, "bytes": 0}) for cell in found}) == len(found)
    alone = Workload(steps=workload.steps, phases={"llm": workload.phases["llm"]})
    best = min(found, key=lambda cell: cell.seconds)
    kind: Any = "first_stage" if best.placement.pp > 1 else "one"
    layout = Layout(placements=(best.placement,), kind=kind, microbatch_tokens=best.microbatch_tokens)
    assert simulate(layout, alone, cluster).seconds.mean() == pytest.approx(best.seconds, rel=0.3)


def two_towers(kind: Any, **split: Any) -> Layout:
    """An image tower split in a way next to an LLM on one GPU."""
    image, llm = Placement(module=Module("image", SMALL), **split), Placement(module=Module("llm", SMALL))
    return Layout(placements=(image, llm), kind=kind, microbatch_tokens=1)


def bad_workload(**changes: Any) -> Workload:
    column = {"offsets": [0, 1, 2], "positions": [5, 6], "tokens": [5, 6], "costs": [5, 6], **changes}
    return Workload(steps=[0, 2], phases={"llm": Columns(**column)})


def without_image() -> RunPlan:
    modules, workload, cluster = made_up(0)
    return plan_run(modules[1:], workload, cluster)


def too_large() -> RunPlan:
    modules, workload, cluster = made_up(0)
    return plan_run([replace(modules[0], parameters=1e15), modules[1]], workload, cluster)


def short() -> RunPlan:
    modules, workload, cluster = made_up(0)
    return plan_run(modules, workload, cluster, max_tokens=100)


def shared() -> object:
    (*_, module), workload, cluster = made_up(0, modules=1)
    layout = Layout(placements=(Placement(module=module),), microbatch_tokens=1 << 20)
    return simulate(layout, workload, cluster, balance=od.Balance(teams=od.Teams(largest=2, cut="trainer")))


SMALL = od.TransformerCost(hidden=256, layers=2, ffn=512, heads=2)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (without_image, "phase 'image' has no module: the modules are llm"),
        (too_large, r"module 'image' fits on no GPU: it needs at least [\d.]+ GB on each, and a GPU has"),
        (shared, "simulate has no formula for Balance.teams"),
        (short, "max_tokens=100 is below the longest sample, of"),
        (lambda: Placement(module=Module("llm", SMALL), tp=4), "tp=4 does not divide its 2 heads"),
        (
            lambda: two_towers("one", dp=2),
            "Layout.kind='one' has no image of tp=1, pp=1, dp=2, .* LLM of tp=1, pp=1, dp=1",
        ),
        (lambda: two_towers("own", sharding="full"), "Layout.kind='own' has no image of .* full next to"),
        (lambda: Cluster.named("h100x0"), "Cluster.gpus must be at least 1, got 0"),
        (lambda: Cluster.named("v100x8"), "KINDxGPUS, such as h100x64"),
        (lambda: Module("llm", od.CostModel(llm=SMALL)), "has no layers, width and parameters"),  # type: ignore[arg-type]
        (lambda: Module("llm", SMALL, share=float("nan")), "share must be a finite number above 0, at most 1, got nan"),
        (lambda: bad_workload(costs=[5]), r"costs must have 2 numbers, got 1"),
        (lambda: bad_workload(positions=[5, 0]), r"positions\[1\] is 0; it must be at least 1"),
        (lambda: bad_workload(tokens=[5, float("nan")]), "tokens\\[1\\] is nan; it must be a whole number"),
        (lambda: Assumed(hidden=2.0), "Assumed.hidden is a part, at most 1, got 2.0"),
        (lambda: Module.from_dict({"name": 3, "cost": SHAPE}), "Module.name must be a str, got 3"),
        (lambda: Module.from_dict({"name": "llm", "cost": SHAPE, "after": "no"}), "Module.after must be a bool"),
        (lambda: Module.from_dict({"name": "llm", "cost": SHAPE, "seconds": [1]}), "must map whole numbers to values"),
        (lambda: Layout.from_dict({"tokens": 1}), "Layout has 'tokens', which is none of its fields"),
        (lambda: Module.from_dict({"name": "llm", "cost": {**SHAPE, "depth": 3}}), "Module.cost has 'depth', which is"),
        (lambda: Module.from_dict({"name": "llm", "cost": {"hidden": 3}}), "Module.cost: .* missing .* 'layers' and"),
    ],
)
def test_bad_input_is_one_line_with_field_and_value(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        made()
    assert "\n" not in str(raised.value)


@pytest.fixture
def shard(tmp_path: Path) -> str:
    return omni_shards(tmp_path, shards=1, samples=40)[0]


@pytest.mark.slow
def test_the_command_plans_shards(shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text("from shard_factory import RECIPE\n")
    monkeypatch.chdir(tmp_path)
    listed = [{"name": name, "cost": SHAPE} for name in ("image", "audio", "llm")]
    Path("modules.yaml").write_text(json.dumps(listed))  # JSON is YAML.
    options = "--modules modules.yaml --cluster h100x4 --global-batch-tokens 1k --recipe here:RECIPE".split()
    given = CliRunner().invoke(app, ["plan-run", shard, *options, "--json"])
    assert given.exit_code == 0, given.output
    plan = RunPlan.from_dict(json.loads(given.stdout))
    text = CliRunner().invoke(app, ["plan-run", shard, *options]).stdout
    assert "runs <- fastest that runs" in text
    assert plan.call in text
    wrong = CliRunner().invoke(app, ["plan-run", shard, *options, "--keep", "llm=4"])
    assert wrong.exit_code == 1
    assert wrong.stderr.splitlines() == [
        "orchdata: error: --keep must be PHASE=tpN,ppN,dpN, such as llm=tp4, got 'llm=4'"
    ]


def test_modules_of_a_models_config_cost_what_the_loaders_cost_model_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    found, cost = _modules(str(tmp_path), None)
    assert cost == od.hf.cost(transformers.AutoConfig.from_pretrained(tmp_path))
    for module, of in zip(found, cost.costs, strict=True):
        assert module.operations(np.array([640])) == pytest.approx([of.at(640)], rel=1e-12)


def test_the_workload_has_the_samples_of_the_loaders_steps(shard: str) -> None:
    dataset = od.ShardDataset(shard, recipe=RECIPE)
    workload = Workload.of(dataset, global_batch_size=8, seed=3, steps=2)
    loader = od.DataLoader(dataset, global_batch_size=8, shuffle=True, seed=3, num_threads=0)
    lengths = sorted(np.diff(next(iter(loader)).llm.cu_seqlens).tolist())
    assert sorted(workload.phases["llm"].positions[:8].tolist()) == lengths


def test_the_printed_call_runs(shard: str, tmp_path: Path) -> None:
    llm = Module("llm", SMALL)
    dataset = od.ShardDataset(shard, recipe=RECIPE)
    workload = Workload.of(dataset, cost=od.CostModel(llm=SMALL), global_batch_tokens=1000)
    plain = Workload(steps=workload.steps, phases={"llm": workload.phases["llm"]}, global_batch_tokens=1000)
    cluster = Cluster.named("h100x2")
    layout = Layout(placements=(Placement(module=llm, dp=2, sharding="full"),), microbatch_tokens=300)
    call = tmp_path / "call.py"
    call.write_text(call_of(layout, plain, cluster).replace('"cuda"', '"cpu"'))
    found = planned_call_job.run(shard, call, tmp_path)
    assert [rank["dp"] for rank in found] == [2, 2]
    assert all(0 < tokens <= 300 for rank in found for tokens in rank["tokens"])
