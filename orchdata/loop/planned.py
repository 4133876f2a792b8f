"""Planned steps: drawn in this process, built ahead by an engine, delivered in order.

tasks --ahead--> engine --under way--> delivery (waits, counts, masks, sends to peers) --> microbatches

A step under way is waited for; its failures are counted; what failed on other ranks is masked (per phase, shared), and
peers that do not read get it (broadcast): `delivery/peers.py`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from orchdata.batch.batch import ModelInputs
from orchdata.batch.tensors import TeamUse
from orchdata.building.collate import STOP_ITERATION
from orchdata.building.step import Builder, BuildSpec, BuiltStep
from orchdata.delivery.peers import FailedParts, ReceivingEngine, Replication
from orchdata.delivery.policy import FailureBudget
from orchdata.engines.engine import Engine, InlineEngine, PinningEngine, ThreadEngine, Workers
from orchdata.engines.processes.engine import ProcessEngine
from orchdata.engines.warm import Warming
from orchdata.finalizers import Ending
from orchdata.loaders.errors import BLANK, DataError, TooManyFailures
from orchdata.loop.loop import EpochLoop, Position
from orchdata.notices import warn_once, warn_user
from orchdata.order.steps import StateGetter, Steps, StepTask
from orchdata.planning.balance import Padded
from orchdata.planning.plan import make_plan
from orchdata.ranks.agreement import Agreement, Beginning, check_plans, fail_check
from orchdata.ranks.parallel import Rank

_MANY = 10
"""An epoch with this many failures that delivered nothing ends with an error."""
_MUCH_PADDING = 0.3
_LOOKS_EVERY = 50
"""Steps after which waste is looked for."""


@dataclass(eq=False)
class Delivery:
    """Delivers each step of a rank when it is requested, in the thread that iterates, and adds it to the statistics.

    Raises ValueError if peers would receive the batches of a collate_fn, and for ranks that share samples, skip those
    that fail, and cannot tell each other.
    """

    spec: BuildSpec
    rank: Rank
    budget: FailureBudget
    timeout: float
    inputs: ModelInputs | None  # these two name tensors as a model does, or say that they have no such names
    unnamed: tuple[str, ...]

    def __post_init__(self) -> None:
        spec, rank, balance = self.spec, self.rank, self.spec.plan.balance
        self.replication = Replication(rank, spec, self.timeout) if rank.shared else None
        self._delivered, self._failed = 0, list[DataError]()
        self._failed_parts: FailedParts | None = None
        self.team_use = TeamUse()  # of the slices that it delivers
        # What fails on one rank may be in samples of others, by its parts or by teams; receivers of a broadcast get
        # masked batches.
        skips, is_known = self.budget.policy.action == "skip", rank.size == 1 or bool(rank.dp_groups)
        if balance.teams is not None and skips and not is_known:
            raise ValueError(
                "Balance(teams=...) with on_error='skip' lets the ranks of a team tell each other what failed, and "
                f"dp=({rank.rank}, {rank.size}) has no process group: pass the group or a mesh as dp, or use "
                "on_error='raise'"
            )
        together = balance.assignment == "per_phase" or balance.teams is not None
        if together and skips and not self.receives and is_known:
            groups = (*(rank.dp_groups if rank.size > 1 else ()), *rank.peer_groups)
            self._failed_parts = FailedParts(groups, rank.rank, rank.peer)
        # Whether ranks take part in the delivery of each other's steps.
        self.is_collective = self.replication is not None or self._failed_parts is not None

    @property
    def receives(self) -> bool:
        """Whether a peer reads for this rank."""
        return self.replication is not None and not self.replication.is_reader

    def deliver(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> list[Any]:
        """Return a step's microbatches; if this rank reads for peers, they get them too, or the error.

        Raises what building it raised, RuntimeError after the timeout (this closes the engine), and as `FailureBudget`.
        """
        try:
            built = self._masked(engine, future, task)
        except Exception as error:
            if self.replication is not None and not self.receives:
                self.replication.send_error(error)
            raise
        finally:
            del future  # it has the error, whose traceback has this frame: a cycle would keep the caller's iteration
        if self.replication is not None and not self.receives:
            self.replication.send(built)
        batches, teams = self.named(built.batches), self.spec.plan.balance.teams
        if teams is None or teams.cut == "trainer":
            return batches
        # Teams of slices know whether their attention was used.
        return [
            replace(batch, teams=tuple(replace(team, use=self.team_use) for team in batch.teams)) for batch in batches
        ]

    def named(self, batches: list[Any]) -> list[Any]:
        """Return the batches, with the model's names for their tensors, or what has none."""
        if self.inputs is None and not self.unnamed:
            return batches
        return [replace(batch, inputs=self.inputs, unnamed=self.unnamed) for batch in batches]

    def end_epoch(self, epoch: int) -> None:
        """Raise TooManyFailures if all samples of this rank in the epoch failed, and they are many."""
        delivered, failed = self._delivered, self._failed
        self._delivered, self._failed = 0, []
        if not delivered and len(failed) >= _MANY:
            raise TooManyFailures(
                f"epoch {epoch} delivered nothing to this rank: all of its {len(failed)} samples or more failed, the "
                f"first one: {failed[0]}"
            ) from failed[0]

    def _masked(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> BuiltStep:
        """Wait for a step and count it. Return it with all samples masked that failed on other ranks."""
        try:
            built, waited = self._received(engine, future, task)
            reports = self._failed_parts if built.plan.keeps_shapes else None
            counts_later = built.plan.teams is not None or built.plan.num_peers > 1
            if reports is None or not counts_later:
                self._count(built, waited, task)
        except Exception as error:
            if self._failed_parts is not None and make_plan(self.spec.plan, task).keeps_shapes:
                self._failed_parts.give_up(task.step, error)
            raise
        finally:
            del future  # as in `deliver`
        if reports is None:
            return built
        if counts_later:
            return reports.count_once(built, lambda agreed: self._count(agreed, waited, task))
        return replace(built, batches=reports.mask_labels(task.step, built.batches))

    def _received(self, engine: Engine, future: Future[BuiltStep], task: StepTask) -> tuple[BuiltStep, float]:
        """Wait for a step of any engine. Return it, and the seconds."""
        started = time.perf_counter()
        engine.expect(future)
        until = math.inf if engine.keeps_time or not self.timeout else time.monotonic() + self.timeout
        # Python does not hear a Ctrl-C that comes just as a wait begins, until that wait is over: so it is in rounds.
        while not future.done() and (left := until - time.monotonic()) > 0:
            wait([future], min(left, 1.0))
        for note in engine.take_notes():
            warn_user(note)
        if not future.done():
            engine.close()  # before other ranks get the error: so this process, which hangs, ends first
            raise RuntimeError(
                f"DataLoader timed out after {self.timeout} seconds, waiting for step {task.step} of epoch {task.epoch}"
            )
        try:
            return future.result(), time.perf_counter() - started
        finally:
            del future  # as in `deliver`

    def _count(self, built: BuiltStep, waited: float, task: StepTask) -> None:
        """Count a step and its failures. Raises as `FailureBudget`."""
        if not self.receives:  # else the reader counts them
            failures = [failure for failure in built.failures if failure.reason != BLANK]
            blank = len(built.failures) - len(failures)
            if built.plan.teams is not None and self._failed_parts is None:  # under "raise" no others are left
                later = [team for batch in built.batches for team in batch.teams if team.place]
                blank -= sum(int((~team.valid).sum()) for team in later)
            self.budget.stats.num_blank += blank
            if failures:
                self.budget.count(failures, task.epoch)
            lost = len(built.failures) if built.plan.keeps_shapes else 0
            self._delivered += max(0, built.figures["samples"] - lost)
            self._failed += failures if len(self._failed) < _MANY else ()
        self.budget.stats.add_step(built, waited)
        if not self.spec.rank and not self.budget.stats.num_steps % _LOOKS_EVERY:
            self._warn_of_waste()

    def _warn_of_waste(self) -> None:
        """Warn once, by what was measured, of much padding, and of shards that are read over and over."""
        stats, shards = self.budget.stats.as_dict(), self.spec.shards
        is_padded, reads = isinstance(self.spec.layout, Padded), stats["reads"]
        padding = stats["padding_if_padded"] if is_padded else 1 - (stats["fill"] or 1.0)
        if padding > _MUCH_PADDING:
            less = "od.Packed() has none. `orchdata profile` compares layouts"
            warn_once("padding", f"{padding:.0%} of the LLM positions so far are padding: {less}")
        if shards is not None and reads and reads["storage_bytes"] > 2 * reads["used_bytes"]:
            read, whole = reads["storage_bytes"], sum(shard.size for shard in shards.index.shards)
            less = 'small row groups, or balance="grouped" with shuffle=od.Shuffle(streams=<groups>), take less'
            if read > whole:
                warn_once("reads", f"this rank has read {read:,} bytes of shards that have {whole:,} in all: {less}")


class Interrupted(NamedTuple):
    """State of an iteration with an error, for the one that continues it."""

    begun: Beginning  # kept, because for the other ranks, which had no error, it is the same iteration
    tasks: Iterator[StepTask] | None  # its steps from the failed one on, if they were drawn


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Shared by all iterations of a loader; `builder` is of the spec, in this process, if its steps are planned."""

    spec: BuildSpec
    builder: Builder | None
    steps: Steps
    rank: Rank
    agreement: Agreement
    delivery: Delivery


class PlannedStream:
    """The steps of one iteration, built by its own engine, which `leave` closes, or keeps for the next iteration."""

    computes_position = False

    def __init__(self, context: LoopContext, loop: EpochLoop, engine: Engine, leave: Callable[..., None]) -> None:
        self._context, self._loop, self._engine, self._leave = context, loop, engine, leave
        self.position, self.next_step = loop.start.position, loop.start.position.step
        left = partial(leave, engine, is_over=False, has_failed=False)
        self._ending = Ending(self, left) if engine.depth else None
        self._tasks: Iterator[StepTask] | None = None
        self._ahead: deque[StepTask] = deque()  # drawn, and not yet under way
        self._under_way: deque[tuple[StepTask, Future[BuiltStep]]] = deque()
        self._interrupted, self._begun = begun_by(context, loop)

    @property
    def undelivered(self) -> list[int]:
        return [*(task.step for task, _ in self._under_way), *(task.step for task in self._ahead)]

    def __next__(self) -> list[Any]:
        if self._tasks is None:
            left, self._interrupted = self._interrupted, None
            self.position, self._tasks = draw_tasks(self._context, self._loop, self._begun, left)

        # As many steps are under way as the engine wants, and the first of them is awaited.
        self._submit(max(1, self._engine.depth))
        step, every, groups = self.next_step, self._context.rank.check_plan_every, self._context.rank.groups
        is_checked = bool(every) and (step - self._begun.step) % every == 0
        if not self._under_way:
            if is_checked and step == self._loop.start.position.step:
                check_plans(self.position.epoch, step, None, groups)  # there is no step to plan
            raise StopIteration
        task, future = self._under_way[0]
        try:
            try:
                batches = self._context.delivery.deliver(self._engine, future, task)
            finally:
                del future  # as in `Delivery.deliver`
            self._submit(self._engine.depth + 1)  # this one is still among them
        except Exception as error:
            if is_checked:
                fail_check(error, groups)
            if isinstance(error, StopIteration):
                raise RuntimeError(STOP_ITERATION) from error
            raise

        # A step whose plan other ranks do not have stays under way: it is tried again.
        if is_checked:
            check_plans(self.position.epoch, step, self._under_way[0][1].result().plan.hash, groups)
        self._under_way.popleft()
        self.next_step += 1
        self.position = self.position.after(task.step, self.undelivered, sampler=task.sampler_state)
        return batches

    def leave(self) -> Interrupted:
        undelivered = [*(task for task, _ in self._under_way), *self._ahead]
        tasks = None if self._tasks is None else chain(undelivered, self._tasks)
        return Interrupted(self._begun, tasks)

    def skip_failed(self, error: BaseException) -> bool:
        context = self._context
        is_collective = context.delivery.is_collective or context.rank.check_plan_every
        # The step is still under way, and awaited again. Other ranks may wait for this one in a collective.
        return isinstance(error, KeyboardInterrupt) and self._tasks is not None and not is_collective

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        try:
            if is_over:
                self._context.delivery.end_epoch(self.position.epoch)
        except BaseException:
            has_failed = True
            raise
        finally:
            if waits or self._ending is None:
                self._leave(self._engine, is_over=is_over, has_failed=has_failed)
            if self._ending is not None:
                self._ending.cancel() if waits else self._ending.soon()

    def _submit(self, depth: int) -> None:
        while len(self._under_way) < depth:
            if not self._ahead and self._tasks is not None:
                try:
                    self._ahead.extend(islice(self._tasks, 1))
                except BaseException:
                    self._tasks = None  # it is over: an iteration that continues draws again
                    raise
            if not self._ahead:
                return
            task, future = self._ahead[0], Future[BuiltStep]()
            try:
                filled = self._context.steps.filled(task)
            except Exception as error:  # noqa: BLE001 - it is raised when the step is awaited, as one of its build
                future.set_exception(error)
            else:
                future = self._engine.submit(filled)
            self._under_way.append((task, future))
            self._ahead.popleft()


def begun_by(context: LoopContext, loop: EpochLoop) -> tuple[Interrupted | None, Beginning]:
    """Return what an interrupted iteration has left, which no other gets, and how ranks begin this one."""
    left, loop.start.interrupted = loop.start.interrupted, None
    start = loop.start.position
    return left, context.agreement.begin(start.epoch, start.step, left and left.begun)


def draw_tasks(
    context: LoopContext, loop: EpochLoop, begun: Beginning, left: Interrupted | None
) -> tuple[Position, Iterator[StepTask]]:
    """Return where an iteration starts, and its steps, once all ranks have the random inputs of the epoch."""
    origin = loop.origin

    # After an error, the tasks that the failed iteration drew are taken again.
    if left is not None and left.tasks is not None:
        return loop.know(origin.draw), left.tasks

    # Ranks compare where they begin. All use the random inputs that rank 0 has drawn, or those of the state.
    draw = begun.agree(lambda: origin.draw or context.steps.draw())
    if origin.draw is not None and draw != origin.draw:
        raise ValueError("ranks continue from different states: pass load_state_dict the same on every rank")
    position = loop.know(draw)

    # Tasks begin at the first step that is not delivered; delivered steps after it are left out.
    first, again = min((*origin.left, origin.step)), origin.draw is not None or context.rank.rank > 0
    state = origin.sampler if loop.start.restores else None
    tasks = context.steps.tasks(origin.epoch, first, draw, again=again, sampler_state=state)
    if first == origin.step:
        return position, tasks
    return position, (task for task in tasks if task.step >= origin.step or task.step in origin.left)


@dataclass(eq=False)
class PlannedSource:
    """Where planned steps come from: an engine that is opened for an iteration, or kept. As the two sources of torch's
    loader, it opens a stream, returns the data set's own state before its first step, and stops what is kept.
    """

    workers: Workers
    warming: Warming
    pin_memory: bool
    idle: Engine | None = None
    _known_bad_rows: dict[int, str] = field(default_factory=dict)

    def stream(self, context: LoopContext, loop: EpochLoop) -> PlannedStream:
        engine, self.idle = self.idle or self._open(context, loop.base_seed), None
        return PlannedStream(context, loop, engine, self.leave)

    def state_before(self) -> tuple[StateGetter, ...]:
        return ()

    def _open(self, context: LoopContext, base_seed: int) -> Engine:
        # Threads call kernels while `timeout` runs, and processes that are forked would each load them.
        workers = self.workers
        if workers.forks or (workers.num_threads and not workers.num_workers):
            self.warming.finish(context.spec)
        else:
            self.warming.wait()
        spec, builder = context.spec, context.builder
        assert builder is not None
        engine: Engine
        if (channel := context.delivery.replication) is not None and not channel.is_reader:
            engine = ReceivingEngine(spec, channel)
        elif workers.num_workers:
            known: dict[str, Any] = {"name_of": spec.content.name_of, "known_bad_rows": self._known_bad_rows}
            filled = replace(workers, base_seed=base_seed, reads=builder.reads, **known)
            engine = ProcessEngine(spec, filled) if workers.engine is None else workers.engine.open(spec, filled)
        elif workers.num_threads:
            engine = ThreadEngine(builder, num_threads=workers.num_threads, depth=workers.prefetch_factor)
        else:
            engine = InlineEngine(builder)
        return PinningEngine(engine) if self.pin_memory else engine

    def leave(self, engine: Engine, *, is_over: bool, has_failed: bool) -> None:
        """Keep an engine for the next iteration, or close it."""
        keeps = self.workers.persistent_workers and not has_failed and (is_over or self.workers.engine is not None)
        if keeps and self.idle is None:
            self.idle = engine
        else:
            engine.close()

    def close(self) -> None:
        """Close the engine that is kept."""
        if self.idle is not None:
            self.idle.close()
            self.idle = None
