"""`orchdata bench throughput`: loading speed on this machine, of a made-up data set or of the user's.

    shards --index--> samples --a child process a lane and turn: measure()--> Figures --> report

Lanes are threads and worker processes of this library, and two limits in the same turns: reading alone, and the same
decoding by bare threads, from memory. Lanes take turns; the first turn measures memory and does not count for time.
`python -m benchmarks.throughput`, in the repository, compares other loaders with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchdata.bench.harness import Result, WideTable, work_folder

if TYPE_CHECKING:
    from orchdata.bench.throughput.job import Job
    from orchdata.bench.throughput.lanes import Lane
    from orchdata.loaders.index.index import Index
    from orchdata.loaders.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputBench:
    """What to measure.

    Attributes:
        paths: shards, as `od.ShardDataset` takes them; without any, a made-up data set.
        recipe: of these shards, as MODULE:NAME; default `od.Recipe()`.
        media_root: of these shards, where records name files.
        samples: of the made-up data set (JPEGs of about 500 x 400 and 82 KiB, three in four with WAV or FLAC, text);
            of yours, how many to load at most, drawn at random.
        consumer: what is done with each batch: "none", "torch" (small operations) or "python" (pure Python).
        consumer_ms: how long that takes where nothing else runs.
        batch_size: samples of a batch.
        workers: threads, or worker processes, of each loader.
        repeats: epochs of each that count.
        seed: of data set and order.
        folder: where to write data; a temporary folder there by default.
    """

    paths: tuple[str, ...] | None = None
    recipe: str | None = None
    media_root: str | None = None
    samples: int = 800
    consumer: str = "none"
    consumer_ms: float = 50.0
    batch_size: int = 16
    workers: int = 2
    repeats: int = 3
    seed: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.paths and (self.recipe or self.media_root):
            given = "recipe" if self.recipe else "media_root"
            raise ValueError(f"{given} is of a data set of yours: give its paths too")


def check_sizes(config: ThroughputBench) -> None:
    """Raises ValueError for what cannot be measured."""
    for name in ("samples", "batch_size", "workers", "repeats"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.consumer not in (choices := ("none", "torch", "python")):
        raise ValueError(f"consumer must be one of {', '.join(choices)}, got {config.consumer!r}")
    if not config.consumer_ms > 0:
        raise ValueError(f"consumer_ms must be above 0, got {config.consumer_ms}")


def run(
    config: ThroughputBench, recipe: Recipe | None = None, storage_options: Mapping[str, str] | None = None
) -> list[Result | WideTable]:
    """Measure. A lane that fails is a row that says why.

    Args:
        recipe: that `config.recipe` names.
        storage_options: of `config.paths`; no part of the configuration, which reports show.

    Raises ValueError for too few samples for batches of this size.
    """
    from orchdata.bench.throughput.lanes import LANES

    with work_folder(config.folder) as folder:
        return compare(config, _job(config, folder, recipe, storage_options), LANES)


def compare(config: ThroughputBench, job: Job, lanes: Mapping[str, Lane]) -> list[Result | WideTable]:
    """Let lanes take turns over one job, and report. Raises ValueError for too few samples."""
    from orchdata.bench.throughput.consumers import rounds_for
    from orchdata.bench.throughput.report import make_results
    from orchdata.bench.throughput.turns import Turns

    lead = max(2 * config.workers * config.batch_size, len(job.samples) // 10)
    if len(job.samples) < 3 * lead:
        raise ValueError(
            f"{config.workers} workers and batches of {config.batch_size} need {3 * lead} samples, "
            f"got {len(job.samples)}"
        )
    seconds = 0.0 if config.consumer == "none" else config.consumer_ms / 1e3
    turns = Turns(job, lanes, config.consumer, rounds_for(config.consumer, seconds), lead)
    for turn in range(1 + config.repeats):
        for name in list(lanes)[:: 1 if turn % 2 else -1]:
            turns.take(name)
    figures = {name: turns.figures[name] for name in lanes if name in turns.figures}
    sample_bytes = job.samples.num_bytes / len(job.samples)
    return make_results(lanes, figures, turns.peaks, turns.reasons, sample_bytes, seconds)


def made_up_shards(config: ThroughputBench, folder: Path) -> list[str]:
    """Tars in a folder of their own."""
    from orchdata.bench.corpus import Corpus

    (folder / "shards").mkdir()
    corpus = Corpus(samples=config.samples, shards=min(8, config.samples), seed=config.seed)
    return corpus.write(folder / "shards")


def _job(
    config: ThroughputBench,
    folder: Path,
    recipe: Recipe | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Job:
    """The data, indexed."""
    from orchdata.bench.throughput.job import Job, Shards, StoredSamples
    from orchdata.loaders.index.build import build_index
    from orchdata.loaders.recipe import Recipe
    from orchdata.loaders.storage.cache import CacheFolder

    if config.paths:
        cache = None
        shards = Shards(config.paths, recipe or Recipe(), config.media_root, storage_options)
        index = shards.open().index()
    else:
        cache = folder / "cache"
        shards = Shards(tuple(made_up_shards(config, folder)), Recipe())
        index = build_index(shards.urls, shards.recipe, cache=CacheFolder(cache))
    rows = _rows(index, config)
    return Job(
        shards=shards,
        samples=StoredSamples(shards, rows, sum(size for row in rows for _, size, _, _ in index.read_spec(row))),
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        cache=cache,
        folder=folder,
    )


def _rows(index: Index, config: ThroughputBench) -> tuple[int, ...]:
    """Good rows at random, in full batches where there are more than are wanted."""
    good = np.setdiff1d(np.arange(index.num_rows), index.bad_rows(), assume_unique=True)
    wanted = len(good)
    if config.samples < wanted:
        wanted = -(-config.samples // config.batch_size) * config.batch_size
    return tuple(np.random.default_rng(config.seed).permutation(good)[:wanted].tolist())
