"""Simulated steps: exact where microbatches are even, and the same as by events in plain Python."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from planned_again import Again, made_up

import orchdata as od
from orchdata.balancers import simulate_1f1b
from orchdata.native.microbatches.pipeline import run_modules
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planners import Cluster, Columns, Layout, Module, Placement, Workload, simulate
from orchdata.planners.cluster import Many, Means, activation_bytes, closed_form, gpu_bytes, mean_memory, state_bytes
from orchdata.planners.run import candidates
from orchdata.planners.simulation import balance_of
from orchdata.planners.workload import WorkloadCosts
from orchdata.planning.plan import PlanSpec, make_plan

FREE = {"within": 1e30, "between": 1e30, "memory_bandwidth": 1e30}


def even(samples: int, *, image: bool = True) -> Workload:
    """One step of equal samples, each with one image."""
    ones = np.full(samples, 1024)
    columns = Columns(offsets=np.arange(samples + 1), positions=ones, tokens=ones, costs=ones)
    phases = {"image": replace(columns, tokens=ones // 4)} if image else {}
    return Workload(steps=[0, samples], phases={**phases, "llm": columns}, global_batch_size=samples)


def module(name: str, *, nanoseconds: int, trained: bool = True) -> Module:
    """A tower that takes so many nanoseconds a sample of 1,024 positions, a third of them forward."""
    cost = od.TransformerCost(hidden=64, layers=4, ffn=256, heads=4)
    return Module(name, cost, trained=trained, seconds={1: od.PhaseCost(nanoseconds / 1024e9)})


@pytest.mark.parametrize("sharding", [None, "optimizer", "full"])
def test_even_samples_of_one_phase_take_the_closed_form(sharding: Any) -> None:
    workload, cluster = even(16, image=False), Cluster.named("h100x8")
    llm = Placement(module=module("llm", nanoseconds=3_000_000), dp=4, sharding=sharding)
    found = simulate(Layout(placements=(llm,), microbatch_tokens=2048), workload, cluster)
    closed = float(closed_form("one", [llm], 2048, Means(workload, cluster)))
    assert found.seconds == pytest.approx([closed], rel=1e-9)
    assert found.microbatches == 2
    assert sum(float(of[0]) for of in found.parts.values()) == pytest.approx(closed)


@pytest.mark.parametrize("trained", [True, False])
def test_even_microbatches_in_one_pipeline_are_1f1b_over_all_stages(trained: bool) -> None:
    workload, cluster = even(12), Cluster.named("h100x8", **FREE)
    image, llm = module("image", nanoseconds=900_000, trained=trained), module("llm", nanoseconds=2_400_000)
    placements = Placement(module=image, pp=2), Placement(module=llm, pp=4)
    found = simulate(Layout(placements=placements, kind="own", microbatch_tokens=1024), workload, cluster)
    # A third is forward, of a frozen tower all.
    forward = np.array([[150_000 if trained else 450_000]] * 2 + [[200_000]] * 4) * np.ones(12)
    backward = np.array([[300_000 if trained else 0]] * 2 + [[400_000]] * 4) * np.ones(12)
    assert found.seconds[0] == pytest.approx(simulate_1f1b(forward, backward) / 1e9, rel=1e-9)
    stages = np.repeat([image.seconds[1].at(1024) / 2, llm.seconds[1].at(1024) / 4], [2, 4])  # type: ignore[index]
    if trained:
        closed = float(closed_form("own", placements, 1024, Means(workload, cluster)))
        assert closed == pytest.approx(stages.sum() + 11 * stages.max(), rel=1e-9)


def test_without_a_pipeline_a_step_is_priced_as_the_loader_prices_it() -> None:
    modules, workload, cluster = made_up(3)
    cluster = replace(cluster, **FREE)
    for assignment, sharding in (("joint", "optimizer"), ("joint", "full"), ("per_phase", "full")):
        placements = tuple(Placement(module=each, dp=4, sharding=sharding) for each in modules)
        layout = Layout(placements=placements, microbatch_tokens=8192, assignment=assignment)  # type: ignore[arg-type]
        spec = PlanSpec(
            costs=WorkloadCosts(workload, ("image", "llm")),
            order=Order(workload.num_samples, shuffle=None, seed=0),
            batches=GlobalBatches(size=int(workload.steps[1])),
            balance=balance_of(layout),
            num_ranks=4,
        )
        plan = make_plan(spec, StepTask(0, 0))
        share = {each.name: workload.phases[each.name] for each in modules}
        nanoseconds = {}
        for each in modules:
            width = each.cost.hidden
            speed = cluster.operations * each.share * width / (width + 128)
            costs = [1e9 * each.cost.phase_cost().at(length) / speed for length in share[each.name].positions.tolist()]
            nanoseconds[each.name] = np.rint(costs).astype(np.int64)
        # The plan's own cells, of nanoseconds in place of costs.
        parts = {name: replace(of, costs=nanoseconds[name][of.part]) for name, of in plan.parts.items()}
        offsets = share["image"].offsets[: len(plan.row) + 1]
        image = np.array([nanoseconds["image"][a:b].sum() for a, b in itertools.pairwise(offsets)])
        priced = replace(plan, parts=parts, costs={"image": image, "llm": nanoseconds["llm"][plan.row]})
        expected = priced.cost(balance_of(layout).price, ("image", "llm")) / 1e9
        assert simulate(layout, workload, cluster).seconds[0] == pytest.approx(expected, rel=1e-12)


def by_events(blocks: list[tuple[int, Any, Any]], travel: Any, back: Any) -> float:
    """`run_modules` in plain Python: operations in the order of each stage, as soon as what they wait for has ended."""
    stages = [(number, forward, backward) for number, (pp, forward, backward) in enumerate(blocks) for _ in range(pp)]
    count, ends = len(blocks[0][1][0]), {}
    orders = []
    for stage in range(len(stages)):
        ahead = min(len(stages) - stage - 1, count)
        order = [("f", m) for m in range(ahead)]
        for m in range(count):
            order += [("f", m + ahead)] * (m + ahead < count) + [("b", m)]
        orders.append(order)
    free = [np.zeros(len(forward)) for _, forward, _ in stages]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                what, m = order[0]
                other = stage - 1 if what == "f" else stage + 1
                start = free[stage]
                if 0 <= other < len(stages):
                    if (what, m, other) not in ends:
                        break
                    arrives = ends[what, m, other]
                    if stages[other][0] != stages[stage][0]:
                        border = max(stages[other][0], stages[stage][0])
                        arrives = arrives.max() + (travel if what == "f" else back)[border][m]
                    start = np.maximum(start, arrives)
                times = np.array([row[m] for row in stages[stage][1 if what == "f" else 2]])
                free[stage] = ends[what, m, stage] = start + times
                order.pop(0)
    return float(max(each.max() for each in free))


@pytest.mark.parametrize("seed", range(20))
def test_modules_of_several_replicas_run_as_by_events(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, modules = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    stages, replicas = rng.integers(1, 4, modules), rng.integers(1, 5, modules)
    forward = [rng.integers(1, 50, (of, count)).astype(float) for of in replicas]
    backward = [rng.integers(0, 90, (of, count)).astype(float) for of in replicas]
    travel, back = rng.integers(0, 30, (2, modules, count)).astype(float)
    joined = np.concatenate(forward), np.concatenate(backward)
    end = run_modules(*joined, travel, back, stages, replicas, True)
    assert end == by_events([*zip(stages.tolist(), forward, backward, strict=True)], travel, back)
    alone = [(1, ahead[None], back[None]) for ahead, back in zip(*joined, strict=True)]
    nothing = np.zeros((len(alone), count))
    assert simulate_1f1b(*joined) == by_events(alone, nothing, nothing)


def test_rows_of_features_take_their_link_time_once_each_way() -> None:
    workload, slow = even(1), Cluster.named("h100x2", **{**FREE, "within": 1e9})
    image, llm = module("image", nanoseconds=900_000), module("llm", nanoseconds=2_400_000)
    placements = tuple(Placement(module=each) for each in (image, llm))
    found = simulate(Layout(placements=placements, kind="own", microbatch_tokens=1024), workload, slow)
    way = 2 * 256 * 64 / 1e9  # 256 rows of 64 in bf16
    assert found.seconds[0] == pytest.approx(3_300_000e-9 + 2 * way, rel=1e-9)


# Formulas: written again in `planned_again`, and by hand; the search finds the best of every layout.


USABLE = 0.9


def best_of_every_layout(again: Again, tokens: tuple[int, ...]) -> dict[str, tuple[float, Any, int]]:
    """The fastest layout of each kind that fits, by the formulas written again."""
    best: dict[str, tuple[float, Any, int]] = {}
    for layouts in (again.layouts(tokens), again.apart(tokens)):
        for kind, splits, size in layouts:
            seconds = again.seconds(kind, splits, size)
            faster = seconds < best.get(kind, (np.inf,))[0]
            if faster and again.bytes(kind, splits, size) <= USABLE * again.cluster.memory:
                best[kind] = (seconds, splits, size)
    return best


@pytest.mark.parametrize(("seed", "count"), [(1, 2), (6, 2), (2, 3)])
def test_seconds_and_bytes_are_those_written_again(seed: int, count: int) -> None:
    modules, workload, cluster = made_up(seed, modules=count, gpus=12)
    again, means = Again(modules, workload, cluster), Means(workload, cluster)
    layouts = [*islice(again.layouts((4096, 8192)), 0, None, 61), *islice(again.apart((4096,)), 0, 400_000, 997)]
    assert {kind for kind, *_ in layouts} == {"one", "repeated", "shared", "first_stage", "own"} or seed != 6
    for kind, splits, tokens in layouts:
        many: Any = [
            Many(module, *split[:4], split[4] is not None) for module, split in zip(modules, splits, strict=True)
        ]
        seconds = float(closed_form(kind, many, tokens, means))
        assert seconds == pytest.approx(again.seconds(kind, splits, tokens), rel=1e-9)
        used = gpu_bytes(kind, many, tokens, mean_memory(kind, many, tokens, means), means)
        assert max(map(float, used.values())) == pytest.approx(again.bytes(kind, splits, tokens), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_of_every_layout(seed: int) -> None:
    modules, workload, cluster = made_up(seed, gpus=10 + seed)
    found, _ = candidates(modules, Means(workload, cluster), (4096, 16384), {}, 8)
    best = best_of_every_layout(Again(modules, workload, cluster), (4096, 16384))
    assert best
    assert {kind: ranked[0].seconds for kind, ranked in found.items() if ranked} == {
        kind: pytest.approx(seconds, rel=1e-9) for kind, (seconds, *_) in best.items()
    }


def test_the_memory_of_one_layer_by_hand() -> None:
    cost = od.TransformerCost(hidden=1000, layers=1, ffn=4000, heads=8)
    cluster = Cluster.named("h100x64")
    of = Placement(module=Module("llm", cost, parameters=1e6), tp=2, dp=4)
    assert state_bytes(of, cluster) == 16 * 1e6 / 2
    assert activation_bytes(of, cluster, 100) == 34 * 100 * 1000 / 2
    shape = {"module": of.module, "tp": 2, "dp": 4}
    assert state_bytes(Placement(**shape, sharding="optimizer"), cluster) == (4 + 12 / 4) * 1e6 / 2
    assert state_bytes(Placement(**shape, sharding="full"), cluster) == 16 * 1e6 / 8 + 2 * 2 * 1e6 / 2
    assert activation_bytes(Placement(**shape, recompute="full"), cluster, 100) == (2 + 34) * 100 * 1000 / 2
    frozen = Module("llm", cost, parameters=1e6, trained=False)
    assert state_bytes(Placement(module=frozen), cluster) == 2 * 1e6


def test_parameters_are_counted_from_the_shape() -> None:
    cost = od.TransformerCost(hidden=4096, layers=32, ffn=11_008, heads=32, vocab=32_000, causal=True, gated=True)
    assert Module("llm", cost).parameters == 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 2 * 32_000 * 4096  # Llama 2 7B


def test_measured_seconds_take_the_place_of_operations() -> None:
    cost = od.TransformerCost(hidden=64, layers=2, ffn=256, heads=2)
    module = Module("llm", cost, seconds={1: od.PhaseCost(2.0), 2: od.PhaseCost(1.5)}, error=0.1)
    modules, workload, cluster = made_up(0, modules=1)
    del modules
    means = Means(workload, cluster)
    assert means.work(Placement(module=module, tp=2)) == pytest.approx(1.5 * means.tokens)
    with pytest.raises(ValueError, match="was not measured"):
        Placement(module=Module("llm", cost, seconds={1: od.PhaseCost(2.0)}), tp=2)
