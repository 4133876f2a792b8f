"""Building in the calling thread, when a step is asked for."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from orchdata.building.assembler import EndOfData
from orchdata.building.step import Builder, BuiltStep
from orchdata.engines.engine import PlainEngine, Resumed
from orchdata.order.steps import StepTask


class InlineEngine(PlainEngine):
    """Builds a step in the calling thread, when it is asked for.

    Args:
        resumed: what the data set is given back first.
    """

    def __init__(self, builder: Builder, resumed: Resumed | None = None) -> None:
        self.depth = 0
        self._builder = builder
        self._held = None if builder.restores is None else builder.restores.held
        if resumed is not None and builder.restores is not None:
            builder.restores.restore(resumed.held[0] or {}, resumed.epoch)
            with contextlib.suppress(EndOfData):
                for task in resumed.skipped(0):
                    builder.build(task)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        try:
            built = self._builder.build(task)
            built.held = self._held
            future.set_result(built)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is passed on
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass
