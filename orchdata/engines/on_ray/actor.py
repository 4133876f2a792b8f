"""An actor: a worker in a process of Ray's, on any node. It opens the spec that it is sent, and builds steps.

Ray starts it again in another process if its own ends, and calls again what was under way: so it opens the spec when it
is first called, and each call can be the first. What goes wrong is returned as a message, and never raised: what Ray
raises is about processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Engine
from orchdata.engines.on_ray.compare import check_same
from orchdata.engines.on_ray.parcel import open_parcel
from orchdata.engines.on_ray.reply import pack
from orchdata.engines.processes.message import Unit, describe_step, describe_value
from orchdata.engines.threads import passed_on
from orchdata.engines.work import Work, WorkerSpec, sendable
from orchdata.loaders.watch import IDLE, Watch, all_wait
from orchdata.order.steps import StepTask

OPENING_SECONDS: Final = 600.0
Reply = list[Any]


class StepActor:
    """Builds whole steps, as many at a time as Ray calls it.

    Args:
        number: of the worker.
        parcel: the worker's spec, from `parcel.make_parcel`.
    """

    def __init__(self, number: int, parcel: bytes) -> None:
        self._number = number
        self._parcel = parcel
        self._opening = threading.Lock()
        self._opens_since: float | None = None
        self._watch = Watch()
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._worker: WorkerSpec | None = None
        self._work: Work | None = None
        self._engine: Engine | None = None

    def start(self) -> Reply:
        """Open the spec. Returns "ready" with the id and address of the node, or "not started" with the error."""
        return self._failing("not started", self._open) or pack({"kind": "ready"} | _here(), [])

    def build(self, task: StepTask, known_bad_rows: dict[int, str]) -> Reply:
        """Build a step. Returns "built" with the units of `message.describe_step`, or "failed" with the error."""
        if failed := self._failing("not started", self._open):
            return failed
        assert self._engine is not None and self._work is not None
        self._watch.known_bad_rows.update(known_bad_rows)
        message: dict[str, Any] = {"kind": "built"}
        units: list[Unit] = []
        try:
            future: Future[BuiltStep] = self._engine.submit(task)
            units = describe_step(future.result())
        except BaseException as error:  # noqa: BLE001 - it is passed on
            message, units = {"kind": "failed"}, [self._described(passed_on(error))]
        message["reads"], message["requests"] = self._work.take_reads()
        return pack(message | {"finished": time.time()}, units)

    def load_alone(self, row: int) -> Reply:
        """Load one sample, and drop it: only whether this process survives it counts."""
        if failed := self._failing("not started", self._open):
            return failed
        assert self._work is not None and self._work.builder is not None
        with contextlib.suppress(BaseException):  # only an end of the process counts
            self._work.builder.load_alone(row)
        return pack({"kind": "survived"}, [])

    def waits(self) -> bool:
        """Return whether all threads wait for storage, or the spec is being opened, for 10 minutes at most. It can be
        called while steps are built.
        """
        since = self._opens_since
        if since is not None:
            return time.monotonic() - since < OPENING_SECONDS
        return all_wait(self._rows.tolist())

    def _open(self) -> None:
        with self._opening:
            if self._engine is not None:
                return
            self._opens_since = time.monotonic()
            try:
                self._open_spec()
            finally:
                self._opens_since = None

    def _open_spec(self) -> None:
        if self._worker is None:
            worker, expected = open_parcel(self._parcel)
            check_same(worker.spec, expected, _here()["address"])
            self._worker = worker
            self._rows = np.full(worker.num_loading_threads, IDLE, np.int64)
            self._watch = Watch(self._rows)
        if self._work is None:
            threads = self._worker.num_loading_threads
            self._work = Work(self._worker, max(1, len(os.sched_getaffinity(0)) // threads))
        self._engine = self._work.open(self._watch)

    def _failing(self, kind: str, call: Any) -> Reply | None:
        """Call it; return the error as a message if it raises, else None."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is passed on
            return pack({"kind": kind} | _here(), [self._described(passed_on(error))])
        return None

    def _described(self, error: Exception) -> Unit:
        where = f"in DataLoader worker process {self._number} on {_here()['address']}"
        return describe_value(sendable(error, where))


def _here() -> dict[str, str]:
    import ray

    return {"node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}
