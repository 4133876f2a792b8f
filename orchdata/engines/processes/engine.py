"""Building in worker processes: the supervisor's transport, one process, and the engine of both.

A message is a small pickle; the arrays of a step are in slabs, which both sides map.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

from orchdata.engines.engine import Workers, explain_pickling
from orchdata.engines.processes.message import Unit, packed, unpacked
from orchdata.engines.processes.slabs import MappedSlabs
from orchdata.engines.processes.worker import (
    OUT_OF_MEMORY,
    UNGUARDED,
    PickledWorkerSpec,
    WorkerSpec,
    alone_of,
    error_of,
    run_worker,
)
from orchdata.engines.supervisor import WorkerEngine
from orchdata.loaders.child_process import Child
from orchdata.loaders.errors import StorageError
from orchdata.loaders.watch import IDLE, WAITING, all_wait
from orchdata.order.steps import StepTask

START_SECONDS = 120.0
"""How long a process may take to start, if the loader's timeout is shorter."""
FORK_SECONDS = 30.0
"""A forked process that has not run our code after this time never will."""
_DROP_SECONDS = 0.005  # in which a loop that has requested a step drops the one before
_LAST_SECONDS = 10.0  # that a process may take to end, once it has closed its channel
_PRELOADED = "orchdata.engines.processes.preload"
_UNGUARDED = (
    "a worker process runs the script that starts it, and would start workers of its own: put the script's code "
    "under\n\n    if __name__ == '__main__':\n\nor pass multiprocessing_context='fork'"
)
_UNREADABLE = (
    "a worker process cannot unpickle its data set, or another argument ({}): define it in a module, where another "
    "process can import it, or pass multiprocessing_context='fork'"
)
_NOT_STARTED = (
    "; it has written the reason to stderr. It runs the script that starts it again, so the script must be a file: if "
    "it is not, as in a notebook, pass multiprocessing_context='fork'"
)
_FORKED = (
    ". Workers are forked, and a fork copies locks that other threads hold (those of a library's pool): if a worker "
    "waits for one of them, pass multiprocessing_context='forkserver' or 'spawn'"
)


class Process:
    """A worker process, as the supervisor's `Worker`; used by one thread."""

    def __init__(self, context: BaseContext, worker: WorkerSpec) -> None:
        self.number = worker.number
        # Whether it runs our code for certain: a forked process may wait for a lock of a thread that it does not have.
        self.has_begun = context.get_start_method() != "fork"
        self.is_ready = False
        self.silent: float | None = None  # since when its channel is closed, because it is about to end
        self.jobs: dict[int, StepTask] = {}
        self.started = time.monotonic()
        self.start_seconds = max(worker.workers.timeout, START_SECONDS) if worker.workers.timeout else math.inf
        self._last_words = ""
        self._is_limited = worker.workers.worker_memory is not None
        rows = os.memfd_create("orchdata-rows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(rows, worker.num_loading_threads * 8)
            self._rows = np.frombuffer(mmap.mmap(rows, worker.num_loading_threads * 8), np.int64)
            self._rows[:] = IDLE
            args = worker.num_loading_threads, PickledWorkerSpec(worker)
            self._child = Child(context, run_worker, args, f"orchdata worker {worker.number}", [rows])
        finally:
            os.close(rows)
        self.process, self.channel = self._child.process, self._child.channel
        self.channel.socket.setblocking(False)
        self._slabs = MappedSlabs()
        self.name = f"worker process {self.number}"
        self.label = f"DataLoader worker (pid(s) {self.process.pid})"

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors that become readable when it sends a message, and when it has ended."""
        if self.silent is not None:
            return (self.process.sentinel,)
        return self.channel.socket.fileno(), self.process.sentinel

    @property
    def rows(self) -> list[int]:
        return [row for row in self._rows.tolist() if row not in (IDLE, WAITING)]

    def waits(self) -> bool:
        return all_wait(self._rows.tolist())

    def build(self, job: int, task: StepTask, known_bad_rows: Mapping[int, str]) -> None:
        self.jobs[job] = task
        self._send({"kind": "build", "job": job, "task": task._replace(sampler_state=None)}, known_bad_rows)

    def load_alone(self, row: int) -> None:
        self._send({"kind": "alone", "row": row}, {})

    def return_memory(self) -> None:
        """Return the memory that the user has dropped, if there is any."""
        if self.silent is None and self._slabs.has_returned:
            self._send({"kind": "returned"}, {})

    def flush(self) -> None:
        """Send the messages that wait."""
        with contextlib.suppress(OSError):  # it has ended, and is replaced
            self.channel.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return its next message, None at the end; units become views of mapped slabs.

        Raises BlockingIOError if there is no message now.
        """
        if self.silent is not None:
            return None
        try:
            received = self.channel.receive()
        except ConnectionError:
            received = None
        if received is None:
            self.silent = time.monotonic()
            return None
        message, fds = unpacked(received[0]), received[1]
        self.has_begun = True
        if "unit" in message:
            for (number, size), file in zip(message["new"], fds, strict=True):
                self._slabs.add(number, file, size)
            arrays = self._slabs.arrays(message["slabs"])
            header, *buffers = (
                arrays[slab][start : start + size] if size else np.empty(0, np.uint8)
                for slab, start, size in message["unit"]
            )
            message["unit"] = Unit(header, buffers)
            self._slabs.drop(message["dropped"])
        match message["kind"]:
            case "ready":
                self.is_ready = True
            case "out of memory":
                self._last_words = f" ({message['why']})"
            case "failed" | "not started":
                message["error"] = partial(error_of, message["unit"])
            case "unreadable":
                message["kind"], why = "not started", _UNREADABLE.format(message["why"])
                trouble = message["trouble"]
                message["error"] = partial(StorageError, *trouble) if trouble else partial(RuntimeError, why)
        return message  # type: ignore[no-any-return]

    def end(self) -> str:
        """End it now. Returns how it ended, as text."""
        status = self._child.end()
        if status is None:
            how = "does not end"
        elif status == OUT_OF_MEMORY:
            how = "went beyond worker_memory"
        elif status == UNGUARDED:
            how = "started to run the script that started it"
        elif status < 0:
            # Libraries that get no memory may end the process.
            limit = " under worker_memory" if self._is_limited and -status in (signal.SIGABRT, signal.SIGSEGV) else ""
            how = f"was killed by signal: {signal.strsignal(-status) or -status}{limit}"
        else:
            how = f"ended with status {status}"
        return how + self._last_words

    def _send(self, message: dict[str, Any], known_bad_rows: Mapping[int, str]) -> None:
        rest = {"known_bad_rows": dict(known_bad_rows), "returned": self._slabs.take_returned()}
        with contextlib.suppress(OSError):  # it has ended, and is replaced
            self.channel.send(packed(message | rest))


class Processes:
    """Worker processes, as the supervisor's `Transport`."""

    num_spare = 2

    def __init__(self, first: WorkerSpec, context: BaseContext) -> None:
        self.forked = _FORKED if context.get_start_method() == "fork" else ""
        self.not_started = _NOT_STARTED
        self._first = first
        self._context = context
        self._starts: Counter[int] = Counter()
        self.processes: list[Process] = []
        self._check_memory_at: float | None = None  # when the caller may have dropped a step
        self._wake, woken = os.pipe()
        self._woken: int | None = woken
        self._waking = threading.RLock()  # a finalizer may call `wake` during `wake`
        os.set_blocking(self._wake, False)
        os.set_blocking(woken, False)

    def start(self, number: int, *, alone: bool = False, fresh: bool = False) -> Process:
        context = multiprocessing.get_context("spawn") if fresh and self.forked else self._context
        worker = self._first
        if alone:
            worker = alone_of(worker)
        else:  # one that replaces another draws other random numbers
            base_seed = worker.workers.base_seed + self._starts[number] * worker.workers.num_workers
            worker = replace(worker, number=number, workers=replace(worker.workers, base_seed=base_seed))
            self._starts[number] += 1
        self.processes.append(process := Process(context, worker))
        return process

    def wait(self, seconds: float | None) -> Iterator[tuple[Process, dict[str, Any]]]:
        # Wait for messages, ends and `wake`, until something of a process is due.
        limits = [] if seconds is None else [seconds]
        if self._check_memory_at is not None:
            limits.append(max(0.0, self._check_memory_at - time.monotonic()) + 0.001)
        if any(process.channel.is_waiting for process in self.processes):
            limits.append(0.05)
        if not all(process.has_begun and process.silent is None for process in self.processes):
            limits.append(0.5)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        owners = {file: process for process in self.processes for file in process.files}
        for file in owners:
            poll.register(file, select.POLLIN)
        events = [file for file, _ in poll.poll(min(limits) * 1000 if limits else None)]
        if self._wake in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 1 << 16)
            self._check_memory_at = time.monotonic() + _DROP_SECONDS

        # A process that has closed its channel must end soon; a forked one must begin soon.
        now = time.monotonic()
        late = [each for each in self.processes if each.silent is not None and now - each.silent >= _LAST_SECONDS]
        for process in {owners[file]: None for file in events if file != self._wake} | dict.fromkeys(late):
            yield from self._messages(process)
        for process in list(self.processes):
            if not process.has_begun and now - process.started >= FORK_SECONDS:
                self.end(process)
                how = f"did not run within {FORK_SECONDS:g} seconds of its fork"
                yield process, {"kind": "ended", "how": how, "loss": "hung", "final": ""}

        # Memory that the caller has dropped goes back before the next job, or its worker would allocate more.
        for process in self.processes:
            process.flush()
        if self._check_memory_at is not None and time.monotonic() >= self._check_memory_at:
            self._check_memory_at = None
            for process in self.processes:
                process.return_memory()

    def _messages(self, process: Process) -> Iterator[tuple[Process, dict[str, Any]]]:
        """Yield all messages of a process, and its end. The supervisor may end it meanwhile."""
        while process in self.processes:
            try:
                message = process.receive()
            except BlockingIOError:
                if process.process.exitcode is None:
                    return
                message = None  # it has ended, and all its messages were read
            if message is not None:
                yield process, message
                continue
            status = process.process.exitcode
            if status is None and process.silent is not None and time.monotonic() - process.silent < _LAST_SECONDS:
                return  # its exit status is not known yet
            self.processes.remove(process)
            how, status = process.end(), process.process.exitcode
            loss, final = "killed" if status == -signal.SIGKILL else "ended", _UNGUARDED if status == UNGUARDED else ""
            yield process, {"kind": "ended", "how": how, "loss": loss, "final": final}

    def wake(self) -> None:
        with self._waking, contextlib.suppress(BlockingIOError):  # it is awake already
            if self._woken is not None:
                os.write(self._woken, b"!")

    def end(self, worker: Process) -> None:
        if worker in self.processes:
            self.processes.remove(worker)
            worker.end()

    def close(self) -> None:
        for process in self.processes:
            process.process.kill()
        for process in list(self.processes):
            self.end(process)
        with self._waking:
            woken, self._woken = self._woken, None
            if woken is not None:
                os.close(self._wake)
                os.close(woken)


_transports: weakref.WeakSet[Processes] = weakref.WeakSet()


class ProcessEngine(WorkerEngine):
    """Builds steps in worker processes. Raises TypeError if the spec must be pickled, and cannot be."""

    def __init__(self, spec: Any, workers: Workers) -> None:
        assert workers.multiprocessing_context is not None
        start_server(workers.multiprocessing_context, getattr(getattr(spec, "content", None), "preloads", ()))
        first = WorkerSpec(spec=spec, workers=workers.sent, environ=dict(os.environ))
        transport = Processes(first, workers.multiprocessing_context)
        _transports.add(transport)
        try:
            super().__init__(transport, workers)
        except Exception as error:
            explain_pickling(first, error)
            raise


def start_server(context: BaseContext, preloads: Sequence[str] = ()) -> None:
    """Start the fork server, if the context has one, and its imports: `preloads` are those of the data set.

    A worker that is still importing its parent's script ends here, with a status that its parent knows.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # every worker would print an exception, and the server keeps its own status
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "this process is daemonic, and multiprocessing does not let it have children: pass num_workers=0 to load "
            "in this process, or start it with daemon=False"
        )
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    context.set_forkserver_preload([_PRELOADED, *preloads])
    forkserver.ensure_running()


def _let_go() -> None:
    """In a forked child: forget its parent's workers, or multiprocessing would end them when the child exits."""
    for transport in list(_transports):
        for process in transport.processes:
            mp_process._children.discard(process.process)  # type: ignore[attr-defined]
    _transports.clear()


os.register_at_fork(after_in_child=_let_go)
