"""Building in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from dataclasses import replace
from multiprocessing import process as mp_process
from multiprocessing.context import BaseContext
from typing import Any

from orchdata.engines.engine import Workers
from orchdata.engines.jobs import JobEngine
from orchdata.engines.pickling import explain_pickling
from orchdata.engines.processes.supervisor import Supervisor
from orchdata.engines.processes.worker import UNGUARDED
from orchdata.engines.work import WorkerSpec
from orchdata.finalizers import Ending

_PRELOADED = "orchdata.engines.processes.preload"

_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class ProcessEngine(JobEngine[Supervisor]):
    """Builds steps in worker processes; one process builds a whole step.

    Raises:
        TypeError: the spec must be pickled, and cannot be.
    """

    def __init__(self, spec: Any, workers: Workers) -> None:
        assert workers.multiprocessing_context is not None
        start_server(workers.multiprocessing_context)
        first = WorkerSpec(
            spec=spec, number=0, workers=workers.sent, base_seed=workers.base_seed, environ=dict(os.environ)
        )
        try:
            specs = [replace(first, number=number) for number in range(workers.num_workers)]
            supervisor = Supervisor(specs, workers)
        except Exception as error:
            explain_pickling(first, error)
            raise
        super().__init__(supervisor, workers)
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
