"""One epoch of one lane, in the process that runs it: figures of its steady part.

    first batch | lead: caches, kernels, queues fill | measured, from delivery to delivery | lead: queues drain

Neither the start nor the end is steady: at the beginning batches under way were not delivered yet, at the end there
are none. Between them as many are under way at both ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from benchmarks.loading.consumers import CONSUMERS
from benchmarks.loading.job import Job
from benchmarks.loading.lanes import Lane
from benchmarks.loading.processes import Spent, spent_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one epoch.

    Attributes:
        first_batch_seconds: from making the loader to its first batch; imports are done before.
        samples_per_second: of the steady part.
        spent: of each process of the lane for each of these samples: that which iterates first, without the consumer's
            work, then the others, busiest first.
        waits: seconds that the consumer waited for each batch of the steady part.
        works: seconds that its work took for each of them; none where there is no work.
    """

    first_batch_seconds: float
    samples_per_second: float
    spent: tuple[Spent, ...]
    waits: tuple[float, ...]
    works: tuple[float, ...]

    @property
    def cpu_seconds(self) -> float:
        """Of all processes together, for a sample."""
        return sum(each.user + each.system for each in self.spent)


def measure(lane: Lane, job: Job, consumer: str, rounds: int, lead: int) -> Figures:
    """Run one epoch.

    Args:
        lane: how to load.
        job: what to load.
        consumer, rounds: work for each batch.
        lead: samples at either end that are not measured.

    Raises:
        RuntimeError: another number of samples than the data set has, or batches too large to leave a steady part.
        Exception: any that the lane's loader raises.
    """
    if job.cache is not None:
        os.environ["ORCHDATA_CACHE"] = str(job.cache)
    torch.set_num_threads(1)  # else its pools and the lane's threads fight over the cores
    if lane.module:
        import_module(lane.module)
    started = time.perf_counter()
    return _figures(lane.load(job), started, len(job.samples), lead, consumer, rounds)


def _figures(batches: Iterator[int], started: float, total: int, lead: int, consumer: str, rounds: int) -> Figures:
    work = CONSUMERS[consumer]
    done, work_cpu = 0, 0.0
    waits: list[float] = []
    works: list[float] = []
    marks: list[tuple[float, dict[int, Spent], int, int]] = []  # time, what processes spent, samples, batches
    asked = started
    for count in batches:
        now = time.perf_counter()
        waits.append(now - asked)
        done += count
        if done >= (lead, total - lead)[min(1, len(marks))] and len(marks) < 2:
            spent = spent_by(os.getpid())
            mine = spent[os.getpid()]
            spent[os.getpid()] = mine._replace(user=mine.user - work_cpu)
            marks.append((now if marks else time.perf_counter(), spent, done, len(waits)))
        if work:
            began, cpu_began = time.perf_counter(), time.thread_time()
            work(rounds)
            works.append(time.perf_counter() - began)
            work_cpu += time.thread_time() - cpu_began
        asked = time.perf_counter()
    if done != total:
        raise RuntimeError(f"an epoch delivered {done} of {total} samples")
    if len(marks) < 2:
        raise RuntimeError(f"batches too large: nothing lies between the first and the last {lead} of {total} samples")
    (begin, spent_begin, done_begin, first), (end, spent_end, done_end, last) = marks
    samples = done_end - done_begin
    return Figures(
        first_batch_seconds=waits[0],
        samples_per_second=samples / (end - begin),
        spent=_between(spent_begin, spent_end, samples),
        waits=tuple(waits[first:last]),
        works=tuple(works[first:last]),
    )


def _between(begin: dict[int, Spent], end: dict[int, Spent], samples: int) -> tuple[Spent, ...]:
    """Return what each process spent per sample: this one, then the others, busiest first."""
    nothing = Spent(0.0, 0.0, 0)
    spent_by_process = {
        process: Spent(
            *((now - before) / samples for now, before in zip(spent, begin.get(process, nothing), strict=True))
        )
        for process, spent in end.items()
    }
    mine = spent_by_process.pop(os.getpid())
    return mine, *sorted(spent_by_process.values(), key=lambda each: each.user + each.system, reverse=True)
