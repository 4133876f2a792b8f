"""Building in the calling thread, when a step is asked for."""

from __future__ import annotations

from concurrent.futures import Future

from orchdata.building.step import Builder, BuiltStep
from orchdata.order.steps import StepTask


class InlineEngine:
    """Builds a step in the calling thread, when it is asked for."""

    def __init__(self, builder: Builder) -> None:
        self.depth = 0
        self._builder = builder

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            future.set_result(self._builder.build(task))
        except Exception as error:  # noqa: BLE001 - it is passed on
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass
