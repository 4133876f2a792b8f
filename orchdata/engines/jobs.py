"""Base of engines with workers: a thread, the dispatcher, hands jobs to workers and takes their results."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Workers
from orchdata.order.steps import StepTask


@dataclass(eq=False)
class Job:
    """A step to build, from its request until its future is set.

    Attributes:
        worker: the worker that must build it; None for any.
        losses: how often a worker was lost with it, by kind.
        awaited: since when the caller waits for it; None if he does not.
    """

    number: int
    task: StepTask
    future: Future[BuiltStep]
    worker: int | None = None
    losses: Counter[str] = field(default_factory=Counter)
    awaited: float | None = None

    @property
    def name(self) -> str:
        return f"step {self.task.step} of epoch {self.task.epoch}"


class Dispatcher(Protocol):
    """A thread that has workers build jobs.

    Attributes:
        notes: warnings for the user.
    """

    notes: deque[str]

    def submit(self, job: Job) -> None: ...

    def expect(self, job: Job) -> None:
        """The caller waits for a job from now on."""


D = TypeVar("D", bound=Dispatcher)


class JobEngine(Generic[D]):
    """Base of engines with workers, each of which builds a whole step.

    The thread refers to its dispatcher, not to the engine, so that an engine that nothing refers to ends its workers.
    """

    keeps_time = True

    def __init__(self, dispatcher: D, workers: Workers) -> None:
        self.depth = workers.num_workers * workers.prefetch_factor
        self._dispatcher = dispatcher
        self._workers = workers
        self._numbers = count()
        self._jobs: dict[Future[BuiltStep], Job] = {}  # until they are done

    def submit(self, task: StepTask, worker: int | None = None) -> Future[BuiltStep]:
        """Have a step built, by this worker if one is given."""
        if worker is None and self._workers.in_turn:
            worker = task.step % self._workers.num_workers
        job = Job(next(self._numbers), task, Future(), worker)
        self._jobs[job.future] = job
        job.future.add_done_callback(self._jobs.pop)
        self._dispatcher.submit(job)
        return job.future

    def expect(self, future: Future[BuiltStep]) -> None:
        job = self._jobs.get(future)
        if job is not None:
            self._dispatcher.expect(job)

    def take_notes(self) -> list[str]:
        notes = self._dispatcher.notes
        return [notes.popleft() for _ in range(len(notes))]
