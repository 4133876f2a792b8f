"""`orchdata demo`: make a dataset, profile it, train a small multimodal LLM on it unbalanced and balanced, report.

    datasets/demo.yaml --synthesize--> shards --index--> profile
                           +--2 ranks: orchdata.demo.rank--> steps of both ways --> DemoReport

Everything lies in one temporary folder, the index included, and goes with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchdata.profiling.profile import Profile
    from orchdata.synth import SynthReport

Progress = Callable[[str, int, int], None]

_SHOWN = 12  # samples in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How much the demo does: `steps` measured steps of each lane after `warmup_steps`, in blocks by turns, with
    `batch_size` samples per rank and step (a mean, once balanced). Ranks are processes of one CPU thread each.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """The demo's result; `to_dict` is what `--json` prints.

    Attributes:
        lanes: of "unbalanced" and "balanced", over the measured steps: `step_ms` (median of the slowest rank's),
            `waiting_ms` (mean over steps and ranks until the slowest is ready) and `waiting_share` of the step,
            `compute_imbalance` (longest compute time over the mean) and `cpu_imbalance`, in CPU time, which other work
            on the machine does not lengthen, and `planned_imbalance`, phase -> max / mean over ranks by the cost model;
            `step` is all.
        speedup: unbalanced step time over balanced, summed over the same global batches.
        loss_difference: largest relative difference of the two loss curves; same samples, other order of summation.
    """

    config: DemoConfig
    cores: int
    parameters: int
    lanes: Mapping[str, Mapping[str, Any]]
    speedup: float
    loss_difference: float
    dataset: SynthReport
    profile: Profile

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values, with a plain statement of what was measured."""
        own = {name: getattr(self, name) for name in self.__slots__}
        nested = {"dataset": self.dataset.to_dict(), "profile": self.profile.to_dict(), "config": asdict(self.config)}
        return {"measured": _what_was_measured(self)} | own | nested


def run_demo(
    config: DemoConfig | None = None, *, html: Path | None = None, progress: Progress | None = None
) -> DemoReport:
    """Run the whole demo.

    Args:
        config: default `DemoConfig()`, which takes about a minute on two cores.
        html: file for the report of the data set; None for none.
        progress: called with what is being done, and how far it is: ("training", steps done, steps in all).

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a training process failed.
    """
    from orchdata.synth import read_description, synthesize

    config = config if config is not None else DemoConfig()
    tell = progress if progress is not None else lambda what, done, total: None
    with tempfile.TemporaryDirectory(prefix="orchdata-demo-") as name:
        folder = Path(name)
        dataset = synthesize(
            {**read_description("demo"), "seed": config.seed},
            folder / "shards",
            samples=config.samples,
            progress=lambda done, total: tell("writing samples", done, total),
        )
        profiled = _profile(config, dataset, folder, html, tell)
        result = _train(config, dataset, folder, tell)
    return DemoReport(config=config, cores=len(os.sched_getaffinity(0)), dataset=dataset, profile=profiled, **result)


def _profile(config: DemoConfig, dataset: SynthReport, folder: Path, html: Path | None, tell: Progress) -> Profile:
    """Index the shards, which the ranks will need, profile them, and write the report."""
    from orchdata.dataset.shard_dataset import ShardDataset
    from orchdata.demo.rank import COST, RECIPE
    from orchdata.loaders.index.build import build_index
    from orchdata.loaders.storage.cache import CacheFolder
    from orchdata.profiling.page import write_report
    from orchdata.profiling.profile import profile

    paths = [str(path) for path in dataset.paths]
    index = build_index(
        paths,
        RECIPE,
        cache=CacheFolder(folder / "cache"),
        progress=lambda built: tell("indexing shards", built.done, built.total),
    )
    profiled = profile(index, cost=COST, ranks=(config.ranks, 8, 64), batch_size=config.batch_size, seed=config.seed)
    if html is not None:
        tell("writing the report", 0, 1)
        write_report(profiled, html, ShardDataset(paths, RECIPE), index, _SHOWN)
        tell("writing the report", 1, 1)
    return profiled


def _train(config: DemoConfig, dataset: SynthReport, folder: Path, tell: Progress) -> dict[str, Any]:
    """Train on all ranks, which end with this process; returns what rank 0 writes."""
    from torch.multiprocessing.spawn import spawn

    from orchdata.demo.rank import main

    task = {
        **asdict(config),
        "folder": str(folder),
        "shards": [str(path) for path in dataset.paths],
        "global_batch_size": config.ranks * config.batch_size,
    }
    done = multiprocessing.get_context("spawn").Value("i", 0)
    ranks = spawn(main, (task, done), nprocs=config.ranks, join=False, daemon=True)
    while not ranks.join(timeout=0.2):
        tell("training", done.value, config.warmup_steps + config.steps)
    tell("training", done.value, config.warmup_steps + config.steps)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _what_was_measured(report: DemoReport) -> str:
    """A plain statement, with its limits."""
    config = report.config
    return (
        f"{config.ranks} ranks of one CPU thread each on this machine ({report.cores} cores), gloo, DDP; a model of "
        f"{report.parameters / 1e6:.1f} M parameters in float32; a synthetic dataset; {config.steps} steps of "
        f"{config.ranks * config.batch_size} samples each way after {config.warmup_steps} of warm-up, in blocks by "
        "turns, on the same global batches. Batches are loaded before each step and not part of its time. It shows "
        "what imbalance costs here and that balancing removes it; it is not a prediction for your GPUs: for your data "
        "and number of ranks, see `orchdata profile`"
    )


def render(report: DemoReport) -> RenderableType:
    """The report as a table for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    before, after = report.lanes["unbalanced"], report.lanes["balanced"]
    table = Table(title="Training, unbalanced and balanced", title_justify="left")
    table.add_column("")
    table.add_column("unbalanced", justify="right")
    table.add_column("balanced", justify="right")

    def add(label: str, form: str, name: str) -> None:
        table.add_row(label, form.format(before[name]), form.format(after[name]))

    add("step time, median (ms)", "{:.0f}", "step_ms")
    add("time a rank waits for the slowest (ms)", "{:.0f}", "waiting_ms")
    add("  share of the step lost to waiting", "{:.1%}", "waiting_share")
    add("compute imbalance, measured (max/mean)", "{:.3f}", "compute_imbalance")
    add("  in CPU time", "{:.3f}", "cpu_imbalance")
    for phase, value in before["planned_imbalance"].items():
        label = "all phases" if phase == "step" else f"{phase} phase"
        table.add_row(f"  {label}, by cost model", f"{value:.3f}", f"{after['planned_imbalance'][phase]:.3f}")
    verdict = (
        f"Balanced training is {report.speedup:.2f} times as fast over the same samples. "
        f"The loss curves differ by at most {report.loss_difference:.1e}, relative: float32 sums in another order."
    )
    return Group(table, Text(verdict, style="bold"), Text(f"Measured: {_what_was_measured(report)}.", style="dim"))
