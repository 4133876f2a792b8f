"""Building in the calling thread, when a step is requested."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from orchdata.building.step import Builder, BuiltStep
from orchdata.engines.engine import PlainEngine
from orchdata.order.steps import StepTask


class InlineEngine(PlainEngine):
    """Builds a step in the calling thread, when it is requested.

    Args:
        states: one state, which the data set starts with; empty for its own.
    """

    def __init__(self, builder: Builder, states: Sequence[dict[str, Any] | None] = ()) -> None:
        self.depth = 0
        self._builder = builder
        self._stateful = builder.stateful
        if states and self._stateful is not None:
            self._stateful.restore(states[0] or {})

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        try:
            built = self._builder.build(task)
            if self._stateful is not None:
                built.dataset_state = self._stateful.state
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
