"""Loaders take turns over one job: what `python -m benchmarks.throughput` measures.

    shards --index--> samples --a child process a lane and turn: measure()--> Figures --> report

Lanes are threads and worker processes of this library, other loaders, and two limits in the same turns: reading alone,
and the same decoding by bare threads, from memory. The first turn measures memory and does not count for time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchdata.bench import Result, WideTable

if TYPE_CHECKING:
    from benchmarks.loading.job import Job
    from benchmarks.loading.lanes import Lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What to measure.

    Attributes:
        samples: of the made-up data set (JPEGs of about 500 x 400 and 82 KiB, three in four with WAV or FLAC, text).
        consumer: what is done with each batch: "none", "torch" (small operations) or "python" (pure Python).
        consumer_ms: how long that takes where nothing else runs.
        batch_size: samples of a batch.
        workers: threads, or worker processes, of each loader.
        repeats: epochs of each that count.
        seed: of data set and order.
        folder: where to write data; a temporary folder there by default.
    """

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


def check_sizes(config: Comparison) -> None:
    """Raises ValueError for what cannot be measured."""
    for name in ("samples", "batch_size", "workers", "repeats"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.consumer not in (choices := ("none", "torch", "python")):
        raise ValueError(f"consumer must be one of {', '.join(choices)}, got {config.consumer!r}")
    if not config.consumer_ms > 0:
        raise ValueError(f"consumer_ms must be above 0, got {config.consumer_ms}")


def compare(config: Comparison, job: Job, lanes: Mapping[str, Lane]) -> list[Result | WideTable]:
    """Let lanes take turns over one job, and report. Raises ValueError for too few samples."""
    from benchmarks.loading.consumers import rounds_for
    from benchmarks.loading.report import make_results
    from benchmarks.loading.turns import Turns

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


def made_up_shards(config: Comparison, folder: Path) -> list[str]:
    """Tars in a folder of their own."""
    from benchmarks.loading.corpus import Corpus

    (folder / "shards").mkdir()
    corpus = Corpus(samples=config.samples, shards=min(8, config.samples), seed=config.seed)
    return corpus.write(folder / "shards")
