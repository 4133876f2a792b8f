"""What a loader reads, and the memory of its processes after that. Light: all lanes import it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.loading.processes import Memory, memory_of_each, total_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryJob:
    """A mixture of sources in equal shares.

    Attributes:
        sources: the tars of each.
        folder: for other files of the loader; it may have been prepared.
        batch_size: samples of a batch.
        batches: that are read before memory is measured.
        workers: threads, or worker processes.
        seed: of the order.
    """

    sources: tuple[tuple[str, ...], ...]
    folder: Path
    batch_size: int
    batches: int
    workers: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Memory while the loader is in the middle of its epoch.

    Attributes:
        trainer: the process that iterates.
        workers: its worker processes.
        together: these, and all others that the loader has started.
    """

    trainer: Memory
    workers: tuple[Memory, ...]
    together: Memory


def measure(load: Callable[[MemoryJob], Generator[int]], job: MemoryJob) -> Used:
    """Read, and measure this process and those that it has started.

    Raises:
        ValueError: there were fewer samples.
    """
    batches = load(job)
    samples = sum(islice(batches, job.batches))
    if samples < job.batches * job.batch_size:
        raise ValueError(f"{samples} samples came in place of {job.batches * job.batch_size}")
    memory = memory_of_each(os.getpid())
    # A server that workers are forked off has children. A tracker of resources has none, but it is not a worker.
    servers = {_parent(process) for process in memory}
    workers = [used for process, used in memory.items() if process not in servers and not _is_tracker(process)]
    used = Used(
        trainer=memory[os.getpid()],
        workers=tuple(workers) if len(memory) > 1 else (),
        together=total_memory(memory.values()),
    )
    batches.close()
    return used


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _is_tracker(process: int) -> bool:
    return b"resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
