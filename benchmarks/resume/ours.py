"""This library's loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.resume.rank import RankJob
from orchdata.dataloader import DataLoader
from orchdata.loaders.samples.sample import Sample


def as_they_are(samples: Sequence[Sample]) -> Sequence[Sample]:
    """A `collate_fn` that leaves samples apart."""
    return samples


class Ours:
    """Shuffled, balanced over the ranks. The state is the same on every rank."""

    def __init__(self, job: RankJob, **options: Any) -> None:
        self._loader = DataLoader(
            job.data.shards.open(),
            global_batch_size=job.data.batch_size,
            shuffle=True,
            seed=job.data.seed,
            collate_fn=as_they_are,
            **options,
        )
        if job.states:
            self._loader.load_state_dict(job.states[0])

    def steps(self) -> Iterator[Sequence[Sample]]:
        yield from self._loader

    def state(self) -> Any:
        return self._loader.state_dict()


def threads(job: RankJob) -> Ours:
    """Samples are read in threads of the training process."""
    return Ours(job, num_threads=job.data.workers)


def processes(job: RankJob) -> Ours:
    """Samples are read in worker processes."""
    return Ours(job, num_workers=job.data.workers)
