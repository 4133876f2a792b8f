"""The work of a worker, in any process that is one: it sets up the process, opens a builder, and describes results. And
worker processes: jobs in, built steps out; however one ends, there is nothing to clean up.

WorkerSpec --Work--> an engine in this process, with the random states and the worker info that torch's workers have
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import resource
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from orchdata.building.step import Builder, BuildSpec, BuiltStep, Memory
from orchdata.engines.engine import Engine, InlineEngine, ThreadEngine, Workers, passed_on, seed_process
from orchdata.engines.processes.message import Unit, describe_step, describe_value, packed, read_value, unpacked
from orchdata.engines.processes.slabs import Slabs, StepMemory
from orchdata.loaders.child_process import Channel, leave_out_what_is_loaded, lower_limit, taken_bytes
from orchdata.loaders.errors import StorageError
from orchdata.loaders.locks import share_cores
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.native.jit import load_numba
from orchdata.order.steps import StepTask

OUT_OF_MEMORY = 77
UNGUARDED = 78
"""Exit statuses: memory limit exceeded; a script that would start workers of workers."""
_MAX_REASON_CHARACTERS = 400


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


class PickledWorkerSpec:
    """A worker's spec on its way to a process. If it is pickled, our code in that process unpickles it, rather than
    multiprocessing, so that an error can name what does not unpickle.
    """

    def __init__(self, worker: WorkerSpec | None, pickled: bytes = b"") -> None:
        self._worker = worker
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        # By the same rules as the process around it: locks and sockets of multiprocessing can be sent.
        return PickledWorkerSpec, (None, bytes(ForkingPickler.dumps(self._worker)))

    def open(self) -> WorkerSpec:
        """Return the spec. Raises what unpickling raises."""
        if self._worker is None:
            self._worker = pickle.loads(self._pickled)  # noqa: S301 - of this process's parent
        return self._worker


def run_worker(channel: Channel, fds: list[int], num_loading_threads: int, pickled_spec: PickledWorkerSpec) -> None:
    """Run a worker process until it is asked to stop, or its parent has ended."""
    leave_out_what_is_loaded()  # a collection would write to all memory that is shared with the parent of a fork
    (rows,) = fds
    loading_rows = np.frombuffer(mmap.mmap(rows, num_loading_threads * 8), np.int64)
    os.close(rows)
    try:
        worker = pickled_spec.open()
    except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
        # A file that cannot be read now is a StorageError, not an object that does not pickle.
        trouble = list(error.args) if isinstance(error, StorageError) else []
        why = {"kind": "unreadable", "why": f"{type(error).__name__}: {error}", "trouble": trouble}
        channel.send(packed(why))
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent no longer wants this worker
        WorkerLoop(channel, worker, loading_rows).run()


class WorkerLoop:
    """Runs a worker: receives jobs, builds steps, sends them."""

    def __init__(self, channel: Channel, worker: WorkerSpec, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._channel = channel
        self._worker = worker
        self._watch = Watch(rows)
        self._slabs = Slabs(worker.workers.prefetch_factor)
        self._memory: dict[int, StepMemory] = {}  # by the id of a task: the same step may come twice
        self._lock = threading.Lock()
        self._work: Work | None = None

    def run(self) -> None:
        # Set up the process.
        worker = self._worker
        work = self._work = Work(worker, worker.workers.num_workers)
        self._send({"kind": "begun"})

        # Open the data set.
        try:
            engine = work.open(self._watch, self._allocate)
        except Exception as error:  # noqa: BLE001 - it is passed on
            self._send_error({"kind": "not started"}, error)
            return
        assert work.builder is not None
        if not worker.workers.num_threads:
            torch_collate.default_collate_fn_map[torch.Tensor] = partial(_stack, self._take)

        # Build the steps that the parent sends, until it closes the channel.
        self._send({"kind": "ready"})
        while (received := self._channel.receive()) is not None:
            message = unpacked(received[0])
            self._watch.known_bad_rows.update(message["known_bad_rows"])
            self._slabs.take_back(message["returned"])
            if message["kind"] == "alone":
                self._load_alone(work.builder, message["row"])
            elif message["kind"] == "build":
                self._begin(engine, message)

    def _begin(self, engine: Engine, message: dict[str, Any]) -> None:
        task: StepTask = message["task"]
        self._at_work = self._memory[id(task)] = StepMemory(self._slabs)
        try:
            future = engine.submit(task)
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a data set must not end the worker
            future = Future()
            future.set_exception(passed_on(error))
        future.add_done_callback(partial(self._built, message["job"], task))

    def _allocate(self, task: StepTask) -> Memory:
        return self._memory[id(task)]

    def _take(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Take memory of the step that the main thread builds."""
        return self._at_work.take(num_bytes)

    def _built(self, job: int, task: StepTask, future: Future[BuiltStep]) -> None:
        finished = time.monotonic()
        memory = self._memory.pop(id(task))
        try:
            built = future.result()
            self._send({"kind": "built", "job": job, "finished": finished}, describe_step(built), memory)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            if isinstance(error, MemoryError):
                self._end_out_of_memory(error)
            memory.drop()
            self._send_error({"kind": "failed", "job": job}, passed_on(error))

    def _end_out_of_memory(self, error: MemoryError) -> None:
        """If memory is limited, report the error and end this process."""
        if self._worker.workers.worker_memory is None:
            return
        with contextlib.suppress(Exception):
            self._send({"kind": "out of memory", "why": str(error)[:_MAX_REASON_CHARACTERS]})
        os._exit(OUT_OF_MEMORY)

    def _load_alone(self, builder: Builder, row: int) -> None:
        try:
            builder.load_alone(row)
        except MemoryError as error:
            self._end_out_of_memory(error)
        except BaseException:  # noqa: BLE001, S110 - only the end of the process counts
            pass
        self._send({"kind": "survived"})

    def _send_error(self, message: dict[str, Any], error: Exception) -> None:
        where = f"in DataLoader worker process {self._worker.number}"
        self._send(message, describe_value(sendable(error, where)), StepMemory(self._slabs))

    def _send(self, message: dict[str, Any], unit: Unit | None = None, memory: StepMemory | None = None) -> None:
        """Send a message; its unit is written to shared memory, and the locations of that are sent."""
        fds: list[int] = []
        if unit is not None and memory is not None:
            message["unit"] = [*map(memory.location_of, (unit.header, *unit.buffers))]
            message["slabs"] = list(zip((slab.number for slab in memory.slabs), memory.used, strict=True))
        with self._lock:
            if memory is not None:
                message["reads"], message["requests"] = ([], {}) if self._work is None else self._work.take_reads()
                new = [slab for slab in memory.slabs if slab.file is not None]
                message["new"] = [(slab.number, len(slab.array)) for slab in new]
                message["dropped"] = self._slabs.take_dropped()
                fds = [slab.file for slab in new if slab.file is not None]
            try:
                self._channel.send(packed(message), fds)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)  # the parent no longer wants this worker, as after the loss of its fork server
            if memory is not None:
                for slab in new:
                    slab.close_file()


def _stack(
    take: Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]],
    batch: list[torch.Tensor],
    *,
    collate_fn_map: Any = None,  # noqa: ARG001 - as torch calls it
) -> torch.Tensor:
    """Stack tensors as `default_collate` does, directly in the memory that the training process gets."""
    first = batch[0]
    if first.layout != torch.strided or first.is_nested:
        collated: torch.Tensor = torch_collate.collate_tensor_fn(batch)
        return collated
    plain = all(
        type(each) is torch.Tensor
        and each.layout == torch.strided
        and each.device.type == "cpu"
        and each.dtype == first.dtype
        and each.shape == first.shape
        and not each.requires_grad
        and not each.is_quantized
        for each in batch
    )
    if not plain or not first.numel():
        return torch.stack(batch, 0)
    out = torch.frombuffer(take(len(batch) * first.nbytes), dtype=first.dtype).view(len(batch), *first.shape)
    return torch.stack(batch, 0, out=out)
