"""Engine: runs the tasks of steps. All engines build the same batches.

Engines of this process run tasks themselves (`PlainEngine`). Engines with workers hand jobs to a thread, which gives
them to workers (`jobs.JobEngine`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchdata.building.spec import BuildSpec
from orchdata.building.step import Builder, BuiltStep
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.order.steps import StepTask


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
class WorkerOptions:
    """Options that all workers of a loader share.

    Attributes:
        num_threads: threads of a worker that read and decode; 0 for its main thread alone.
        max_jobs: the most jobs that a worker has at a time.
        worker_init_fn: called with the worker's number before it builds anything.
        dataset: as in `torch.utils.data.get_worker_info()`.
        memory: bytes that a worker may allocate in addition to those it starts with; None for no limit.
    """

    num_workers: int
    num_threads: int
    max_jobs: int
    worker_init_fn: Callable[[int], None] | None
    dataset: Any
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One opening of an engine: what it needs in addition to the spec of the steps.

    Attributes:
        options: of the workers, of this rank alone.
        num_ranks: ranks of the loader.
        timeout: seconds that the caller waits for a step before its worker is replaced; 0 for no limit.
        in_turn: whether worker `step % num_workers` builds a step; else any worker does.
        base_seed: torch's seed of the iteration; the seed of worker k is `base_seed + k`.
        reads: counts the bytes that workers read from shards; None if samples are not in shards.
        name_of: row -> the sample's name in messages.
        known_bad_rows: row -> why its sample must not be loaded; rows that prove bad are added.
    """

    options: WorkerOptions
    num_ranks: int = 1
    timeout: float = 0
    in_turn: bool = False
    base_seed: int = 0
    reads: ReadBytes | None = None
    name_of: Callable[[int], str] = str
    known_bad_rows: dict[int, str] = field(default_factory=dict)


class OpensEngine(Protocol):
    """What `DataLoader(engine=...)` takes: a value that pickles."""

    def open(self, spec: BuildSpec, run: EngineRun) -> Engine:
        """Return the engine that builds the steps of a spec, for one iteration or, with persistent workers, for more.

        What it raises ends the iteration.
        """
