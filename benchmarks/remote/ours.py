"""This library's lanes, and the limit of all lanes: bytes of samples from the bucket, not decoded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.loading.job import Shards
from benchmarks.remote.job import EPOCHS, RemoteJob
from orchdata.loaders.storage.files import Cache

_CACHE_BYTES: Final = 1 << 40
_READERS: Final = 32


def threads(job: RemoteJob) -> Iterator[int]:
    return _epochs(job, job.shards, num_threads=job.workers)


def processes(job: RemoteJob) -> Iterator[int]:
    return _epochs(job, job.shards, num_workers=job.workers, num_threads=1)


def near_threads(job: RemoteJob) -> Iterator[int]:
    return _epochs(job, job.near, num_threads=job.workers)


def near_processes(job: RemoteJob) -> Iterator[int]:
    return _epochs(job, job.near, num_workers=job.workers, num_threads=1)


def cached_threads(job: RemoteJob) -> Iterator[int]:
    return _epochs(job, job.shards, num_threads=job.workers, cache=Cache(job.scratch, max_bytes=_CACHE_BYTES))


def cached_processes(job: RemoteJob) -> Iterator[int]:
    return _epochs(
        job, job.shards, num_workers=job.workers, num_threads=1, cache=Cache(job.scratch, max_bytes=_CACHE_BYTES)
    )


def _epochs(job: RemoteJob, shards: Shards, **options: Any) -> Iterator[int]:
    # Not imported at the top: other lanes have this file too, and their time is without the rest.
    from orchdata.dataloader import DataLoader

    loader: Any = DataLoader(
        shards.open(),
        batch_size=job.batch_size,
        shuffle=True,
        seed=job.seed,
        dp=(0, 1),
        persistent_workers=True,
        **options,
    )
    for _ in range(EPOCHS):
        for batch in loader:
            yield len(batch.sample_ids)


def reading_alone(job: RemoteJob) -> Iterator[int]:
    """One request a sample, many at a time: what the server and the proxy can give."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(job.bucket, client_options={"allow_http": True})

    def read(number: int) -> int:
        shard, _, members = job.records.places[number]
        start = min(offset for _, offset, _ in members)
        stop = max(offset + size for _, offset, size in members)
        key = f"shards/{Path(shard).name}"
        return len(obstore.get_range(store, key, start=start, end=stop))

    with ThreadPoolExecutor(_READERS) as pool:
        for _ in range(EPOCHS):
            read_bytes = pool.map(read, range(len(job.records)))
            while batch := list(islice(read_bytes, job.batch_size)):
                yield len(batch)
