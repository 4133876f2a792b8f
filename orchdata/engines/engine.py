"""Engine: who runs the tasks of a step. The result is the same in all of them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from orchdata.building.step import BuiltStep
from orchdata.order.steps import StepTask


class Engine(Protocol):
    """Builds steps, several at a time.

    Attributes:
        depth: steps worth having under way while the caller works on another; 0 where nothing runs beside him.
        keeps_time: whether a step that takes longer than the loader's timeout is the engine's own affair.
    """

    depth: int
    keeps_time: bool

    def submit(self, task: StepTask) -> Future[BuiltStep]: ...

    def expect(self, future: Future[BuiltStep]) -> None:
        """The caller waits for this step from now on."""

    def take_notes(self) -> list[str]:
        """What the user is to be told of steps that were built with trouble, once."""

    def close(self) -> None:
        """Stop. What runs is waited for a moment; what hangs is left behind. A second call does nothing."""


class PlainEngine:
    """What engines have in common that run in this process, where nothing watches over them."""

    keeps_time = False

    def expect(self, future: Future[BuiltStep]) -> None:
        pass

    def take_notes(self) -> list[str]:
        return []
