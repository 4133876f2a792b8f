"""The engine of each iteration of a loader, which may be kept for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchdata.building.spec import BuildSpec
from orchdata.building.step import Builder
from orchdata.delivery.delivery import Delivery
from orchdata.delivery.pin import PinningEngine
from orchdata.engines.choice import EngineChoice
from orchdata.engines.engine import Engine
from orchdata.engines.warm import Warming


class Engines:
    """Opens engines, and keeps one where workers are persistent.

    Args:
        warming: loads kernels in the background.
        pin_memory: whether batches are copied to page-locked memory.
        persistent: whether an engine is kept at the end of an epoch.
        keeps_after_break: whether it is kept too when the caller leaves an iteration before its end. As with torch's
            loader, its workers then finish the steps under way, and draw random numbers for them.
    """

    def __init__(
        self, choice: EngineChoice, warming: Warming, *, pin_memory: bool, persistent: bool, keeps_after_break: bool
    ) -> None:
        self._choice = choice
        self._warming = warming
        self._pin_memory = pin_memory
        self._persistent = persistent
        self._keeps_after_break = keeps_after_break
        self._known_bad_rows: dict[int, str] = {}
        self.idle: Engine | None = None

    def open(
        self,
        spec: BuildSpec,
        builder: Builder,
        delivery: Delivery,
        *,
        base_seed: int,
        states: Sequence[dict[str, Any] | None],
    ) -> Engine:
        """An engine for one iteration; arguments as of `EngineChoice.make`."""
        if self.idle is not None:
            engine, self.idle = self.idle, None
            return engine
        if self._choice.wants_kernels:
            self._warming.finish(spec)  # kernels are compiled on first use, which `timeout` is not for
        else:
            self._warming.wait()
        engine = delivery.receiving_engine() or self._choice.make(
            spec, builder, base_seed=base_seed, known_bad_rows=self._known_bad_rows, states=states
        )
        return PinningEngine(engine) if self._pin_memory else engine

    def leave(self, engine: Engine, *, is_over: bool, has_failed: bool) -> None:
        """Keep an engine for the next iteration, or close it."""
        keeps = self._persistent and not has_failed and (is_over or self._keeps_after_break)
        if keeps and self.idle is None:
            self.idle = engine
        else:
            engine.close()

    def close(self) -> None:
        """Close the engine that is kept."""
        if self.idle is not None:
            self.idle.close()
            self.idle = None
