"""One loss curve on 1, 2, 4 and 8 ranks, unbalanced and balanced: the same global batches, the same seed.

python -m benchmarks.pictures.loss_curves --json > benchmarks/results/loss_curves.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import run_command
from benchmarks.launch import torchrun
from benchmarks.train.lanes import make_recipe
from benchmarks.train.records import compare_curves, fastest_repeats, summarise_lane
from orchdata.bench import Result, WideTable, work_folder
from orchdata.loaders.index.build import build_index
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.synth import synthesize

RANKS: Final = (1, 2, 4, 8)
LARGEST_DIFFERENCE: Final = 1e-4
"""Float32 sums in another order differ by less; another weight of a token by much more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurves:
    """How much is trained.

    Attributes:
        samples: of the demo's data set.
        steps: optimizer steps of each curve.
        global_batch_size: samples of a step, over all ranks.
        seed: of order and weights.
    """

    samples: int = 768
    steps: int = 64
    global_batch_size: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, for a curve; got {self.steps}")
        if not max(RANKS) <= self.global_batch_size <= self.samples:
            raise ValueError(
                f"global_batch_size must be from {max(RANKS)}, one sample a rank, to the {self.samples:,} samples; "
                f"got {self.global_batch_size}"
            )


def run(config: LossCurves) -> list[Result | WideTable]:
    """Train the small model once for each number of ranks, both ways in turn."""
    curves: dict[str, NDArray[np.float64]] = {}
    with work_folder(None) as folder:
        shards = synthesize("demo", folder / "shards", samples=config.samples).paths
        build_index([str(path) for path in shards], make_recipe(), cache=CacheFolder(folder / "cache"))
        for ranks in RANKS:
            curves |= {curve_name(ranks, way): losses for way, losses in _train(config, shards, folder, ranks).items()}
    return [_table(curves), difference(curves)]


def curve_name(ranks: int, way: str) -> str:
    """Name of a curve, such as "2 ranks, balanced"."""
    return f"{ranks} rank{'' if ranks == 1 else 's'}, {way}"


def _train(config: LossCurves, shards: tuple[Path, ...], folder: Path, ranks: int) -> dict[str, NDArray[np.float64]]:
    """The loss of each step, unbalanced and balanced."""
    task = {
        "shards": [str(path) for path in shards],
        "steps": config.steps,
        "block_steps": 4,
        "warmup_steps": 0,
        "global_batch_size": config.global_batch_size,
        "seed": config.seed,
    }
    task_path, result_path = folder / "task.json", folder / "result.json"
    task_path.write_text(json.dumps(task))
    with (folder / "ranks.log").open("w+b") as log:
        torchrun(
            ["-m", "benchmarks.train.lanes", str(task_path), str(result_path)],
            num_ranks=ranks,
            environment={"ORCHDATA_CACHE": str(folder / "cache")},
            log=log,
        )
    lanes = json.loads(result_path.read_text())["lanes"]
    return {way: summarise_lane(fastest_repeats(records), 0)[2] for way, records in lanes.items()}


def _table(curves: Mapping[str, NDArray[np.float64]]) -> WideTable:
    rows = zip(*(losses.tolist() for losses in curves.values()), strict=True)
    return WideTable(
        title="loss, mean over the tokens of the global batch",
        columns=("step", *curves),
        rows=tuple((str(step), *losses) for step, losses in enumerate(rows)),
        note="A small model and the demo's data set, in float32, under DDP with gloo.",
    )


def difference(curves: Mapping[str, NDArray[np.float64]]) -> Result:
    """How far any curve is from the one of a single rank, unbalanced."""
    first = curves[curve_name(1, "unbalanced")]
    largest = max(compare_curves(first, losses) for losses in curves.values())
    return Result(
        name="largest relative difference from the curve of one rank",
        unit="",
        values=(largest,),
        demand=LARGEST_DIFFERENCE,
        note="over all steps, numbers of ranks, unbalanced and balanced",
    )


if __name__ == "__main__":
    run_command("benchmarks.pictures.loss_curves", LossCurves, run)
