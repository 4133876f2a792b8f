"""Building in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from typing import Any

from orchdata.engines.engine import WorkerOptions
from orchdata.engines.jobs import JobEngine
from orchdata.engines.pickling import explain_pickling
from orchdata.engines.processes.supervisor import Supervisor
from orchdata.engines.processes.worker import UNGUARDED
from orchdata.engines.work import WorkerSpec
from orchdata.finalizers import Ending
from orchdata.loaders.storage.counted import ReadBytes

_PRELOADED = "orchdata.engines.processes.preload"

_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Options of worker processes, and how to start and watch them: see `Supervisor`.

    Attributes:
        in_turn: whether worker `step % num_workers` builds a step; else the one with the fewest jobs does.
        persistent: whether workers are kept from one iteration to the next.
    """

    context: BaseContext
    options: WorkerOptions
    in_turn: bool
    timeout: float
    persistent: bool


class ProcessEngine(JobEngine[Supervisor]):
    """Builds steps in worker processes; one process builds a whole step.

    Args:
        spec: a `BuildSpec`.
        base_seed: of the workers' random states, see `WorkerSpec`.
        reads: counts the bytes that workers read from shards.
        name_of: row -> the sample's name in messages.
        known_bad_rows: row -> why its sample must not be loaded; rows that prove bad are added.

    Raises:
        TypeError: the spec must be pickled, and cannot be.
    """

    def __init__(
        self,
        spec: Any,
        workers: Workers,
        *,
        base_seed: int = 0,
        reads: ReadBytes | None = None,
        name_of: Callable[[int], str] = str,
        known_bad_rows: dict[int, str] | None = None,
    ) -> None:
        start_server(workers.context)
        options = workers.options
        first = WorkerSpec(spec=spec, number=0, options=options, base_seed=base_seed, environ=dict(os.environ))
        try:
            supervisor = Supervisor(
                workers.context,
                [replace(first, number=number) for number in range(options.num_workers)],
                timeout=workers.timeout,
                reads=reads,
                name_of=name_of,
                known_bad_rows={} if known_bad_rows is None else known_bad_rows,
            )
        except Exception as error:
            explain_pickling(first, error)
            raise
        super().__init__(
            supervisor, num_workers=options.num_workers, max_jobs=options.max_jobs, in_turn=workers.in_turn
        )
        _supervisors.add(supervisor)
        self._ending = Ending(self, supervisor.stop)
        supervisor.start()

    def close(self) -> None:
        self._dispatcher.stop()
        self._ending.cancel()


def start_server(context: BaseContext) -> None:
    """Start the fork server, if the context has one, and its imports.

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

    context.set_forkserver_preload([_PRELOADED])
    forkserver.ensure_running()


def _let_go() -> None:
    """In a forked child: forget its parent's workers, or multiprocessing would end them when the child exits."""
    for supervisor in list(_supervisors):
        for child in supervisor.children():
            mp_process._children.discard(child)  # type: ignore[attr-defined]
    _supervisors.clear()


os.register_at_fork(after_in_child=_let_go)
