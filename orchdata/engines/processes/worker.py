"""A worker process: jobs in, built steps out. However it ends, there is nothing to clean up."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import resource
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from orchdata.building.memory import Memory
from orchdata.building.step import Builder, BuiltStep
from orchdata.engines.engine import Engine
from orchdata.engines.inline import InlineEngine
from orchdata.engines.processes.channel import Channel
from orchdata.engines.processes.life import end_with
from orchdata.engines.processes.message import Unit, describe_step, describe_value, read_value, unpack_rows
from orchdata.engines.processes.restart_state import RandomStates, packed, unpacked
from orchdata.engines.processes.slabs import Slabs, StepMemory
from orchdata.engines.seeds import seed_process
from orchdata.engines.threads import ThreadEngine, passed_on
from orchdata.loaders.errors import OrchdataError, StorageError
from orchdata.loaders.limited_process import lower_limit, taken_bytes
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.tokenizer_threads import share_cores
from orchdata.loaders.watch import Watch
from orchdata.native.jit import load_numba
from orchdata.order.steps import Begin, StepTask

OUT_OF_MEMORY = 77
UNGUARDED = 78
"""Exit statuses: memory limit exceeded; a script that would start workers of workers."""
_MAX_REASON_CHARACTERS = 400


class Opens(Protocol):
    """The part of a `BuildSpec` that a worker uses."""

    def open(self, *, watch: Watch, allocate: Callable[[StepTask], Memory]) -> Builder: ...


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options that all workers of a loader share.

    Attributes:
        num_threads: threads of a worker that read and decode; 0 for its main thread alone.
        max_jobs: the most jobs that a worker has at a time.
        worker_init_fn: called with the worker's number before it builds anything.
        dataset: as in `torch.utils.data.get_worker_info()`.
        as_torch: whether random states and errors are those of torch's workers, and a worker that cannot start fails
            only its own steps.
        memory: bytes that a worker may allocate in addition to those it starts with; None for no limit.
    """

    num_workers: int
    num_threads: int
    max_jobs: int
    worker_init_fn: Callable[[int], None] | None
    dataset: Any
    as_torch: bool
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs apart from its jobs: a value that is sent once.

    Attributes:
        spec: of the steps that it builds.
        number: of the worker.
        base_seed: torch's seed of an iteration; the worker's seed is `base_seed + number`.
        environ: of the training process.
        state: the data set's state that it starts with, pickled.
        random_states: states from `RandomStates.changed` that it starts with, in place of its own.
    """

    spec: Opens
    number: int
    options: WorkerOptions
    base_seed: int
    environ: Mapping[str, str]
    state: bytes | None = None
    random_states: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def num_loading_threads(self) -> int:
        """Threads that load samples."""
        return max(1, self.options.num_threads)


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


def run_worker(end: socket.socket, num_loading_threads: int, pickled_spec: PickledWorkerSpec) -> None:
    """Run a worker process until it is asked to stop, or its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which ends this one
    gc.freeze()  # a collection would write to all memory that is shared with the parent of a fork
    channel = Channel(end)
    first = channel.receive()
    if first is None:
        return
    _, (life, rows) = first
    end_with(life)
    loading_rows = np.frombuffer(mmap.mmap(rows, num_loading_threads * 8), np.int64)
    os.close(rows)
    try:
        worker = pickled_spec.open()
    except Exception as error:  # noqa: BLE001 - unpickling a user's object may raise anything
        # A file that cannot be read now is a StorageError, not an object that does not pickle.
        trouble = list(error.args) if isinstance(error, StorageError) else []
        channel.send({"kind": "unreadable", "why": f"{type(error).__name__}: {error}", "trouble": trouble})
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent no longer wants this worker
        WorkerLoop(channel, worker, loading_rows).run()


class WorkerLoop:
    """Runs a worker: receives jobs, builds steps, sends them."""

    def __init__(self, channel: Channel, worker: WorkerSpec, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._channel = channel
        self._worker = worker
        self._watch = Watch(rows)
        self._slabs = Slabs(worker.options.max_jobs)
        self._memory: dict[int, StepMemory] = {}  # by the id of a task: the same step may come twice
        self._lock = threading.Lock()
        self._reads = [0, 0, 0]
        self._requests: Counter[str] = Counter()
        self._random = RandomStates() if worker.options.as_torch and not worker.options.num_threads else None
        self._builder: Builder | None = None

    def run(self) -> None:
        # Set up the process: environment, kernels, memory limit and seeds.
        worker = self._worker
        os.environ.update(worker.environ)
        share_cores(worker.options.num_workers)
        requests.HERE.share(worker.options.num_workers)
        torch.set_num_threads(1)
        with contextlib.suppress(Exception):  # a failure is reported when a kernel is called
            load_numba()  # before memory is limited, and by one thread
        if worker.options.memory is not None:
            lower_limit(resource.RLIMIT_DATA, taken_bytes() + worker.options.memory)
        _seed(worker)
        self._send({"kind": "begun"})

        # Open the data set, with the states of the worker that this one replaces.
        try:
            if worker.options.worker_init_fn is not None:
                worker.options.worker_init_fn(worker.number)
            builder = self._builder = worker.spec.open(watch=self._watch, allocate=self._allocate)
            if worker.state is not None and builder.stateful is not None:
                builder.stateful.restore(unpacked(worker.state))
            if self._random is not None:
                self._random.begin(worker.random_states)
        except Exception as error:  # noqa: BLE001 - it is passed on
            self._send_error({"kind": "not started"}, error)
            return
        engine: Engine = InlineEngine(builder)
        if worker.options.num_threads:
            engine = ThreadEngine(builder, num_threads=worker.options.num_threads, depth=worker.options.max_jobs)
        else:
            torch_collate.default_collate_fn_map[torch.Tensor] = partial(_stack, self._take)

        # Build the steps that the parent sends, until it closes the channel.
        self._send({"kind": "ready"})
        while (received := self._channel.receive()) is not None:
            message, _ = received
            if message["kind"] == "stop":
                return
            self._watch.known_bad_rows.update(message["known_bad_rows"])
            self._slabs.take_back(message["returned"])
            if message["kind"] == "alone":
                self._load_alone(builder, message["row"])
            elif message["kind"] == "build":
                self._begin(engine, message)

    def _begin(self, engine: Engine, message: dict[str, Any]) -> None:
        epoch, step, rows, begin = message["task"]
        task = StepTask(epoch, step, unpack_rows(rows), begin=begin and Begin(*begin))
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
            units = describe_step(future.result())
            self._send({"kind": "built", "job": job, "finished": finished} | self._restart_state(), units, memory)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            if isinstance(error, MemoryError):
                self._end_out_of_memory(error)
            memory.drop()
            self._send_error({"kind": "failed", "job": job} | self._restart_state(with_state=False), passed_on(error))

    def _end_out_of_memory(self, error: MemoryError) -> None:
        """If memory is limited, report the error and end this process."""
        if self._worker.options.memory is None:
            return
        with contextlib.suppress(Exception):
            self._send({"kind": "out of memory", "why": str(error)[:_MAX_REASON_CHARACTERS]})
        os._exit(OUT_OF_MEMORY)

    def _restart_state(self, *, with_state: bool = True) -> dict[str, Any]:
        """Return the states after a step that a process which replaces this one needs."""
        states: dict[str, Any] = {}
        if self._random is not None:
            states["random_states"] = self._random.changed()
            stateful = self._builder and self._builder.stateful
            if stateful and with_state:
                states["state"] = packed(stateful.state())
        return states

    def _load_alone(self, builder: Builder, row: int) -> None:
        try:
            builder.load_alone(row)
        except MemoryError as error:
            self._end_out_of_memory(error)
        except BaseException:  # noqa: BLE001, S110 - only the end of the process counts
            pass
        self._send({"kind": "survived"})

    def _new_reads(self) -> tuple[list[int], dict[str, int]]:
        """Return the bytes read, and the requests made, since the last call."""
        reads = None if self._builder is None else self._builder.reads
        if reads is None:
            return [], {}
        total = [reads.storage.value, reads.cache.value, reads.used.value]
        new = [now - before for now, before in zip(total, self._reads, strict=True)]
        requests = Counter(reads.requests.as_dict())
        made = requests - self._requests
        self._reads, self._requests = total, requests
        return new, dict(made)

    def _send_error(self, message: dict[str, Any], error: Exception) -> None:
        self._send(message, [_described(error, self._worker)], StepMemory(self._slabs))

    def _send(self, message: dict[str, Any], units: Sequence[Unit] = (), memory: StepMemory | None = None) -> None:
        """Send a message; its units are written to shared memory, and their locations are sent."""
        fds: list[int] = []
        if memory is not None:
            message["units"] = [_located(unit, memory) for unit in units]
            message["slabs"] = list(zip((slab.number for slab in memory.slabs), memory.used, strict=True))
        with self._lock:
            if memory is not None:
                message["reads"], message["requests"] = self._new_reads()
                new = [slab for slab in memory.slabs if slab.file is not None]
                message["new"] = [(slab.number, len(slab.array)) for slab in new]
                message["dropped"] = self._slabs.take_dropped()
                fds = [slab.file for slab in new if slab.file is not None]
            self._channel.send(message, fds)
            if memory is not None:
                for slab in new:
                    slab.close_file()


def _located(unit: Unit, memory: StepMemory) -> list[Any]:
    header = memory.location_of(unit.header)
    buffers = [memory.location_of(buffer) for buffer in unit.buffers]
    return [unit.kind, np.array([(at.slab, at.start, at.num_bytes) for at in (header, *buffers)], np.int64)]


def _seed(worker: WorkerSpec) -> None:
    """Set random states and worker info as in torch's workers."""
    seed = seed_process(worker.base_seed, worker.number)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker.number, num_workers=worker.options.num_workers, seed=seed, dataset=worker.options.dataset
    )


def _described(error: Exception, worker: WorkerSpec) -> Unit:
    """Return the error as the training process raises it, with the worker's traceback, which pickle leaves out."""
    where = f"in DataLoader worker process {worker.number}"
    story = "".join(traceback.format_exception(error)).rstrip()
    wrapped: Any = error
    if worker.options.as_torch and not isinstance(error, OrchdataError):
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where=where)
    else:
        error.add_note(f"raised {where}:\n{story}")
    try:
        unit = describe_value(wrapped)
        read_value(unit)
    except Exception:  # noqa: BLE001 - pickling a user's error may raise anything
        return describe_value(RuntimeError(f"{type(error).__name__}, raised {where}, does not pickle:\n{story}"))
    return unit


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


def alone(worker: WorkerSpec) -> WorkerSpec:
    """Return the spec of a worker that loads single samples."""
    return replace(worker, options=replace(worker.options, num_threads=0, max_jobs=1))
