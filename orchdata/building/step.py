"""Building a step: task -> plan -> this rank's rows -> read -> decode -> batches.

`Builder.build` is a pure function, which everything else uses. An engine runs the same tasks on other threads: a
started step is a set of tasks that may run on any thread in any order, then one `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchdata.building.assembler import Assembler, Share, Task
from orchdata.building.figures import step_figures
from orchdata.building.memory import BufferPool, Memory
from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.order.steps import StepTask
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan


@dataclass
class BuiltStep:
    """A rank's share of one optimizer step: its microbatches, plan, failures, busy seconds by stage, and figures
    (`orchdata.building.figures`).
    """

    plan: Plan
    batches: list[Any]
    failures: list[DataError]
    seconds: dict[str, float]
    figures: dict[str, Any]


class Builder:
    """Builds the steps of one rank: an opened `BuildSpec`, with open shards and counters; one for all threads of a
    process. `allocate`: task -> memory for the batches of its step; default: a pool that reuses memory after its last
    use.
    """

    def __init__(
        self,
        plan: PlanSpec,
        rank: int,
        assembler: Assembler,
        allocate: Callable[[StepTask], Memory] | None = None,
        *,
        peer: int = 0,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._peer = peer
        self._assembler = assembler
        pool = BufferPool()
        self._allocate = allocate or (lambda _: pool)

    @property
    def reads(self) -> ReadBytes | None:
        """Bytes read from shards so far; None if samples are not in shards."""
        return self._assembler.reads

    def start(self, task: StepTask) -> StartedStep:
        """Plan a step. Raises IndexError if it is outside the epoch."""
        return StartedStep(self._plan, self._rank, self._peer, self._assembler, task, self._allocate(task))

    def planned_by(self, plan: PlanSpec) -> Builder:
        """Return a builder of the same samples in steps of another plan, with the same open shards."""
        return Builder(plan, self._rank, self._assembler, peer=self._peer)

    def load_alone(self, row: int) -> None:
        """Load one sample as a step does, and drop it. Raises what loading raises."""
        self._assembler.load_alone(row)

    def build(self, task: StepTask) -> BuiltStep:
        """Plan and build a step in this thread."""
        started = self.start(task)
        for fill in started.tasks:
            fill()
        return started.finish()


class StartedStep:
    """A planned step; its tasks are ready to run. Its batches take `num_bytes` of memory."""

    def __init__(
        self, spec: PlanSpec, rank: int, peer: int, assembler: Assembler, task: StepTask, memory: Memory
    ) -> None:
        started = time.perf_counter()
        self._rank = rank
        self._spec = spec
        self.plan = make_plan(spec, task)
        self._planning_seconds = time.perf_counter() - started
        order, num_stages = list(range(self.plan.num_microbatches)), spec.balance.num_stages
        if num_stages is not None and len(order) > 1:
            order = self.plan.pipeline_order(rank, num_stages).tolist()
        self._assemblies = [
            assembler.begin(Share(self.plan, rank, microbatch, index, peer)) for index, microbatch in enumerate(order)
        ]
        self._ahead = assembler.read_ahead(each for assembly in self._assemblies for each in assembly.wanted())
        self.num_bytes = sum(assembly.num_bytes for assembly in self._assemblies)
        self._memory = memory

    @cached_property
    def tasks(self) -> list[Task]:
        """Tasks that fill its batches. The first access allocates memory. Raises MemoryError."""
        self._memory.reserve(self.num_bytes)
        return [fill for assembly in self._assemblies for fill in assembly.fill(self._memory)]

    def finish(self) -> BuiltStep:
        """Put the microbatches together; called once, after all tasks have run."""
        made = [assembly.finish() for assembly in self._assemblies]
        self._ahead = None
        seconds = {"planning": self._planning_seconds}
        for assembled in made:
            for stage, spent in assembled.seconds.items():
                seconds[stage] = seconds.get(stage, 0.0) + spent
        failures = [failure for assembled in made for failure in assembled.failures]
        batches = [assembled.batch for assembled in made]
        figures = step_figures(self._spec, self.plan, self._rank, len(failures))
        return BuiltStep(self.plan, batches, failures, seconds, figures)
