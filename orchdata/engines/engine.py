"""Engine: runs the tasks of steps. All engines build the same batches."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from orchdata.building.step import BuiltStep
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
