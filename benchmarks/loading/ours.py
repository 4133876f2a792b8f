"""This library's lanes, and the limits that every lane is compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from benchmarks.loading.job import Job
from orchdata.engines.engine import use_one_thread


def threads(job: Job) -> Iterator[int]:
    """Threads of this process; batches are packed."""
    return _epoch(job, num_workers=0, num_threads=job.workers)


def processes(job: Job) -> Iterator[int]:
    """Worker processes of one thread each; batches are packed."""
    return _epoch(job, num_workers=job.workers, num_threads=1)


def forked(job: Job) -> Iterator[int]:
    """The same, forked off the process that iterates, as torch's DataLoader does."""
    return _epoch(job, num_workers=job.workers, num_threads=1, context="fork")


def _epoch(job: Job, *, num_workers: int, num_threads: int, context: str | None = None) -> Iterator[int]:
    # Not imported at the top: other lanes have their decoding from here, and their memory is without the rest.
    from orchdata.dataloader import DataLoader
    from orchdata.delivery.policy import ErrorPolicy

    loader = DataLoader(
        job.shards.open(),
        batch_size=job.batch_size,
        shuffle=True,
        seed=job.seed,
        num_workers=num_workers,
        num_threads=num_threads,
        multiprocessing_context=context,
        dp=(0, 1),
        # Of a data set of the user's: the other lanes have good samples alone.
        on_error=ErrorPolicy("skip", max_failures=None),
    )
    for batch in islice(loader, -(-len(job.samples) // job.batch_size)):
        yield len(batch.sample_ids)


def raw_read(job: Job) -> Iterator[int]:
    """The bytes of all samples, each dropped when it was read."""
    for first in range(0, len(job.samples), job.batch_size):
        numbers = range(first, min(first + job.batch_size, len(job.samples)))
        yield len([None for number in numbers if job.samples.read(number)])


def bare_threads(job: Job) -> Iterator[int]:
    """A pool of threads that decodes bytes in memory: no reading, no order, no batches to pack."""
    samples = [job.samples.read(number) for number in range(len(job.samples))]
    with ThreadPoolExecutor(job.workers, initializer=use_one_thread) as pool:
        under_way: deque[Future[Any]] = deque()
        left = iter(samples)
        while True:
            wanted = 2 * job.batch_size * job.workers - len(under_way)
            under_way.extend(pool.submit(job.samples.decode, one) for one in islice(left, wanted))
            if not under_way:
                return
            batch = [under_way.popleft().result() for _ in range(min(job.batch_size, len(under_way)))]
            yield len(batch)
