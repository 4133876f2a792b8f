"""torch's own loader, torchdata's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.resume.rank import RankJob
from orchdata.loaders.samples.sample import Sample


class _Decoded:
    """A map-style data set of decoded samples."""

    def __init__(self, job: RankJob) -> None:
        self._job = job

    def __len__(self) -> int:
        return len(self._job.data.records)

    def __getitem__(self, number: int) -> Sample:
        return self._job.data.decoder(self._job.data.records[number])


def _as_they_are(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples


class TorchSkipping:
    """torch.utils.data.DataLoader has no state: the steps that were trained are read and dropped."""

    def __init__(self, job: RankJob) -> None:
        data, self._done = _Decoded(job), job.done
        sampler = DistributedSampler(data, job.num_ranks, job.rank, seed=job.data.seed)  # type: ignore[arg-type,var-annotated]
        sampler.set_epoch(0)
        self._loader: Any = DataLoader(
            data,  # type: ignore[arg-type]
            batch_size=job.batch_size,
            sampler=sampler,
            num_workers=job.data.workers,
            collate_fn=_as_they_are,
        )

    def steps(self) -> Iterator[Sequence[Sample]]:
        yield from islice(self._loader, self._done, None)

    def state(self) -> Any:
        return None


class _Stateful:
    """A StatefulDataLoader: each rank saves its own state, and loads the one of its number."""

    def __init__(self, job: RankJob, data: Any, **options: Any) -> None:
        stateful: Any = import_module("torchdata.stateful_dataloader")
        self._loader = stateful.StatefulDataLoader(
            data, batch_size=job.batch_size, num_workers=job.data.workers, **options
        )
        if job.own_state is not None:
            self._loader.load_state_dict(job.own_state)

    def steps(self) -> Iterator[Sequence[Sample]]:
        yield from self._loader

    def state(self) -> Any:
        return self._loader.state_dict()


def torchdata(job: RankJob) -> _Stateful:
    """A map-style data set, shuffled by a StatefulDistributedSampler."""
    samplers: Any = import_module("torchdata.stateful_dataloader.sampler")
    data = _Decoded(job)
    sampler = samplers.StatefulDistributedSampler(data, job.num_ranks, job.rank, seed=job.data.seed)
    return _Stateful(job, data, sampler=sampler, collate_fn=_as_they_are)


def hugging_face(job: RankJob) -> _Stateful:
    """An IterableDataset in its stored order, split by node."""
    return _iterable(job)


def hugging_face_shuffled(job: RankJob) -> _Stateful:
    """An IterableDataset that shuffles its shards, and samples in a buffer."""
    return _iterable(job, shuffled=True)


def _iterable(job: RankJob, *, shuffled: bool = False) -> _Stateful:
    datasets: Any = import_module("datasets")
    nodes: Any = import_module("datasets.distributed")
    (path,) = (job.data.folder / "datasets").glob("*.arrow")
    data = datasets.Dataset.from_file(str(path)).to_iterable_dataset(num_shards=SHARDS)
    if shuffled:
        # With more shards in the buffer, as by default, datasets 5.2 fails to load a state in worker processes.
        data = data.shuffle(seed=job.data.seed, buffer_size=BUFFER, max_buffer_input_shards=1)
    data = nodes.split_dataset_by_node(data, rank=job.rank, world_size=job.num_ranks)
    return _Stateful(job, data, collate_fn=job.decode_records)


SHARDS = 8
"""Of the IterableDataset: one for each worker process on 4 ranks."""
BUFFER = 16
"""Samples that it shuffles at a time."""
