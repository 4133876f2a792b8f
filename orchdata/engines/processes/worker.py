"""A worker process: jobs in, built steps out. Whenever it ends, it leaves nothing to clear away."""

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
from orchdata.engines.processes.behind import RandomStates, packed, unpacked
from orchdata.engines.processes.channel import Channel
from orchdata.engines.processes.life import end_with
from orchdata.engines.processes.message import Unit, describe_step, describe_value, read_value, unpack_rows
from orchdata.engines.processes.slabs import Slabs, StepMemory
from orchdata.engines.seeds import seed_process
from orchdata.engines.threads import ThreadEngine, passed_on
from orchdata.loaders.errors import OrchdataError, StorageError
from orchdata.loaders.limited_process import lower_limit, taken_bytes
from orchdata.loaders.watch import Watch
from orchdata.native.jit import load_numba
from orchdata.order.steps import Begin, StepTask

OUT_OF_MEMORY = 77
UNGUARDED = 78
"""Exit statuses: beyond the limit of its memory; a script that would start workers of workers."""
_TOLD_CHARACTERS = 400


class Opens(Protocol):
    """What a `BuildSpec` is to a worker."""

    def open(self, *, watch: Watch, lend: Callable[[StepTask], Memory]) -> Builder: ...


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What all workers of a loader are.

    Attributes:
        num_threads: threads that read and decode; 0 for its main thread alone.
        max_jobs: most jobs that one has at a time.
        worker_init_fn: called with its number, before it builds anything.
        dataset: what `torch.utils.data.get_worker_info()` tells.
        as_torch: whether random states and errors are those of torch's workers, and one that cannot start fails its
            own steps alone.
        memory: bytes beyond those it starts with that one may take for itself; None without limit.
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
    """All that a worker is, apart from its jobs: a value, which travels once.

    Attributes:
        spec: what it builds.
        number: which of them it is.
        base_seed: torch's of an iteration; the worker's is `base_seed + number`.
        environ: of the training process.
        state: the data set's state that it starts with, pickled.
        drawn: random states that it begins with in place of its own, as `RandomStates` tells them.
    """

    spec: Opens
    number: int
    options: WorkerOptions
    base_seed: int
    environ: Mapping[str, str]
    state: bytes | None = None
    drawn: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def num_places(self) -> int:
        """Threads that load samples."""
        return max(1, self.options.num_threads)


class Sealed:
    """A worker on its way to a process: where it has to be pickled, it is read by our code there, which can tell what
    does not unpickle, and not by what starts processes.
    """

    def __init__(self, worker: WorkerSpec | None, pickled: bytes = b"") -> None:
        self._worker = worker
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        # As the process around it, by the same rules: locks and sockets of multiprocessing travel.
        return Sealed, (None, bytes(ForkingPickler.dumps(self._worker)))

    def open(self) -> WorkerSpec:
        """Raises what unpickling does."""
        if self._worker is None:
            self._worker = pickle.loads(self._pickled)  # noqa: S301 - of this process's parent
        return self._worker


def run_worker(end: socket.socket, num_places: int, sealed: Sealed) -> None:
    """What a worker process runs until it is told to stop, or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which ends this one
    gc.freeze()  # a collection would write to all that is shared with the process it was forked off
    channel = Channel(end)
    first = channel.receive()
    if first is None:
        return
    _, (life, rows) = first
    end_with(life)
    noted = np.frombuffer(mmap.mmap(rows, num_places * 8), np.int64)
    os.close(rows)
    try:
        worker = sealed.open()
    except Exception as error:  # noqa: BLE001 - whatever a user's object raises when it is made again
        # A file that could not be read now is no object that does not pickle.
        trouble = list(error.args) if isinstance(error, StorageError) else []
        channel.send({"kind": "unreadable", "why": f"{type(error).__name__}: {error}", "trouble": trouble})
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # of one that is no longer wanted
        _Running(channel, worker, noted).run()


class _Running:
    """A worker at work."""

    def __init__(self, channel: Channel, worker: WorkerSpec, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._channel = channel
        self._worker = worker
        self._watch = Watch(rows)
        self._slabs = Slabs(worker.options.max_jobs)
        self._memory: dict[int, StepMemory] = {}  # of each task by its id: the same step may come twice
        self._lock = threading.Lock()
        self._reads = [0, 0, 0]
        self._random = RandomStates() if worker.options.as_torch and not worker.options.num_threads else None
        self._builder: Builder | None = None

    def run(self) -> None:
        worker = self._worker
        os.environ.update(worker.environ)
        torch.set_num_threads(1)
        with contextlib.suppress(Exception):  # what fails here fails again, and is told of, where a kernel is called
            load_numba()  # before memory is limited, and by one thread
        if worker.options.memory is not None:
            lower_limit(resource.RLIMIT_DATA, taken_bytes() + worker.options.memory)
        _seed(worker)
        self._send({"kind": "begun"})
        try:
            if worker.options.worker_init_fn is not None:
                worker.options.worker_init_fn(worker.number)
            builder = self._builder = worker.spec.open(watch=self._watch, lend=self._lend)
            if worker.state is not None and builder.stateful is not None:
                builder.stateful.restore(unpacked(worker.state))
            if self._random is not None:
                self._random.begin(worker.drawn)
        except Exception as error:  # noqa: BLE001 - it is passed on
            self._send_error({"kind": "not started"}, error)
            return
        engine: Engine = InlineEngine(builder)
        if worker.options.num_threads:
            engine = ThreadEngine(builder, num_threads=worker.options.num_threads, depth=worker.options.max_jobs)
        else:
            torch_collate.default_collate_fn_map[torch.Tensor] = partial(_stack, self._take)
        self._send({"kind": "ready"})
        while (received := self._channel.receive()) is not None:
            message, _ = received
            if message["kind"] == "stop":
                return
            self._watch.known_bad_rows.update(message["blamed"])
            self._slabs.give_back(message["returned"])
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
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a data set is not to end a process unasked
            future = Future()
            future.set_exception(passed_on(error))
        future.add_done_callback(partial(self._built, message["job"], task))

    def _lend(self, task: StepTask) -> Memory:
        return self._memory[id(task)]

    def _take(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of the step that the main thread builds."""
        return self._at_work.take(num_bytes)

    def _built(self, job: int, task: StepTask, future: Future[BuiltStep]) -> None:
        finished = time.monotonic()
        memory = self._memory.pop(id(task))
        try:
            units = describe_step(future.result())
            self._send({"kind": "built", "job": job, "finished": finished} | self._behind(), units, memory)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            if isinstance(error, MemoryError):
                self._end_out_of_memory(error)
            memory.drop()
            self._send_error({"kind": "failed", "job": job} | self._behind(with_state=False), passed_on(error))

    def _end_out_of_memory(self, error: MemoryError) -> None:
        """End this process, where its memory is limited; what the error says is told first."""
        if self._worker.options.memory is None:
            return
        with contextlib.suppress(Exception):
            self._send({"kind": "out of memory", "why": str(error)[:_TOLD_CHARACTERS]})
        os._exit(OUT_OF_MEMORY)

    def _behind(self, *, with_state: bool = True) -> dict[str, Any]:
        """What there is, behind a step, to go on with in another process."""
        found: dict[str, Any] = {}
        if self._random is not None:
            found["drawn"] = self._random.changed()
            stateful = self._builder and self._builder.stateful
            if stateful and with_state:
                found["state"] = packed(stateful.state())
        return found

    def _load_alone(self, builder: Builder, row: int) -> None:
        try:
            builder.load_alone(row)
        except MemoryError as error:
            self._end_out_of_memory(error)
        except BaseException:  # noqa: BLE001, S110 - a failure is an answer too: it did not end this process
            pass
        self._send({"kind": "survived"})

    def _new_reads(self) -> list[int]:
        reads = None if self._builder is None else self._builder.reads
        if reads is None:
            return []
        total = [reads.storage.value, reads.cache.value, reads.used.value]
        new = [now - before for now, before in zip(total, self._reads, strict=True)]
        self._reads = total
        return new

    def _send_error(self, message: dict[str, Any], error: Exception) -> None:
        self._send(message, [_described(error, self._worker)], StepMemory(self._slabs))

    def _send(self, message: dict[str, Any], units: Sequence[Unit] = (), memory: StepMemory | None = None) -> None:
        """Send a message; with units, which are put where the parent finds them."""
        fds: list[int] = []
        if memory is not None:
            message["units"] = [_placed(unit, memory) for unit in units]
            message["slabs"] = list(zip((slab.number for slab in memory.slabs), memory.used, strict=True))
        with self._lock:
            if memory is not None:
                message["reads"] = self._new_reads()
                new = [slab for slab in memory.slabs if slab.file is not None]
                message["new"] = [(slab.number, len(slab.array)) for slab in new]
                message["dropped"] = self._slabs.take_dropped()
                fds = [slab.file for slab in new if slab.file is not None]
            self._channel.send(message, fds)
            if memory is not None:
                for slab in new:
                    slab.close_file()


def _placed(unit: Unit, memory: StepMemory) -> list[Any]:
    header = memory.place_of(unit.header)
    buffers = [memory.place_of(buffer) for buffer in unit.buffers]
    return [unit.kind, np.array([(place.slab, place.start, place.num_bytes) for place in (header, *buffers)], np.int64)]


def _seed(worker: WorkerSpec) -> None:
    """Random states as torch's workers have them."""
    seed = seed_process(worker.base_seed, worker.number)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker.number, num_workers=worker.options.num_workers, seed=seed, dataset=worker.options.dataset
    )


def _described(error: Exception, worker: WorkerSpec) -> Unit:
    """The error as the training process raises it: with the worker's traceback, which does not travel by itself."""
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
    except Exception:  # noqa: BLE001 - whatever a user's object raises when it is sent
        return describe_value(RuntimeError(f"{type(error).__name__}, raised {where}, does not pickle:\n{story}"))
    return unit


def _stack(
    take: Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]],
    batch: list[torch.Tensor],
    *,
    collate_fn_map: Any = None,  # noqa: ARG001 - as torch calls it
) -> torch.Tensor:
    """`default_collate` of tensors, straight into the memory that the training process gets."""
    first = batch[0]
    if first.layout != torch.strided or first.is_nested:
        refused: torch.Tensor = torch_collate.collate_tensor_fn(batch)
        return refused
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
    """The worker in which one sample is tried by itself."""
    return replace(worker, options=replace(worker.options, num_threads=0, max_jobs=1))
