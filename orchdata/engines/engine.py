"""Engine: who runs the tasks of a step. The result is the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from orchdata.building.step import BuiltStep
from orchdata.order.stateful import steps_to_skip
from orchdata.order.steps import StepTask


@dataclass(frozen=True, slots=True)
class Resumed:
    """What data sets held where an iteration goes on.

    Attributes:
        epoch: of its first step.
        held: by worker, of its data set behind its last delivered step; None for one that had none.
        worker: of the last step that was delivered.
    """

    epoch: int
    held: tuple[dict[str, Any] | None, ...]
    worker: int

    def skipped(self, worker: int) -> Iterator[StepTask]:
        """Steps of a worker that are built for nothing, to get behind what it had iterated."""
        count = steps_to_skip(self.held[worker] or {}, self.epoch)
        return (StepTask(self.epoch, step, np.zeros(1, np.int64)) for step in range(count))


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
