"""Loaders that bring a format of their own: MosaicML Streaming, LitData, Energon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from benchmarks.resume.rank import RankJob
from benchmarks.throughput.energon_parts import task_encoder
from orchdata.loaders.samples.sample import Sample

CANONICAL_NODES: Final = 1
TOTAL_WORKERS: Final = 4
MICRO_BATCH: Final = 2


class _WithState:
    """A loader of `state_dict` and `load_state_dict`. All ranks load what rank 0 saved."""

    def __init__(self, job: RankJob, loader: Any) -> None:
        self._loader = loader
        if job.states:
            loader.load_state_dict(job.states[0])

    def steps(self) -> Iterator[Sequence[Sample]]:
        for batch in self._loader:
            yield batch["samples"]

    def state(self) -> Any:
        return self._loader.state_dict()


def streaming(job: RankJob) -> _WithState:
    """Elastic determinism: the same canonical nodes, seed and global batch on any number of ranks."""
    from streaming import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        local=str(job.data.folder / "streaming"),
        batch_size=job.batch_size,
        shuffle=True,
        shuffle_seed=job.data.seed,
        num_canonical_nodes=CANONICAL_NODES,
    )
    return _WithState(job, StreamingDataLoader(data, **_options(job)))


def litdata(job: RankJob) -> _WithState:
    """Shuffled chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    # By default `drop_last` follows the number of ranks, and a state with another one is refused.
    data = StreamingDataset(str(job.data.folder / "litdata"), shuffle=True, seed=job.data.seed, drop_last=True)
    return _WithState(job, StreamingDataLoader(data, **_options(job)))


def _options(job: RankJob) -> dict[str, Any]:
    def collate(rows: Sequence[dict[str, bytes]]) -> dict[str, list[Sample]]:
        return {"samples": job.decode_records(rows)}  # Mosaic's loader counts samples in a dict's first value

    return {"batch_size": job.batch_size, "num_workers": job.data.workers, "collate_fn": collate}


class Energon:
    """Reproducible scaling: the same number of workers over all ranks and the same micro-batches, of which a step
    accumulates as many as it needs. On another number of ranks `energon checkpoint redist` deals the states of workers.
    """

    def __init__(self, job: RankJob) -> None:
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        self._accumulated = job.batch_size // MICRO_BATCH
        config = WorkerConfig(
            rank=job.rank,
            world_size=job.num_ranks,
            num_workers=TOTAL_WORKERS // job.num_ranks,
            seed_offset=job.data.seed,
        )
        data = get_train_dataset(
            str(job.data.folder / "energon"),
            batch_size=MICRO_BATCH,
            shuffle_buffer_size=16,
            max_samples_per_sequence=8,
            worker_config=config,
            task_encoder=task_encoder(job.decode_fields),
        )
        self._loader = get_savable_loader(data)
        if job.states:
            self._loader.restore_state_rank(_redistributed(job))

    def steps(self) -> Iterator[Sequence[Sample]]:
        batches = iter(self._loader)
        while True:
            yield [sample for batch in islice(batches, self._accumulated) for sample in batch]

    def state(self) -> Any:
        return self._loader.save_state_rank()


def _redistributed(job: RankJob) -> Any:
    """The state of this rank; that of its number, if as many ranks saved theirs."""
    if len(job.states) == job.num_ranks:
        return job.states[job.rank]
    with TemporaryDirectory() as name:
        before, after = Path(name) / "before", Path(name) / "after"
        before.mkdir()
        after.mkdir()  # which the command does not make
        for rank, state in enumerate(job.states):
            torch.save(state, before / f"rank-{rank}.pt")
        files = map(str, sorted(before.iterdir()))
        command = [str(Path(sys.executable).parent / "energon"), "checkpoint", "redist", "--new-world-size"]
        subprocess.run([*command, str(job.num_ranks), *files, str(after)], check=True)
        return torch.load(after / f"rank-{job.rank}.pt", weights_only=False)
