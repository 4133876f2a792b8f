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
    """

    depth: int

    def submit(self, task: StepTask) -> Future[BuiltStep]: ...

    def close(self) -> None:
        """Stop. What runs is waited for a moment; what hangs is left behind. A second call does nothing."""
