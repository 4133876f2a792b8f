"""Engine: runs the tasks of steps. All engines build the same batches.

Engines of this process run tasks themselves (`PlainEngine`). Engines with workers hand jobs to a thread, which gives
them to workers (`jobs.JobEngine`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any, Final, Protocol

from orchdata.building.spec import BuildSpec
from orchdata.building.step import Builder, BuiltStep
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.order.steps import StepTask

DEFAULT_PREFETCH: Final = 2


class Engine(Protocol):
    """Builds steps, several at a time.

    Attributes:
        depth: steps to keep under way while the caller works on another; 0 if nothing runs in parallel.
        keeps_time: whether the engine itself handles steps that take longer than the loader's timeout.
    """

    depth: int
    keeps_time: bool

    def submit(self, task: StepTask) -> Future[BuiltStep]: ...

    def expect(self, future: Future[BuiltStep]) -> None:
        """The caller waits for this step from now on."""

    def take_notes(self) -> list[str]:
        """Return warnings for the user about steps that were built with trouble, once."""

    def close(self) -> None:
        """Stop: wait a moment for tasks that run, and abandon those that hang. A second call does nothing."""


class WorkerEngine(Engine, Protocol):
    """An engine with workers that the caller may choose from."""

    def submit(self, task: StepTask, worker: int | None = None) -> Future[BuiltStep]:
        """Have a step built, by this worker if one is given."""


class PlainEngine:
    """Base of engines that run in this process, without supervision."""

    keeps_time = False

    def expect(self, future: Future[BuiltStep]) -> None:
        pass

    def take_notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class InlineEngine(PlainEngine):
    """Builds a step in the calling thread, when it is requested."""

    def __init__(self, builder: Builder) -> None:
        self.depth = 0
        self._builder = builder

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        try:
            built = self._builder.build(task)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            return _failed(error)
        future: Future[BuiltStep] = Future()
        future.set_result(built)
        return future


def _failed(error: BaseException) -> Future[BuiltStep]:
    """Return a future of an error. No frame of the error's traceback has it: a cycle would keep the caller's frames."""
    future: Future[BuiltStep] = Future()
    future.set_exception(error)
    return future


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who builds the steps of a loader, under the names of its arguments; an iteration adds the last four.

    Attributes:
        num_workers: of this rank alone; 0: this process builds.
        num_threads: threads of a worker, or of this process, that read and decode; 0 for its main thread alone.
        prefetch_factor: the most steps that a worker has at a time, or that all threads of this process have.
        worker_init_fn: called with the worker's number before it builds anything.
        worker_memory: bytes that a worker may allocate in addition to those it starts with; None for no limit.
        timeout: seconds that the caller waits for a step before its worker is replaced; 0 for no limit.
        persistent_workers: whether workers are kept from one iteration to the next.
        multiprocessing_context: starts worker processes; None for an engine of the user's.
        engine: the user's; None for threads or processes.
        dataset: as in `torch.utils.data.get_worker_info()`.
        in_turn: whether worker `step % num_workers` builds a step; else the one with the fewest jobs does.
        num_ranks: ranks of the loader.
        base_seed: torch's seed of the iteration; the seed of worker k is `base_seed + k`.
        reads: counts the bytes that workers read from shards; None if samples are not in shards.
        name_of: row -> the sample's name in messages.
        known_bad_rows: row -> why its sample must not be loaded; rows that prove bad are added.
    """

    num_workers: int = 0
    num_threads: int = 0
    prefetch_factor: int = DEFAULT_PREFETCH
    worker_init_fn: Callable[[int], None] | None = None
    worker_memory: int | None = None
    timeout: float = 0
    persistent_workers: bool = False
    multiprocessing_context: BaseContext | None = None
    engine: OpensEngine | None = None
    dataset: Any = None
    in_turn: bool = False
    num_ranks: int = 1
    base_seed: int = 0
    reads: ReadBytes | None = None
    name_of: Callable[[int], str] = str
    known_bad_rows: dict[int, str] = field(default_factory=dict)

    @property
    def forks(self) -> bool:
        """Whether worker processes are forked from this one."""
        context = self.multiprocessing_context
        return context is not None and context.get_start_method() == "fork"

    @property
    def sent(self) -> Workers:
        """What a worker gets of it."""
        return replace(self, multiprocessing_context=None, engine=None, reads=None, name_of=str, known_bad_rows={})


class OpensEngine(Protocol):
    """What `DataLoader(engine=...)` takes: a value that pickles."""

    def open(self, spec: BuildSpec, workers: Workers) -> Engine:
        """Return the engine that builds the steps of a spec, for one iteration or, with persistent workers, for more.

        What it raises ends the iteration.
        """
