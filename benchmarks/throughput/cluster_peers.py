"""Loaders that bring a format or a runtime of their own: Energon's prepared folders, Ray's tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.throughput.decoding import DecodePack
from benchmarks.throughput.energon_parts import prepare_tars, task_encoder
from benchmarks.throughput.records import PeersJob, joined, split

_RECORD: Final = "record"
_AHEAD_BYTES: Final = 64 << 20


def energon(job: PeersJob) -> Iterator[int]:
    """A crude data set: its samples as webdataset has them, decoded where they are encoded, in worker processes."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=job.workers)
    data = get_train_dataset(
        str(job.folder / "energon"),
        batch_size=job.batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
        worker_config=config,
        task_encoder=task_encoder(DecodePack(job.decoder)),
    )
    for batch in get_loader(data):
        yield int(batch["number"].shape[0])


def prepare_energon(job: PeersJob, folder: Path) -> None:
    """Write links to the tars, and the index that energon expects next to them."""
    prepare_tars(job.urls, folder)


def ray_data(job: PeersJob) -> Iterator[int]:
    """A Parquet file mapped in batches by as many tasks at once as there are workers."""
    import ray

    ray.init(address="local", num_cpus=job.workers, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # Without a limit it decodes the whole epoch ahead of the first batch.
    context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=_AHEAD_BYTES)
    decode = DecodePack(job.decoder)

    def packed(rows: dict[str, Any]) -> dict[str, Any]:
        batch = decode([split(record) for record in rows[_RECORD]])
        # Arrow has no bfloat16, and each column one row: the batch's whole tensor.
        arrays = {name: _bits(tensor) for name, tensor in batch.items()}
        return {name: np.stack([array]) for name, array in arrays.items()}

    data = ray.data.read_parquet(str(job.folder / "ray")).map_batches(packed, batch_size=job.batch_size)
    for row in data.iter_rows():
        yield len(row["number"])


def _bits(tensor: torch.Tensor) -> Any:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def write_parquet(job: PeersJob, folder: Path) -> None:
    """Files of 64 records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for start in range(0, len(job.records), 64):
        stop = min(start + 64, len(job.records))
        rows = pa.array([joined(job.records[number]) for number in range(start, stop)], pa.binary())
        pq.write_table(pa.table({_RECORD: rows}), folder / f"{start:06d}.parquet")
