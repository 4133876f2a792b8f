"""Pinning: copies built batches to page-locked memory, in a separate thread ahead of delivery.

Neither the build, which may run in another process, nor the training thread waits for the copy.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Engine
from orchdata.engines.thread_pool import ThreadPool
from orchdata.engines.threads import passed_on, prepare_thread
from orchdata.notices import warn_user
from orchdata.order.steps import StepTask


class PinningEngine:
    """An engine that pins its steps as torch's loader does: tensors, containers of them, and objects with a method
    `pin_memory`.

    Create it in the training thread: the copies are for the current device of that thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.depth = engine.depth
        self.keeps_time = engine.keeps_time
        self._engine = engine
        self._built: dict[Future[BuiltStep], Future[BuiltStep]] = {}  # until they are done
        self._device = torch.accelerator.current_device_index()
        self._pool = ThreadPool(1, prepare=prepare_thread)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        pinned: Future[BuiltStep] = Future()
        built = self._built[pinned] = self._engine.submit(task)
        pinned.add_done_callback(self._built.pop)
        built.add_done_callback(lambda done: self._pool.submit(partial(_pin, self._device, done, pinned)))
        return pinned

    def expect(self, future: Future[BuiltStep]) -> None:
        built = self._built.get(future)
        if built is not None:
            self._engine.expect(built)

    def take_notes(self) -> list[str]:
        return self._engine.take_notes()

    def close(self) -> None:
        self._engine.close()
        self._pool.close()


def can_pin() -> bool:
    """Return whether there is an accelerator to pin for; warn if there is none."""
    if torch.accelerator.is_available():
        return True
    warn_user("pin_memory has no effect: torch finds no accelerator")
    return False


def _pin(device: int, built: Future[BuiltStep], pinned: Future[BuiltStep]) -> None:
    try:
        step = built.result()
        torch.accelerator.set_device_index(device)
        pinned.set_result(replace(step, batches=[pin_memory(batch) for batch in step.batches]))
    except BaseException as error:  # noqa: BLE001 - it is passed on
        pinned.set_exception(passed_on(error))
