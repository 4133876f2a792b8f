"""`python -m benchmarks.mixtures`: a mixture of made-up indexes: how long it takes to start, and to find its steps.

made-up indexes --DataLoader(od.Mixture)--> first step (seconds) --steps in turn, at random--> milliseconds
                --with 1 to 10,000 stages--> bytes of a state, milliseconds of CPU of the next plans after a resume
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import orchdata as od
from benchmarks.command import run_command
from benchmarks.indexed_shards import IndexedShards
from orchdata.bench import Result, synthetic_index, work_folder
from orchdata.loop.loop import Position
from orchdata.order.steps import StepTask
from orchdata.planning.plan import make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureBench:
    """What to measure.

    Attributes:
        samples: rows of all sources; each has half as many as the one before.
        sources: how many.
        batch_tokens: LLM tokens of a step over all ranks.
        ranks: to plan for.
        repeats: steps measured in turn, and at random.
        starts: loaders made, the first of which maps and verifies the indexes.
        stages: numbers of stages to measure states and plans with.
        seed: of the indexes and the order.
        folder: where to write the indexes (about 170 bytes a row); a temporary folder by default.
    """

    samples: int = 10_000_000
    sources: int = 5
    batch_tokens: int = 4_194_304
    ranks: int = 64
    repeats: int = 30
    starts: int = 3
    stages: tuple[int, ...] = (1, 100, 1_000, 10_000)
    seed: int = 0
    folder: str | None = None


def run(config: MixtureBench) -> list[Result]:
    shares = np.array([0.5**number for number in range(config.sources)])
    rows = np.maximum(1, shares / shares.sum() * config.samples).astype(int).tolist()
    with work_folder(config.folder) as folder:
        paths = [folder / f"source-{number}.index" for number in range(config.sources)]
        for number, (path, count) in enumerate(zip(paths, rows, strict=True)):
            synthetic_index(path, count, config.seed + number)
        found = [result for stop in ("repeat", "all") for result in _measure(paths, stop, config)]
        return [*found, *(result for count in config.stages for result in _measure_stages(paths, count, config))]


def _measure(paths: list[Path], stop: str, config: MixtureBench) -> list[Result]:
    options = {"stop": stop} | ({"epoch_tokens": 10**12} if stop == "repeat" else {})
    starts = []
    for _ in range(config.starts):
        began = time.perf_counter()
        weights = np.random.default_rng(config.seed).uniform(0.2, 1, len(paths)).tolist()
        sources = {
            f"s{number}": od.Source(IndexedShards(path), weight=weight)
            for number, (path, weight) in enumerate(zip(paths, weights, strict=True))
        }
        mixture = od.Mixture(sources, **options)  # type: ignore[arg-type]
        loader: od.DataLoader = od.DataLoader(
            mixture, global_batch_tokens=config.batch_tokens, shuffle=True, dp=(0, config.ranks), balance="none"
        )
        plan = loader._runtime.prepared.spec.plan
        make_plan(plan, StepTask(0, 0))
        starts.append(time.perf_counter() - began)
    order, batches, length = plan.order, plan.batches, plan.order.length(0)
    num_steps = batches.count(length)

    def find(step: int) -> float:
        began = time.perf_counter()
        order.rows(0, *batches.bounds(step, length))
        return 1e3 * (time.perf_counter() - began)

    places = np.random.default_rng(config.seed).integers(0, num_steps, config.repeats).tolist()
    at_random = tuple(find(step) for step in places)
    first = num_steps // 3
    in_turn = tuple(find(step) for step in range(first, first + config.repeats))
    start, stop_at = batches.bounds(first, length)
    note = f"{stop_at - start:,} samples of {len(paths)} sources"
    return [
        Result(name=f"stop={stop!r}: start, first plan", unit="s", values=tuple(starts), demand=3.0),
        Result(name=f"stop={stop!r}: a step in turn", unit="ms", values=in_turn, note=note),
        Result(name=f"stop={stop!r}: a step at random", unit="ms", values=at_random, note=note),
    ]


def _measure_stages(paths: list[Path], count: int, config: MixtureBench) -> list[Result]:
    """A run of 300 steps in so many stages, resumed after 200."""
    total, rng = 300 * config.batch_tokens, np.random.default_rng(config.seed)
    names = [f"s{number}" for number in range(len(paths))]
    stages = [
        (total * number // count, dict(zip(names, rng.uniform(0.2, 1, len(names)).tolist(), strict=True)))
        for number in range(count)
    ]
    sources = {name: od.Source(IndexedShards(path)) for name, path in zip(names, paths, strict=True)}
    mixture = od.Mixture(sources, stages=stages, stop="repeat", epoch_tokens=total)
    options: dict[str, Any] = {"global_batch_tokens": config.batch_tokens, "shuffle": True, "balance": "none"}
    loader: od.DataLoader = od.DataLoader(mixture, dp=(0, config.ranks), **options)
    loader._progress.load(Position(0, 200))  # as after 200 steps, without reading a sample
    state = loader.state_dict()
    resumed: od.DataLoader = od.DataLoader(mixture, dp=(0, config.ranks), **options)
    resumed.load_state_dict(state)
    spent = []
    for step in range(200, 200 + config.repeats):
        began = time.process_time()
        resumed.plan_at(0, step)
        spent.append(1e3 * (time.process_time() - began))
    name = f"{count:,} stages"
    return [
        Result(name=f"{name}: a state", unit="bytes", values=(float(len(json.dumps(state))),), demand=20_000.0),
        Result(name=f"{name}: a plan in turn after a resume", unit="ms of CPU", values=tuple(spent[1:])),
    ]


if __name__ == "__main__":
    run_command("benchmarks.mixtures", MixtureBench, run)
