"""`python -m benchmarks.train`: a small model, trained with and without balancing, against what its plans predict.

    skewed.yaml --synthesize, index--> shards --torchrun: benchmarks.train.job--> calibration, records --> report

All lanes take the same global batches in turn, in one run, each rank on a core of its own. Their plans share one cost
model, fitted to the times of other steps before. By it, a step is predicted to take what its slowest rank's
phases cost together, or where ranks meet after each phase, each phase's slowest; and what any step takes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchdata.bench import Result, WideTable

if TYPE_CHECKING:
    from orchdata.loaders.index.index import Index

SKEWED: Final = Path(__file__).with_name("skewed.yaml")
WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBench:
    """What to measure.

    Attributes:
        ranks: processes, of one CPU thread each.
        steps: optimizer steps of each lane, after two of warm-up.
        repeats: trainings on each step's batch, the lanes in turn; a step counts as its fastest repeat, which
            other work on the machine lengthened least.
        batch_size: samples per rank and step (a mean, once balanced).
        dataset: description as for `orchdata synth`, with images and audio; `skewed.yaml` here by default.
        seed: of dataset, order and weights.
        calibration_steps, calibration_repeats: of other steps, to which costs are fitted.
        quick: few steps and repeats of the calibration, and no demands: to see that everything runs.
    """

    ranks: int = 2
    steps: int = 24
    repeats: int = 3
    batch_size: int = 8
    dataset: str = ""
    seed: int = 0
    calibration_steps: int = 32
    calibration_repeats: int = 5
    quick: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 2), ("steps", 1), ("repeats", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def run(config: TrainBench) -> list[Result | WideTable]:
    """Measure; raises LaunchError where a rank fails, ValueError for a dataset without images or audio."""
    from benchmarks.train.report import make_results

    content, _ = measured(config)
    return make_results(content, WARMUP_STEPS, demands=not config.quick)


def measured(config: TrainBench) -> tuple[dict[str, Any], Index]:
    """Return what `job.work` says, and the index of what was trained on; raises as `run`."""
    from benchmarks.launch import torchrun
    from benchmarks.train.lanes import make_recipe
    from orchdata.loaders.index.build import build_index
    from orchdata.loaders.storage.cache import CacheFolder
    from orchdata.synth import read_description, synthesize

    description = {**read_description(config.dataset or SKEWED), "seed": config.seed}
    with tempfile.TemporaryDirectory(prefix="orchdata-bench-") as name:
        folder = Path(name)
        # As many samples as are trained on, and enough for the fit; a shorter dataset is a prefix of a longer.
        needed = max(128, (config.steps + WARMUP_STEPS) * config.batch_size * config.ranks)
        written = synthesize(description, folder / "shards", samples=min(description["samples"], needed))
        shards = [str(path) for path in written.paths]
        index = build_index(shards, make_recipe(), cache=CacheFolder(folder / "cache"))
        for modality in ("image", "audio"):
            if not index.totals["modalities"][modality]["parts"]:
                raise ValueError(f"the dataset has no {modality}: its phase cannot be measured")
        result_path = folder / "result.json"
        (folder / "job.json").write_text(json.dumps(_job(config, shards)))
        with (folder / "ranks.log").open("w+b") as log:
            torchrun(
                ["-m", "benchmarks.train.job", str(folder / "job.json"), str(result_path)],
                num_ranks=config.ranks,
                environment={"ORCHDATA_CACHE": str(folder / "cache")},
                log=log,
            )
        return json.loads(result_path.read_text()), index


def _job(config: TrainBench, shards: list[str]) -> dict[str, Any]:
    """A `job.Job` as JSON. That module needs torch, which this one does without."""
    return {
        "task": {
            "shards": shards,
            "steps": config.steps,
            "block_steps": 2,
            "warmup_steps": WARMUP_STEPS,
            "global_batch_size": config.ranks * config.batch_size,
            "seed": config.seed,
            "repeats": config.repeats,
        },
        "calibration_steps": 8 if config.quick else config.calibration_steps,
        "calibration_repeats": 1 if config.quick else config.calibration_repeats,
        "exchange_repeats": 1 if config.quick else 5,
    }
