"""Energon's blended data set, in its worker processes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory.job import MemoryJob
from benchmarks.throughput.energon_parts import prepare_tars, task_encoder


def blended(job: MemoryJob) -> Generator[int]:
    """A metadataset that blends all sources with equal weights, not shuffled."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=job.workers)
    data = get_train_dataset(
        str(job.folder / "energon" / "blend.yaml"),
        batch_size=job.batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=config,
        task_encoder=task_encoder(_tokens),
    )
    for batch in get_loader(data):
        yield len(batch)


def prepare(job: MemoryJob, folder: Path) -> None:
    """Write the index of each source, and the metadataset."""
    lines = ["__module__: megatron.energon", "__class__: MetadatasetV2", "splits:", "  train:", "    blend:"]
    for number, urls in enumerate(job.sources):
        source = folder / f"source-{number:04d}"
        source.mkdir()
        prepare_tars(urls, source)
        lines += ["      - weight: 1", f"        path: ./{source.name}"]
    (folder / "blend.yaml").write_text("\n".join(lines) + "\n")


def _tokens(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    import torch

    return [torch.frombuffer(bytearray(row["txt"]), dtype=torch.uint8) for row in rows]
