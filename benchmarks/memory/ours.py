"""This library's mixture."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import orchdata as od
from benchmarks.memory.job import MemoryJob


def threads(job: MemoryJob) -> Generator[int]:
    """Samples are read in threads of the training process."""
    return _batches(job, num_threads=job.workers)


def processes(job: MemoryJob) -> Generator[int]:
    """Samples are read in worker processes."""
    return _batches(job, num_workers=job.workers)


def forked(job: MemoryJob) -> Generator[int]:
    """The same, forked off the training process, as torch's DataLoader does."""
    return _batches(job, num_workers=job.workers, multiprocessing_context="fork")


def prepare(job: MemoryJob, _folder: Path) -> None:
    """Build the indexes, once."""
    os.environ["ORCHDATA_CACHE"] = str(job.folder / "cache")
    for urls in job.sources:
        od.ShardDataset(list(urls), od.Recipe(image=None, audio=None)).index()


def _batches(job: MemoryJob, **options: Any) -> Generator[int]:
    os.environ["ORCHDATA_CACHE"] = str(job.folder / "cache")
    recipe = od.Recipe(image=None, audio=None)
    sources = {
        f"source-{number:04d}": od.Source(od.ShardDataset(list(urls), recipe), weight=1.0)
        for number, urls in enumerate(job.sources)
    }
    mixture = od.Mixture(sources, by="samples", stop="first")
    loader = od.DataLoader(mixture, global_batch_size=job.batch_size, shuffle=True, seed=job.seed, dp=(0, 1), **options)
    for batch in loader:
        yield len(batch.sample_ids)
