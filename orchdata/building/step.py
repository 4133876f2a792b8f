"""Building a step: task -> plan -> this rank's rows -> read -> decode -> batches.

    BuildSpec --pickle--> another process --open()--> Builder --StepTask--> the same batches, bit for bit

A spec is a value: everything that the steps of a rank depend on. Open resources (shards, memory, locks, counters) are
in a Builder. `Builder.build` is a pure function, which everything else uses. An engine runs the same tasks on other
threads: a started step is a set of tasks that may run on any thread in any order, then one `finish`. The data of
batches are anything with the protocols here: `Content` opens an `Assembler`, which begins an `Assembly` for each
microbatch.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.building.figures import step_figures
from orchdata.building.memory import BufferPool, Memory
from orchdata.loaders.errors import DataError
from orchdata.loaders.memory import settle_first_calls
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.order.steps import StepTask
from orchdata.planning.balance import Layout
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan

Task = Callable[[], None]
_SHOWN_FRAMES: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The samples of one rank in one microbatch of a step; `index` is its place among those that the rank delivers,
    which a pipeline's order changes. `peer` is that of the rank whose parts are encoded.
    """

    plan: Plan
    rank: int
    microbatch: int
    index: int
    peer: int = 0

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of its samples in the data set, (num_samples,): int64, or a sampler's own indices (object)."""
        return self.plan.row[self.plan.places(self.rank, self.microbatch)]


@dataclass
class Assembled:
    """A microbatch (a Batch, or the result of the user's collate_fn), its failures in planned order, and busy seconds
    by stage ("reading", "decoding", "packing"), summed over threads.
    """

    batch: Any
    failures: list[DataError] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Assembly(Protocol):
    """One microbatch under construction."""

    @property
    def num_bytes(self) -> int:
        """Memory that `fill` takes, computed from the index: nothing is read or allocated yet."""

    def wanted(self) -> Iterable[Any]:
        """Return what its tasks will read of shards, as `read_ahead` of its assembler takes it."""

    def fill(self, memory: Memory) -> Sequence[Task]:
        """Return the tasks that fill it, for any order and any threads. Called once. Raises MemoryError."""

    def finish(self) -> Assembled:
        """Return the microbatch; called once, after all tasks have run."""


class Assembler(Protocol):
    """Makes microbatches of some data set. Safe to use from several threads."""

    @property
    def reads(self) -> ReadBytes | None:
        """Bytes that it has read from shards so far; None if samples are not in shards."""

    def begin(self, share: Share) -> Assembly: ...

    def read_ahead(self, wanted: Iterable[Any]) -> object:
        """Begin to read from object storage what is wanted. Keep the result until it was read. Raises MemoryError."""

    def load_alone(self, row: int) -> None:
        """Load one sample as a step does, and drop it. Raises what loading raises."""


class Content(Protocol):
    """The data of batches, and how batches are made of it: a value."""

    def open(self, watch: Watch) -> Assembler:
        """Return what makes batches in this process. `watch` records each sample while it is loaded."""

    def name_of(self, row: int) -> str:
        """Return a sample's name for messages."""


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Everything a rank's steps depend on, apart from their `StepTask`; `peer` of the rank has its parts encoded."""

    plan: PlanSpec
    rank: int
    content: Content
    peer: int = 0

    @property
    def shards(self) -> Any:
        """Where the samples are, if these are in shards with an index: an `IndexedShards`; else None."""
        return getattr(self.content, "shards", None)

    @property
    def layout(self) -> Layout | None:
        """How batches are laid out; None for those of a `collate_fn`."""
        return getattr(self.content, "layout", None)

    @property
    def reads_far(self) -> bool:
        """Whether any shard is in object storage, whose answers take longer than a read of a file."""
        return self.shards is not None and bool(self.shards.any_remote)

    def open(self, *, watch: Watch | None = None, allocate: Callable[[StepTask], Memory] | None = None) -> Builder:
        """Return the builder of steps in this process, one for all its threads. Raises StaleIndexError where the index
        was rebuilt after the spec was created, PackageError for a package that the recipe needs, StorageError where the
        index cannot be loaded now.
        """
        settle_first_calls()
        return Builder(self, self.content.open(watch or Watch()), allocate)


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
        self, spec: BuildSpec, assembler: Assembler, allocate: Callable[[StepTask], Memory] | None = None
    ) -> None:
        self._spec, self._assembler = spec, assembler
        self.reads, self.load_alone = assembler.reads, assembler.load_alone
        pool = BufferPool()
        self._allocate = allocate or (lambda _: pool)

    def start(self, task: StepTask) -> StartedStep:
        """Plan a step. Raises IndexError if it is outside the epoch."""
        return StartedStep(self._spec, self._assembler, task, self._allocate(task))

    def planned_by(self, plan: PlanSpec) -> Builder:
        """Return a builder of the same samples in steps of another plan, with the same open shards."""
        return Builder(replace(self._spec, plan=plan), self._assembler)

    def build(self, task: StepTask) -> BuiltStep:
        """Plan and build a step in this thread."""
        started = self.start(task)
        for fill in started.tasks:
            fill()
        return started.finish()


class StartedStep:
    """A planned step; its tasks are ready to run. Its batches take `num_bytes` of memory."""

    def __init__(self, spec: BuildSpec, assembler: Assembler, task: StepTask, memory: Memory) -> None:
        started = time.perf_counter()
        self._spec, self._memory = spec, memory
        plan = self.plan = make_plan(spec.plan, task)
        self._planning_seconds = time.perf_counter() - started
        order, num_stages = list(range(plan.num_microbatches)), spec.plan.balance.num_stages
        if num_stages is not None and len(order) > 1:
            order = plan.pipeline_order(spec.rank, num_stages).tolist()
        shares = (Share(plan, spec.rank, microbatch, index, spec.peer) for index, microbatch in enumerate(order))
        self._assemblies = [assembler.begin(share) for share in shares]
        self._ahead = assembler.read_ahead(each for assembly in self._assemblies for each in assembly.wanted())
        self.num_bytes = sum(assembly.num_bytes for assembly in self._assemblies)

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
        figures = step_figures(self._spec.plan, self.plan, self._spec.rank, len(failures))
        return BuiltStep(self.plan, [assembled.batch for assembled in made], failures, seconds, figures)


def kept(failure: DataError) -> DataError:
    """Return a failure, to be listed, without its stack frames and those of its causes: they refer to the bytes of the
    sample, which would stay in memory as long as it is listed. A note says where a cause was raised.
    """
    error: BaseException | None = failure
    while error is not None:
        if error is not failure and error.__traceback__ is not None and not hasattr(error, "__notes__"):
            error.add_note("raised at\n" + "".join(traceback.format_tb(error.__traceback__, -_SHOWN_FRAMES)))
        error.__traceback__ = error.__context__ = None
        error = error.__cause__
    return failure
