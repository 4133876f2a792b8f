"""What a lane loads, and its epochs, in the process that runs it.

Two epochs of one loader follow each other. A loader with files of its own begins with none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.loading.job import Shards
from benchmarks.loading.lanes import Lane
from benchmarks.loading.processes import spent_by
from benchmarks.throughput.records import PeersJob, Records

if TYPE_CHECKING:
    from orchdata.dataset.shard_dataset import ShardDataset

EPOCHS: Final = 2
_FEW: Final = 16


class FarShards(Shards):
    """Shards in the bucket."""

    __slots__ = ()

    def open(self) -> ShardDataset:
        """The data set."""
        from orchdata.dataset.shard_dataset import ShardDataset

        # The rest is in the environment, but obstore looks for this one in its options alone.
        return ShardDataset(list(self.urls), self.recipe, storage_options={"allow_http": "true"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteJob(PeersJob):
    """What a lane of the comparison loads.

    Attributes:
        near: the same shards, as files of this machine; `shards` are in the bucket.
        bucket: its name; what `prepare` of a lane has written is in its folder `lane.folder`.
        signed: URLs of the shards, for programs without credentials.
        shard_bytes: of a tar, and so of the files that others write.
        scratch: an empty folder for copies that a loader keeps.
    """

    near: Shards
    bucket: str
    signed: tuple[str, ...]
    shard_bytes: int
    scratch: Path

    def url(self, folder: str) -> str:
        """Where a folder of the bucket is."""
        return f"s3://{self.bucket}/{folder}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Figures of one epoch.

    Attributes:
        samples_per_second: of its steady part, as in `orchdata bench throughput`.
        first_batch_seconds: from its beginning; of the first epoch from making the loader, after imports.
        cpu_seconds: of all processes of the lane, for a sample of the steady part.
        seconds: of all of it.
        began, ended: as `time.monotonic`.
    """

    samples_per_second: float
    first_batch_seconds: float
    cpu_seconds: float
    seconds: float
    began: float
    ended: float


def measure(lane: Lane, job: RemoteJob, lead: int) -> tuple[Epoch, ...]:
    """Run the epochs of one lane.

    Args:
        lead: samples at either end of an epoch that are not in its steady part.

    Raises:
        RuntimeError: another number of samples than the data set has.
        Exception: any that the lane's loader raises.
    """
    assert job.cache is not None
    os.environ["ORCHDATA_CACHE"] = str(job.cache)
    torch.set_num_threads(1)  # else its pools and the lane's threads fight over the cores
    if lane.module:
        import_module(lane.module)
    batches = lane.load(job)
    return tuple(_epoch(batches, len(job.samples), lead) for _ in range(EPOCHS))


def prepare(lane: Lane, job: RemoteJob, folder: Path) -> float:
    """Write what a lane needs into a folder; return the seconds that it took, without what a few samples take too."""
    import_module(lane.module)
    assert lane.prepare is not None
    seconds = []
    with TemporaryDirectory(dir=job.folder) as few:
        for count, where in ((_FEW, Path(few)), (len(job.records), folder)):
            began = time.perf_counter()
            lane.prepare(replace(job, records=Records(job.records.places[:count])), where)
            seconds.append(time.perf_counter() - began)
    return seconds[1] - seconds[0]


def _epoch(batches: Iterator[int], total: int, lead: int) -> Epoch:
    done, first = 0, 0.0
    marks: list[tuple[float, float, int]] = []  # time, CPU seconds, samples
    began = time.monotonic()
    for count in batches:
        now = time.monotonic()
        first = first or now - began
        done += count
        if done >= (lead, total - lead)[min(1, len(marks))] and len(marks) < 2:
            spent = sum(each.user + each.system for each in spent_by(os.getpid()).values())
            marks.append((now if marks else time.monotonic(), spent, done))
        if done >= total:
            break
    ended = time.monotonic()
    if done != total:
        raise RuntimeError(f"an epoch delivered {done} of {total} samples")
    (begin, cpu_begin, done_begin), (end, cpu_end, done_end) = marks
    samples = done_end - done_begin
    return Epoch(
        samples_per_second=samples / (end - begin),
        first_batch_seconds=first,
        cpu_seconds=(cpu_end - cpu_begin) / samples,
        seconds=ended - began,
        began=began,
        ended=ended,
    )
