"""One worker process, seen from the training process: starts it, sends jobs, receives results, ends it."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.engines.processes.channel import Channel, keep_from_children, open_channel, reading_end
from orchdata.engines.processes.message import Unit, pack_rows
from orchdata.engines.processes.slabs import MappedSlabs
from orchdata.engines.processes.worker import OUT_OF_MEMORY, UNGUARDED, PickledWorkerSpec, run_worker
from orchdata.engines.work import WorkerSpec
from orchdata.loaders.interrupts import interrupts_deferred
from orchdata.loaders.watch import IDLE, WAITING, all_wait
from orchdata.order.steps import StepTask

_END_SECONDS = 5.0


class Process:
    """A worker process; used by one thread.

    Attributes:
        number: of the worker.
        has_begun: whether it is known to run our code: a forked process inherits locks of threads that it does not
            have, and may wait for one of them for ever.
        is_ready: whether it has reported that it is ready to build.
        silent: since when its channel is closed, because it is about to end; None while it is open.
        last_words: the reason that it reported before it ended.
        jobs: number of a job -> its task, oldest first.
    """

    def __init__(self, context: BaseContext, worker: WorkerSpec) -> None:
        self.number = worker.number
        self.has_begun = context.get_start_method() != "fork"
        self.is_ready = False
        self.silent: float | None = None
        self.last_words = ""
        self._is_limited = worker.workers.worker_memory is not None
        self.jobs: OrderedDict[int, StepTask] = OrderedDict()
        self.started = time.monotonic()
        ours, theirs = open_channel()
        keep_from_children(ours)
        rows = os.memfd_create("orchdata-rows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(rows, worker.num_loading_threads * 8)
            self._rows = np.frombuffer(mmap.mmap(rows, worker.num_loading_threads * 8), np.int64)
            self._rows[:] = IDLE
            process = context.Process(  # type: ignore[attr-defined]
                target=run_worker,
                args=(theirs, worker.num_loading_threads, PickledWorkerSpec(worker)),
                daemon=True,
                name=f"orchdata worker {worker.number}",
            )
            with interrupts_deferred():  # Python loses them in what it calls around a fork
                process.start()
            self._process = process
            self._channel = Channel(ours)
            self._channel.send({}, [reading_end(), rows])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(rows)
        ours.setblocking(False)
        self._slabs = MappedSlabs()

    @property
    def handle(self) -> object:
        """The `multiprocessing` process."""
        return self._process

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors that become readable when it sends a message, and when it has ended."""
        if self.silent is not None:
            return (self._process.sentinel,)
        return self._channel.socket.fileno(), self._process.sentinel

    def is_ending(self, seconds: float) -> bool:
        """Whether it closed its channel less than this many seconds ago."""
        return self.silent is not None and time.monotonic() - self.silent < seconds

    @property
    def rows(self) -> list[int]:
        """Rows of the samples that it is loading."""
        return [row for row in self._rows.tolist() if row not in (IDLE, WAITING)]

    @property
    def waits_for_storage(self) -> bool:
        """See `watch.all_wait`."""
        return all_wait(self._rows.tolist())

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait because it does not read them."""
        return self._channel.is_waiting

    def build(self, job: int, task: StepTask, known_bad_rows: Mapping[int, str]) -> None:
        """Send it a job. Raises OSError if it has ended."""
        self.jobs[job] = task
        packed = [task.epoch, task.step, pack_rows(task.rows), task.begin and list(task.begin)]
        self._send({"kind": "build", "job": job, "task": packed}, known_bad_rows)

    def return_memory(self) -> None:
        """Return the memory that the user has dropped, if there is any. Raises OSError if it has ended."""
        if self._slabs.has_returned:
            self._send({"kind": "returned"}, {})

    def load_alone(self, row: int) -> None:
        """Have it load one sample. Raises OSError if it has ended."""
        self._send({"kind": "alone", "row": row}, {})

    def flush(self) -> None:
        """Send the messages that wait."""
        self._channel.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return its next message, None at the end; units become views of mapped slabs.

        Raises BlockingIOError if there is no message now.
        """
        if self.silent is not None:
            return None
        try:
            received = self._channel.receive()
        except ConnectionError:
            received = None
        if received is None:
            self.silent = time.monotonic()
            return None
        message, fds = received
        self.has_begun = True
        if message["kind"] == "ready":
            self.is_ready = True
        elif message["kind"] == "out of memory":
            self.last_words = str(message["why"])
        if "units" in message:
            for (number, size), file in zip(message["new"], fds, strict=True):
                self._slabs.add(number, file, size)
            arrays = self._slabs.arrays(message["slabs"])
            message["units"] = [_unit(kind, locations, arrays) for kind, locations in message["units"]]
            self._slabs.drop(message["dropped"])
        return dict(message)

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def end(self, seconds: float = 0.0) -> str:
        """Wait this many seconds for its end, then kill it. Returns how it ended, as text."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_END_SECONDS)
        self._channel.close()
        return _ending(self._process.exitcode, self._is_limited) + (f" ({self.last_words})" if self.last_words else "")

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while it runs."""
        status: int | None = self._process.exitcode
        return status

    def _send(self, message: dict[str, Any], known_bad_rows: Mapping[int, str]) -> None:
        rest = {"known_bad_rows": dict(known_bad_rows), "returned": self._slabs.take_returned()}
        self._channel.send(message | rest)


def _unit(kind: Any, locations: NDArray[np.int64], arrays: list[Any]) -> Unit:
    header, *buffers = (
        arrays[slab][start : start + size] if size else np.empty(0, np.uint8)
        for slab, start, size in locations.tolist()
    )
    return Unit(kind, header.tobytes(), buffers)


def _ending(status: int | None, is_limited: bool) -> str:
    if status is None:
        return "does not end"
    if status == OUT_OF_MEMORY:
        return "went beyond worker_memory"
    if status == UNGUARDED:
        return "started to run the script that started it"
    if status < 0:
        # Libraries that get no memory may end the process.
        limit = " under worker_memory" if is_limited and -status in (signal.SIGABRT, signal.SIGSEGV) else ""
        return f"was killed by signal: {signal.strsignal(-status) or -status}{limit}"
    return f"ended with status {status}"
