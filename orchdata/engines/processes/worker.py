"""A worker process: jobs in, built steps out. However it ends, there is nothing to clean up."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from orchdata.building.step import Builder, BuiltStep, Memory
from orchdata.engines.engine import Engine, passed_on
from orchdata.engines.processes.message import Unit, describe_step, describe_value, packed, unpacked
from orchdata.engines.processes.slabs import Slabs, StepMemory
from orchdata.engines.work import Work, WorkerSpec, sendable
from orchdata.loaders.child_process import Channel, leave_out_what_is_loaded
from orchdata.loaders.errors import StorageError
from orchdata.loaders.watch import Watch
from orchdata.order.steps import StepTask

OUT_OF_MEMORY = 77
UNGUARDED = 78
"""Exit statuses: memory limit exceeded; a script that would start workers of workers."""
_MAX_REASON_CHARACTERS = 400


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
