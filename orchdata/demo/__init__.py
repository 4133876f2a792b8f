"""`orchdata demo`: make a dataset, profile it, train a small multimodal LLM on it unbalanced and balanced, report.

    datasets/demo.yaml --synthesize--> shards --index--> profile
                           +--torchrun, 2 ranks: orchdata.reference.lanes--> records --> DemoReport

Everything lies in one temporary folder, the index included, and goes with it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from orchdata.demo.report import DemoReport, render
from orchdata.reference.records import compare_curves, fastest_repeats, summarise_lane

if TYPE_CHECKING:
    from orchdata.profiling.profile import Profile
    from orchdata.synth import SynthReport

__all__ = ["DemoConfig", "DemoReport", "render", "run_demo"]

Progress = Callable[[str, int, int], None]

_SHOWN = 12  # samples in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How much the demo does.

    Attributes:
        samples: samples of the dataset.
        ranks: processes, of one CPU thread each.
        steps: measured optimizer steps of each lane.
        block_steps: steps of one lane before the other takes its turn.
        warmup_steps: steps of each lane before the measured ones.
        batch_size: samples per rank and step (a mean, once balanced).
        seed: of dataset, order and weights.
    """

    samples: int = 1536
    ranks: int = 2
    steps: int = 48
    block_steps: int = 4
    warmup_steps: int = 2
    batch_size: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "ranks", "steps", "block_steps", "warmup_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.samples < self.ranks * self.batch_size:
            raise ValueError(
                f"samples must be at least ranks x batch_size, {self.ranks * self.batch_size}, for one step; "
                f"got {self.samples}"
            )


def run_demo(
    config: DemoConfig | None = None, *, html: Path | None = None, progress: Progress | None = None
) -> DemoReport:
    """Run the whole demo.

    Args:
        config: default `DemoConfig()`, which takes about a minute on two cores.
        html: file for the report of the data set; None for none.
        progress: called with what is being done, and how far it is: ("training", steps done, steps in all).

    Raises:
        LaunchError: a training process failed; the message quotes the end of its log.
    """
    from orchdata.synth import read_description, synthesize

    config = config if config is not None else DemoConfig()
    tell = progress if progress is not None else lambda what, done, total: None
    watch = _Watch()
    with tempfile.TemporaryDirectory(prefix="orchdata-demo-") as name:
        folder = Path(name)
        dataset = synthesize(
            replace(read_description("demo"), seed=config.seed),
            folder / "shards",
            samples=config.samples,
            progress=lambda done, total: tell("writing samples", done, total),
        )
        watch.note("synth")
        profiled = _profile(config, dataset, folder, html, tell)
        watch.note("profile")
        result = _train(config, dataset, folder, tell)
        watch.note("train")
    return _report(config, dataset, profiled, result, watch.seconds)


def _profile(config: DemoConfig, dataset: SynthReport, folder: Path, html: Path | None, tell: Progress) -> Profile:
    """Index the shards, which the ranks will need, profile them, and write the report."""
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.loaders.index.build import build_index
    from orchdata.loaders.storage.cache import CacheFolder
    from orchdata.profiling.page import write_report
    from orchdata.profiling.profile import profile
    from orchdata.reference.setup import make_cost, make_model_config, make_recipe

    recipe = make_recipe()
    paths = [str(path) for path in dataset.paths]
    index = build_index(
        paths,
        recipe,
        cache=CacheFolder(folder / "cache"),
        progress=lambda built: tell("indexing shards", built.done, built.total),
    )
    cost = make_cost(make_model_config(recipe))
    profiled = profile(index, cost=cost, ranks=(config.ranks, 8, 64), batch_size=config.batch_size, seed=config.seed)
    if html is not None:
        tell("writing the report", 0, 1)
        write_report(profiled, html, ShardDataset(paths, recipe), index, _SHOWN)
        tell("writing the report", 1, 1)
    return profiled


def _train(config: DemoConfig, dataset: SynthReport, folder: Path, tell: Progress) -> dict[str, Any]:
    """Train on all ranks; returns what `orchdata.reference.lanes.train` does."""
    from orchdata.reference.launch import torchrun

    task = {
        "shards": [str(path) for path in dataset.paths],
        "steps": config.steps,
        "block_steps": config.block_steps,
        "warmup_steps": config.warmup_steps,
        "global_batch_size": config.ranks * config.batch_size,
        "seed": config.seed,
    }
    task_path, result_path = folder / "task.json", folder / "result.json"
    task_path.write_text(json.dumps(task))
    with (folder / "ranks.log").open("w+b") as log:
        torchrun(
            ["-m", "orchdata.reference.lanes", str(task_path), str(result_path)],
            num_ranks=config.ranks,
            environment={"ORCHDATA_CACHE": str(folder / "cache")},
            log=log,
            progress=lambda done, total: tell("training", done, total),
        )
    result: dict[str, Any] = json.loads(result_path.read_text())
    return result


def _report(
    config: DemoConfig, dataset: SynthReport, profiled: Profile, result: dict[str, Any], seconds: dict[str, float]
) -> DemoReport:
    summaries = {
        name: summarise_lane(fastest_repeats(records), config.warmup_steps) for name, records in result["lanes"].items()
    }
    _, steps_before, losses_before = summaries["unbalanced"]
    _, steps_after, losses_after = summaries["balanced"]
    return DemoReport(
        ranks=config.ranks,
        cores=_usable_cores(),
        parameters=result["parameters"],
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        global_batch_size=config.ranks * config.batch_size,
        lanes={name: summary[0] for name, summary in summaries.items()},
        speedup=float(steps_before.sum() / steps_after.sum()),
        speedup_of_median_step=median((steps_before / steps_after).tolist()),
        loss_difference=compare_curves(losses_before, losses_after),
        dataset=dataset,
        profile=profiled,
        seconds=seconds,
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Watch:
    """Seconds each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 2)
        self._last = now
