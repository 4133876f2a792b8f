"""The work of a worker, in any process that is one: it sets up the process, opens a builder, and describes results.

WorkerSpec --Work--> an engine in this process, with the random states and the worker info that torch's workers have
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from orchdata.building.memory import Memory
from orchdata.building.step import Builder, BuildSpec
from orchdata.engines.engine import Engine, Workers
from orchdata.engines.processes.message import Unit, describe_value, read_value
from orchdata.engines.threads import InlineEngine, ThreadEngine, passed_on
from orchdata.loaders.child_process import lower_limit, taken_bytes
from orchdata.loaders.locks import share_cores
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.native.jit import load_numba
from orchdata.order.steps import StepTask


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs apart from its jobs: a value that is sent once."""

    spec: BuildSpec
    workers: Workers
    number: int = 0
    # Variables that it sets: those of the training process, if it runs on the same machine.
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_loading_threads(self) -> int:
        """Threads that load samples."""
        return max(1, self.workers.num_threads)


class Work:
    """A worker's part of one process, one of `num_processes` that share the cores of this machine; with a builder once
    `open` has returned.
    """

    def __init__(self, worker: WorkerSpec, num_processes: int) -> None:
        self.builder: Builder | None = None
        self._worker = worker
        self._reads = [0, 0, 0]
        self._requests: Counter[str] = Counter()
        # Set up the process: environment, kernels, memory limit and seeds.
        os.environ.update(worker.environ)
        share_cores(num_processes)
        requests.HERE.share(worker.workers.num_workers)
        torch.set_num_threads(1)
        with contextlib.suppress(Exception):  # a failure is reported when a kernel is called
            load_numba()  # before memory is limited, and by one thread
        if worker.workers.worker_memory is not None:
            lower_limit(resource.RLIMIT_DATA, taken_bytes() + worker.workers.worker_memory)
        seed = seed_process(worker.workers.base_seed, worker.number)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker.number, num_workers=worker.workers.num_workers, seed=seed, dataset=worker.workers.dataset
        )

    def open(self, watch: Watch, allocate: Callable[[StepTask], Memory] | None = None) -> Engine:
        """Open the data set. Raises what that raises."""
        worker = self._worker
        if worker.workers.worker_init_fn is not None:
            worker.workers.worker_init_fn(worker.number)
        builder = self.builder = worker.spec.open(watch=watch, allocate=allocate)
        if worker.workers.num_threads:
            return ThreadEngine(builder, num_threads=worker.workers.num_threads, depth=worker.workers.prefetch_factor)
        return InlineEngine(builder)

    def take_reads(self) -> tuple[list[int], dict[str, int]]:
        """Return the bytes read, and the requests made, since the last call."""
        reads = None if self.builder is None else self.builder.reads
        if reads is None:
            return [], {}
        total = [reads.storage.value, reads.cache.value, reads.used.value]
        new = [now - before for now, before in zip(total, self._reads, strict=True)]
        requests = Counter(reads.requests.as_dict())
        made = requests - self._requests
        self._reads, self._requests = total, requests
        return new, dict(made)


def add_reads(reads: ReadBytes | None, new: list[int], requests: Mapping[str, int]) -> None:
    """Add what `take_reads` returned in another process."""
    if reads is None or not new:
        return
    for count, each in zip((reads.storage, reads.cache, reads.used), new, strict=True):
        count.add(int(each))
    reads.requests.merge(dict(requests))


def sendable(error: BaseException, where: str) -> Exception:
    """Return the error as the training process raises it, with the worker's traceback, which pickle leaves out; `where`
    it was raised, as in "in DataLoader worker process 0".
    """
    story = "".join(traceback.format_exception(error)).rstrip()
    sent: Any = passed_on(error)
    sent.add_note(f"raised {where}:\n{story}")
    for each in (sent, _AsItIs(sent)):
        with contextlib.suppress(Exception):  # pickling a user's error may raise anything
            read_value(describe_value(each))
            return cast("Exception", each)
    return RuntimeError(f"{type(error).__name__}: {error}, raised {where}, does not pickle:\n{story}")


class _AsItIs:
    """An error that is not made of its `args`: it unpickles without a call of its `__init__`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self._error), self._error.args, vars(self._error))


def _remade(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def is_lost_by_torch(error: Exception) -> bool:
    """Whether torch's wrapper makes a TypeError of it: a class with a member `message`, as that of exception groups."""
    return bool(getattr(type(error), "message", None))


def error_of(unit: Unit) -> Any:
    """Return an error that was `sendable`."""
    try:
        value = read_value(unit)
    except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
        return RuntimeError(f"a worker process failed, and its error cannot be read: {error!r}")
    return value


def alone_of(worker: WorkerSpec) -> WorkerSpec:
    """Return the spec of a worker that loads single samples."""
    return replace(worker, workers=replace(worker.workers, num_threads=0, prefetch_factor=1))


class WorkerSeeds:
    """The base seeds of a loader's iterations, drawn from a generator; None for torch's default one.

    torch's loader draws one at each `iter()`, but for persistent workers only at the first: workers that are started
    `later`, after an error or for a state, have seeds derived from it.
    """

    def __init__(self, generator: torch.Generator | None, *, persistent: bool) -> None:
        self._generator = generator
        self._persistent = persistent
        self.later: torch.Generator | None = None

    def draw(self) -> int:
        """Draw the base seed of one more iteration."""
        if self.later is not None:
            return _draw(self.later)
        return self.follow(_draw(self._generator))

    def follow(self, base_seed: int) -> int:
        """Use this base seed for the next iteration: it is new, or a state has stored it."""
        if self.later is None and self._persistent:
            self.later = torch.Generator().manual_seed(base_seed)
        return base_seed


def seed_process(base_seed: int, number: int) -> int:
    """Set the random states of this process, worker `number`, as torch's workers have them. Returns its seed."""
    seed = base_seed + number
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, number))  # noqa: NPY002
    return seed


def _draw(generator: torch.Generator | None) -> int:
    """Draw a seed as torch's loader does at each `iter()`, with or without workers."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
