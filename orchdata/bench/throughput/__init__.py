"""`orchdata bench throughput`: loading speed beside every other loader that is installed, with the same decoding.

    tars --index--> Records --a child process a lane and turn: measure()--> Figures --> report
         '--prepare, not timed--> formats that peers want

All lanes take the same samples, decode them with the same functions under the same recipe, and pack a batch into one
tensor for each modality. What differs is who reads, schedules, and moves data to the process that iterates. Two limits
are measured in the same turns: reading alone, and the same decoding by bare threads, from memory. Lanes take turns; the
first turn measures memory and does not count for time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchdata.bench.harness import Result, WideTable, work_folder

if TYPE_CHECKING:
    from orchdata.bench.throughput.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputBench:
    """What to measure.

    Attributes:
        data: plain tars, as globs, braces or files; without any, a made-up data set.
        samples: of the made-up data set: JPEGs of about 500 x 400 and 82 KiB, three in four with WAV or FLAC, text.
        peers: "all", "none", or names with commas between them.
        consumer: what is done with each batch: "none", "torch" (small operations) or "python" (pure Python).
        consumer_ms: how long that takes where nothing else runs.
        decode: of the peers and of bare threads: "orchdata", as ours, or "pillow", images by Pillow and torch.
        max_tokens: of an image, above which it is resized; by default only the largest are.
        draft: whether large JPEGs are scaled while they are decoded.
        batch_size: samples of a batch.
        workers: threads, or worker processes, of each loader.
        repeats: epochs of each that count.
        seed: of data set and order.
        folder: where to write data; a temporary folder there by default.
    """

    data: tuple[str, ...] | None = None
    samples: int = 800
    peers: str = "all"
    consumer: str = "none"
    consumer_ms: float = 50.0
    decode: str = "orchdata"
    max_tokens: int = 4096
    draft: bool = False
    batch_size: int = 16
    workers: int = 2
    repeats: int = 3
    seed: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "workers", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, choices in (("consumer", ("none", "torch", "python")), ("decode", ("orchdata", "pillow"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not self.consumer_ms > 0:
            raise ValueError(f"consumer_ms must be above 0, got {self.consumer_ms}")


def run(config: ThroughputBench) -> list[Result | WideTable]:
    """Measure. A loader that is not installed, or fails, is a row that says why.

    Raises ValueError for unknown peers, data that cannot be compared, and too few samples for batches of this size.
    """
    from orchdata.bench.throughput.consumers import rounds_for
    from orchdata.bench.throughput.lanes import chosen_lanes
    from orchdata.bench.throughput.report import make_results
    from orchdata.bench.throughput.turns import Turns

    lanes = chosen_lanes(config.peers)
    with work_folder(config.folder) as folder:
        job = _job(config, folder)
        lead = max(2 * config.workers * config.batch_size, len(job.records) // 10)
        if len(job.records) < 3 * lead:
            raise ValueError(
                f"{config.workers} workers and batches of {config.batch_size} need {3 * lead} samples, "
                f"got {len(job.records)}"
            )
        seconds = 0.0 if config.consumer == "none" else config.consumer_ms / 1e3
        turns = Turns(job, config.consumer, rounds_for(config.consumer, seconds), lead)
        for turn in range(1 + config.repeats):
            for lane in lanes if turn % 2 else lanes[::-1]:
                turns.take(lane)
        figures = {lane: turns.figures[lane] for lane in lanes if lane in turns.figures}
        sample_bytes = job.records.num_bytes / len(job.records)
        return make_results(figures, turns.peaks, turns.reasons, sample_bytes, seconds)


def _job(config: ThroughputBench, folder: Path) -> Job:
    """The data, indexed."""
    from orchdata.bench.corpus import Corpus
    from orchdata.bench.throughput.decoding import Decoder, PillowImages
    from orchdata.bench.throughput.job import Job, Records
    from orchdata.loaders.index.build import build_index
    from orchdata.loaders.modalities.image import ImagePreprocessor
    from orchdata.loaders.recipe import Recipe
    from orchdata.loaders.storage.cache import CacheFolder
    from orchdata.loaders.storage.paths import expand_paths

    if config.data:
        urls = expand_paths(config.data)
    else:
        (folder / "shards").mkdir()
        shards = min(8, config.samples)
        urls = Corpus(samples=config.samples, shards=shards, seed=config.seed).write(folder / "shards")
    recipe = Recipe(image=ImagePreprocessor(max_tokens=config.max_tokens, draft=config.draft))
    theirs = recipe if config.decode == "orchdata" else Recipe(image=PillowImages(max_tokens=config.max_tokens))
    index = build_index(urls, recipe, cache=CacheFolder(folder / "cache"))
    return Job(
        urls=tuple(urls),
        records=Records.of(index),
        recipe=recipe,
        decoder=Decoder(theirs),
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        cache=folder / "cache",
        folder=folder,
    )
