"""A step, built: plan -> this rank's rows -> read -> decode -> batches.

`build_step` is the pure function everything stands on. An engine runs the same pieces on other threads: a started
step is a set of tasks that may run anywhere in any order, then one `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.building.step_stats import StepFigures, step_figures
from orchdata.loaders.errors import DataError
from orchdata.planning.pipeline import pipeline_order
from orchdata.planning.plan import Plan, PlanSpec, make_plan

Task = Callable[[], None]


@dataclass
class Assembled:
    """A microbatch, and what happened on the way.

    Attributes:
        batch: the Batch, or what the user's collate_fn made.
        failures: samples that could not be decoded, in planned order.
        seconds: busy time by stage ("reading", "decoding", "packing"), summed over threads.
    """

    batch: Any
    failures: list[DataError] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank has of a step in one microbatch.

    Attributes:
        microbatch: its number in the plan.
        place: its number among those that the rank is handed, which a pipeline's order makes another.
    """

    plan: Plan
    rank: int
    microbatch: int
    place: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """Its samples, rows of the data set, int64 (num_samples,)."""
        return self.plan.row[self.plan.positions(self.rank, self.microbatch)]


class Assembly(Protocol):
    """One microbatch under construction."""

    @property
    def tasks(self) -> Sequence[Task]:
        """What fills it: to be run in any order, on any threads."""

    def finish(self) -> Assembled:
        """The microbatch; called once, after all tasks have run."""


class Assembler(Protocol):
    """Makes microbatches of some data set. Safe to use from several threads."""

    def begin(self, share: Share) -> Assembly: ...


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything a rank's step depends on, apart from epoch and step."""

    plan: PlanSpec
    assembler: Assembler
    rank: int


@dataclass
class BuiltStep:
    """A rank's share of one optimizer step: its microbatches, plan, failures, busy seconds by stage, and figures."""

    plan: Plan
    batches: list[Any]
    failures: list[DataError]
    seconds: dict[str, float]
    figures: StepFigures


class StartedStep:
    """A step whose plan is made; its tasks are ready to run."""

    def __init__(self, spec: StepSpec, epoch: int, step: int) -> None:
        started = time.perf_counter()
        self._rank = spec.rank
        self.plan = make_plan(spec.plan, epoch, step)
        self._planning_seconds = time.perf_counter() - started
        self._assemblies = [
            spec.assembler.begin(Share(self.plan, spec.rank, microbatch, place))
            for place, microbatch in enumerate(_microbatch_order(spec, self.plan))
        ]
        self.tasks: list[Task] = [task for assembly in self._assemblies for task in assembly.tasks]

    def finish(self) -> BuiltStep:
        """Put the microbatches together; called once, after all tasks have run."""
        made = [assembly.finish() for assembly in self._assemblies]
        seconds = {"planning": self._planning_seconds}
        for assembled in made:
            for stage, spent in assembled.seconds.items():
                seconds[stage] = seconds.get(stage, 0.0) + spent
        failures = [failure for assembled in made for failure in assembled.failures]
        batches = [assembled.batch for assembled in made]
        return BuiltStep(self.plan, batches, failures, seconds, step_figures(self.plan, self._rank))


def _microbatch_order(spec: StepSpec, plan: Plan) -> list[int]:
    balance = spec.plan.balance
    if balance.num_stages is None or plan.num_microbatches == 1:
        return list(range(plan.num_microbatches))
    return [int(microbatch) for microbatch in pipeline_order(plan, spec.rank, balance.num_stages)]


def build_step(spec: StepSpec, epoch: int, step: int) -> BuiltStep:
    """Plan and build one step in this thread."""
    started = StartedStep(spec, epoch, step)
    for task in started.tasks:
        task()
    return started.finish()
