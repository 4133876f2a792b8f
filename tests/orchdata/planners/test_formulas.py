"""Formulas: written again in `planned_again`, and by hand; the search finds the best of every layout."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from planned_again import Again, made_up

import orchdata as od
from orchdata.planners import Cluster, Module, Placement
from orchdata.planners.cluster import Many, Means, activation_bytes, closed_form, gpu_bytes, mean_memory, state_bytes
from orchdata.planners.run import candidates

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
