"""Building a step: task -> plan -> this rank's rows -> read -> decode -> batches.

    BuildSpec --pickle--> another process --open()--> Builder --StepTask--> the same batches, bit for bit

A spec is a value: everything that the steps of a rank depend on. Open resources (shards, memory, locks, counters) are
in a Builder. `Builder.build` is a pure function, which everything else uses. An engine runs the same tasks on other
threads: a started step is a set of tasks that may run on any thread in any order, then one `finish`. The data of
batches are anything with the protocols here: `Content` opens an `Assembler`, which begins an `Assembly` for each
microbatch. The memory of batches, which is used again, comes first; the figures of a step, which `stats()` adds up,
are at the end.
"""

from __future__ import annotations

import mmap
import operator
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL
from orchdata.loaders.errors import DataError
from orchdata.loaders.first_calls import settle_first_calls
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.order.steps import StepTask
from orchdata.planning.balance import Layout
from orchdata.planning.plan import Plan, PlanSpec, make_plan

Task = Callable[[], None]
T = TypeVar("T")
_SHOWN_FRAMES: Final = 8
_SMALL_BYTES: Final = 1 << 16  # malloc serves these from memory it already has
_MOST_FREE_BYTES: Final = 1 << 30


class Memory(Protocol):
    """The memory of the arrays of batches: a pool, or another allocator."""

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate uninitialised bytes, (num_bytes,). Raises MemoryError."""

    def reserve(self, num_bytes: int) -> None:
        """Prepare to allocate about this number of bytes. Raises MemoryError."""


class Returns(Generic[T]):
    """Values that return when arrays are collected.

    The callback is no Python function: the collector calls them anywhere, where locks hang and a Ctrl-C is lost.
    """

    def __init__(self) -> None:
        self._out: dict[int, tuple[Any, T]] = {}  # by the id of the reference to an array in use
        self._back: deque[weakref.ref[NDArray[np.uint8]]] = deque()

    def __len__(self) -> int:
        """The number of arrays in use."""
        return len(self._out) - len(self._back)

    def expect(self, array: NDArray[np.uint8], value: T) -> None:
        """Return `value` later, when no array or tensor over this one is left."""
        used = weakref.ref(array, self._back.append)
        self._out[id(used)] = used, value

    def take(self) -> Iterator[T]:
        """Yield what has returned since the last call; any thread may call it."""
        with suppress(IndexError):
            while True:
                yield self._out.pop(id(self._back.popleft()))[1]


class BufferPool:
    """Allocates anonymous memory, and takes it back when the last array or tensor over it is collected: a caller that
    keeps a batch keeps its memory, and nothing waits for that. Page faults of fresh memory cost more than decoding into
    it. Above `_MOST_FREE_BYTES` of it are released at the next allocation.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._returns = Returns[mmap.mmap]()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate uninitialised bytes, (num_bytes,). Raises MemoryError."""
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, np.uint8)
        self.free_bytes()
        # The smallest free memory that is large enough, and at most twice as large as needed.
        capacity = size_class(num_bytes)
        memory = self._popped([size for size in sorted(self._free) if capacity <= size <= 2 * capacity])
        if memory is None:
            # Release the largest free memory of at least half the size: the new mapping serves its sizes too. Otherwise
            # each size that batches ever had would keep its own memory.
            self._popped([size for size in sorted(self._free, reverse=True) if capacity <= 2 * size < 2 * capacity])
            try:
                memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, ValueError, OverflowError) as error:  # ENOMEM, or above the address space
                raise MemoryError(f"cannot map {capacity} bytes: {error}") from error
            with suppress(OSError):  # a kernel without them; a quarter of the time to write 20 MiB first, and less then
                memory.madvise(mmap.MADV_HUGEPAGE)
        base = np.frombuffer(memory, np.uint8)
        self._returns.expect(base, memory)
        return base[:num_bytes]

    def _popped(self, sizes: Iterable[int]) -> mmap.mmap | None:
        """Take free memory of the first of these sizes that has some."""
        for size in sizes:
            with suppress(IndexError):
                return self._free[size].pop()
        return None

    def reserve(self, num_bytes: int) -> None:
        """Do nothing: each piece is mapped separately."""

    def free_bytes(self) -> int:
        """Take back what has returned, and return the bytes of unused memory."""
        free = sum(capacity * len(memories) for capacity, memories in list(self._free.items()))
        for memory in self._returns.take():
            if free + len(memory) <= _MOST_FREE_BYTES:
                free += len(memory)
                self._free.setdefault(len(memory), deque()).append(memory)
        return free


def size_class(num_bytes: int) -> int:
    """Round up to one of four sizes per power of two, so that batches of similar size share memory."""
    step = 1 << max(12, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step


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
    """A rank's share of one optimizer step: its microbatches, plan, failures, busy seconds by stage, and figures."""

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


# Figures of `stats()`: measured when a step is built, added when it is delivered, shown. docs/stats.md has each.
#
#     step_figures: name -> numbers --added--> name -> sum --shown--> stats()[name]
#
# Worker processes send the numbers unchanged.

STAGES = ("planning", "reading", "decoding", "packing", "handing_over")
"""Of `BuiltStep.seconds`: what `stats()["milliseconds"]` shows per step."""


def step_figures(spec: PlanSpec, plan: Plan, rank: int, num_failures: int) -> dict[str, Any]:
    """Return the numbers of every figure in a step: a number, a tuple, or a mapping of those by name; None adds
    nothing. Takes milliseconds at thousands of ranks.
    """
    balance, price, lengths, number = spec.balance, spec.balance.price, plan.llm_positions, plan.num_microbatches
    # Where one rank has everything in one microbatch, all loads are sums.
    is_alone = plan.num_ranks == number == 1 and plan.padded.adds_up and not plan.parts and price.num_stages is None
    mine = slice(None) if is_alone else plan.places(rank)
    # A shared sample counts on the first of its ranks alone. One that failed stays where others wait for it.
    counted = mine if plan.teams is None else np.flatnonzero(plan.rank == rank)
    num_samples = len(plan.row[counted]) - (0 if plan.keeps_shapes else num_failures)

    # Of each phase six loads of ranks, and the price of the step: as planned, dealt out in turn, and even.
    totals = {phase: int(costs.sum()) for phase, costs in plan.costs.items()}
    even = price.of_even([totals[phase] / plan.num_ranks for phase in spec.costs.balanced], number)
    planned = in_turn = even
    phases = {phase: (float(total),) * 6 for phase, total in totals.items()}
    if not is_alone:
        cells = {phase: plan.cells(phase) for phase in plan.phases}
        dealt = {phase: plan.cells_unbalanced(phase) for phase in plan.phases}
        planned, in_turn = (
            float(price.of([of[phase] * plan.peers_of(phase) for phase in spec.costs.balanced]))
            for of in (cells, dealt)
        )
        for phase, own in cells.items():
            total, step, unbalanced = own.sum(axis=1), own.max(axis=0), dealt[phase]
            in_all = float(unbalanced.sum(axis=1).max()), float(total.max()), float(plan.lower_bound(phase))
            in_micro_steps = float(step.sum()), float(unbalanced.max(axis=0).sum())
            phases[phase] = *in_all, totals[phase] / plan.gpus(phase), *in_micro_steps

    # Tokens, and those of microbatches as long as their longest sample.
    own_lengths = lengths[mine]
    groups = [own_lengths[plan.microbatch[mine] == each] for each in range(number)]
    padded = sum(int(inside.max(initial=0)) * len(inside) for inside in groups)

    # Tokens in teams by size, and samples of which a rank has more than its cap.
    teams, size = {}, plan.team_size
    if balance.teams is not None:
        above = -(-lengths // size) > balance.caps.get("llm", MAX_TOTAL)
        teams = {"all": int(lengths.sum()), "above_cap": int(above.sum())}
        teams |= {str(each): int(lengths[size == each].sum()) for each in np.unique(size[size > 1]).tolist()}

    # Samples, tokens, loss tokens and started passes of each source of a mixture.
    sources: dict[str, dict[str, int]] = {}
    if plan.passes is not None and plan.source_loss_tokens is not None:
        counts = np.zeros((4, len(plan.sources)), np.int64)
        np.add.at(counts[0], plan.source, 1)
        np.add.at(counts[1], plan.source, lengths)
        counts[2] = plan.source_loss_tokens
        np.maximum.at(counts[3], plan.source, plan.passes + 1)
        keys = "samples", "tokens", "loss_tokens", "passes"
        figures = [dict(zip(keys, each, strict=True)) for each in counts.T.tolist()]
        sources = dict(zip(plan.sources, figures, strict=True))
    return {
        "samples": num_samples,
        "loss_tokens": plan.loss_tokens,
        "overflow": _overflow(spec, plan, counted),
        "phases": phases,
        "microbatches": number,
        "step_imbalance": (planned, even),
        "step_imbalance_unbalanced": (in_turn, even),
        "saved": (planned, in_turn),
        "padding_if_padded": (int(own_lengths.sum()), padded),
        "fill": plan.filled,
        "own_streams": plan.own_streams(rank),
        "teams": teams,
        "features": {phase: tuple(plan.feature_rows(phase).tolist()) for phase in plan.parts},
        "sources": sources,
    }


def _overflow(spec: PlanSpec, plan: Plan, counted: NDArray[np.int64] | slice) -> dict[str, int]:
    """Return of these samples those that were truncated, the tokens that they lost, those that were split (which count
    with their first piece), and their pieces.
    """
    index = getattr(spec.costs, "index", None)
    if index is None or not any(index.totals["overflow"].values()):
        return {}
    rows = plan.row[counted]
    if plan.ranges is not None:  # a document counts where it begins
        rows = rows[plan.ranges.first[counted] == 0]
    cut, piece = index.cut_tokens[rows], index.piece[rows]
    following = rows + 1
    continued = np.zeros(len(rows), np.bool_)
    inside = following < index.num_rows
    continued[inside] = index.piece[following[inside]] > 0
    split, pieces = (piece == 0) & continued, (piece > 0) | continued
    found = {"truncated": cut != 0, "cut_tokens": cut, "split": split, "pieces": pieces}
    return {name: int(each.sum()) for name, each in found.items()}


START: dict[str, Any] = {
    "samples": 0,
    "loss_tokens": 0,
    "overflow": dict.fromkeys(("truncated", "cut_tokens", "split", "pieces"), 0),
    "phases": {},
    "microbatches": 0,
    "step_imbalance": (0.0, 0.0),
    "step_imbalance_unbalanced": (0.0, 0.0),
    "saved": (0.0, 0.0),
    "padding_if_padded": (0, 0),
    "fill": None,
    "own_streams": None,
    "teams": {},
    "features": {},
    "sources": {},
}
"""The sums of no step, in the order of `stats()`."""


def plain_figures(num_steps: int, num_samples: int) -> dict[str, Any]:
    """The sums over steps of one rank that no plan is made for: all samples cost the same."""
    even = float(num_samples), float(num_samples)
    return START | {
        "samples": num_samples,
        "phases": {"llm": (float(num_samples),) * 6},
        "microbatches": num_steps,
        "step_imbalance": even,
        "step_imbalance_unbalanced": even,
        "saved": even,
        "padding_if_padded": (num_samples, num_samples),
    }


def added(total: Any, numbers: Any, name: str = "") -> Any:
    """Return sums with the numbers of one more step."""
    if numbers is None or total is None:
        return total if numbers is None else numbers
    if isinstance(numbers, dict):
        return total | {key: added(total.get(key), each, key) for key, each in numbers.items()}
    if isinstance(numbers, tuple):
        return tuple(map(operator.add, total, numbers))
    return max(total, numbers) if name == "passes" else total + numbers


def shown(sums: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Return plain values of sums over steps."""

    def ratio(name: str, empty: float = 1.0) -> float:
        return sums[name][0] / sums[name][1] if sums[name][1] else empty

    phases = {}
    for phase, (unbalanced, balanced, bound, mean, in_micro_steps, unbalanced_in_micro_steps) in sums["phases"].items():
        loads = {
            "imbalance_unbalanced": unbalanced,
            "imbalance": balanced,
            "imbalance_unbalanced_in_micro_steps": unbalanced_in_micro_steps,
            "imbalance_in_micro_steps": in_micro_steps,
            "lower_bound_over_mean": bound,
        }
        phases[phase] = {name: load / (mean or 1.0) or 1.0 for name, load in loads.items()}
    features = {}
    for phase, rows in sums["features"].items():
        shares = [moved / max(1, sum(rows)) for moved in rows]
        features[phase] = {"rows": sum(rows) / num_steps, "within_nodes": shares[1], "between_nodes": shares[2]}
    teams, own_streams = dict(sums["teams"]), sums["own_streams"]
    if teams:
        tokens, above = max(1, teams.pop("all")), teams.pop("above_cap")
        share = {size: teams[size] / tokens for size in sorted(teams, key=int)}
        teams = {"share": share, "above_cap": above}
    return sums | {
        "overflow": {**sums["overflow"]},
        "phases": phases,
        "microbatches": sums["microbatches"] / num_steps,
        "step_imbalance": ratio("step_imbalance"),
        "step_imbalance_unbalanced": ratio("step_imbalance_unbalanced"),
        "saved": 1 - ratio("saved"),
        "padding_if_padded": 1 - ratio("padding_if_padded"),
        "fill": sums["fill"] and ratio("fill"),
        "own_streams": None if own_streams is None else own_streams / num_steps,
        "teams": teams,
        "features": features,
        "sources": {name: {**of} for name, of in sums["sources"].items()},
    }
