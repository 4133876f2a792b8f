"""Loaders that decode in threads, or in worker processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.throughput.decoding import pack
from benchmarks.throughput.records import PeersJob
from orchdata.loaders.samples.sample import Sample


def spdl(job: PeersJob) -> Iterator[int]:
    """A pipeline of one stage that reads and decodes, in as many threads as there are workers, and one that packs."""
    from spdl.pipeline import PipelineBuilder

    def decoded(number: int) -> Sample:
        return job.decoder(job.records[number])

    pipeline: Any = (
        PipelineBuilder()
        .add_source(np.random.default_rng(job.seed).permutation(len(job.records)).tolist())
        .pipe(decoded, concurrency=job.workers)
        .aggregate(job.batch_size)
        .pipe(pack)
        .add_sink(2)
        .build(num_threads=job.workers + 1)
    )
    with pipeline.auto_stop():
        for batch in pipeline:
            yield len(batch["number"])


def grain_threads(job: PeersJob) -> Iterator[int]:
    """A map of samples read by threads, then batched."""
    import grain

    options = grain.ReadOptions(num_threads=job.workers, prefetch_buffer_size=2 * job.workers * job.batch_size)
    yield from _grain(job, options, processes=0)


def grain_processes(job: PeersJob) -> Iterator[int]:
    """The same in worker processes of one thread each."""
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2 * job.batch_size)
    yield from _grain(job, options, processes=job.workers)


def _grain(job: PeersJob, options: Any, *, processes: int) -> Iterator[int]:
    import grain

    data: Any = grain.MapDataset.source(job.records).shuffle(seed=job.seed).map(job.decoder)
    data = data.to_iter_dataset(options).batch(job.batch_size, batch_fn=pack)
    if processes:
        data = data.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=processes))
    for batch in data:
        yield len(batch["number"])
