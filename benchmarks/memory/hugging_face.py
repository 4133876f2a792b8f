"""Hugging Face's interleaved IterableDatasets, in worker processes of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks.memory.job import MemoryJob


def interleaved(job: MemoryJob) -> Generator[int]:
    """`interleave_datasets` with equal probabilities, not shuffled."""
    import torch

    datasets: Any = import_module("datasets")
    sources = [
        datasets.load_dataset("webdataset", data_files={"train": list(urls)}, split="train", streaming=True)
        for urls in job.sources
    ]
    share = [1 / len(sources)] * len(sources)
    data = datasets.interleave_datasets(sources, probabilities=share, seed=job.seed, stopping_strategy="all_exhausted")
    loader: Any = torch.utils.data.DataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, collate_fn=_tokens
    )
    for batch in loader:
        yield len(batch)


def _tokens(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Texts as UTF-8 bytes, as this library's default recipe has them."""
    import torch

    return [torch.frombuffer(bytearray(row["txt"].encode()), dtype=torch.uint8) for row in rows]
