"""Steps from torch's own loader: map-style data without costs, and IterableDatasets.

tasks --Feed: this rank's items--> torch's loader, its workers --Made: a batch, or an error--> MapStream
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from orchdata.building.collate import MapContent, step_info, takes_step
from orchdata.building.step import BuildSpec
from orchdata.delivery.policy import TorchCounts
from orchdata.engines.engine import Workers
from orchdata.engines.processes.message import Failed, unpacked
from orchdata.finalizers import Ending
from orchdata.loop.loop import EpochLoop, Position
from orchdata.loop.planned import Interrupted, LoopContext, begun_by, draw_tasks
from orchdata.loop.torch_workers import (
    Asked,
    Batches,
    BatchStream,
    Items,
    IterableContent,
    Made,
    Taken,
    has_own_state,
    iterate,
)
from orchdata.notices import warn_once, warn_user
from orchdata.order.steps import OrderedSteps, StateGetter, StepTask, StreamSteps, states_of
from orchdata.planning.plan import PlanSpec, make_plan

_BLOCK_STEPS = 64  # steps of an order with rows that are computed together


@dataclass(eq=False)
class MapSource:
    """A map-style data set, and the workers that are kept from one iteration to the next."""

    content: MapContent
    workers: Workers
    counts: TorchCounts
    is_stateful: bool  # whether the data set has a state of its own, and is this rank's alone
    in_order: bool
    opens: Callable[..., DataLoader[Any]]
    _kept: tuple[Feed, DataLoader[Made]] | None = None

    def stream(self, context: LoopContext, loop: EpochLoop) -> MapStream:
        return MapStream(context, self, loop)

    def open(self, loop: EpochLoop, *, in_order: bool) -> tuple[Feed, DataLoader[Made]]:
        """Return torch's loader for the next iteration, and its sampler."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        items = Items(self.content, loop.dataset_states if self.is_stateful else (), has_state=self.is_stateful)
        if not self.workers.num_workers:
            items.restore(0)
        feed = Feed()
        return feed, self.opens(items, sampler=feed, base_seed=loop.base_seed, in_order=in_order)

    def keep(self, feed: Feed, loader: DataLoader[Made], *, is_over: bool) -> None:
        """Keep the workers, if they are persistent, and their data sets are not ahead of what was delivered."""
        if self.workers.persistent_workers and (is_over or not self.is_stateful):
            self._kept = feed, loader

    def state_before(self) -> tuple[StateGetter, ...]:
        """Return the data set's own state, now; () if it has none, or workers have copies."""
        dataset = self.content.dataset
        return (lambda: states_of(dataset=dataset),) if self.is_stateful and not self.workers.num_workers else ()

    def close(self) -> None:
        """Stop workers that are kept."""
        self._kept = None


class Feed:
    """The sampler of torch's loader, which may be kept: it asks for this rank's part of the steps of an iteration."""

    def begin(self, tasks: Iterator[StepTask], spec: BuildSpec, *, next_step: int, num_before: int) -> None:
        """Begin an iteration. On one rank, the rows of its tasks are lists. `num_before` workers are asked for nothing
        at first, because it is the turn of the one after them.
        """
        # Number of a step that was asked for, and not delivered -> its task, and this rank's samples.
        self.under_way: dict[int, tuple[StepTask, int]] = {}
        self.again: deque[StepTask] = deque()  # tasks to ask for before all others
        self.next_step = next_step  # the one after the last that was asked for
        self.error: Exception | None = None  # what drawing a step has raised; it comes after the steps before it
        self._tasks: Iterator[StepTask] | None = tasks
        self._spec = spec
        self._num_before = num_before
        collate_fn = spec.content.collate_fn if isinstance(spec.content, MapContent) else None
        self._takes_step = collate_fn is not None and takes_step(collate_fn)

    @property
    def undelivered(self) -> Iterator[StepTask] | None:
        """All tasks that are not delivered; None if drawing one raised an error."""
        if self._tasks is None:
            return None
        return chain([task for task, _ in self.under_way.values()], self.again, self._tasks)

    def __iter__(self) -> Iterator[Asked | None]:
        yield from (None,) * self._num_before
        plan, rank, tasks = self._spec.plan, self._spec.rank, self._tasks
        try:
            while tasks and (task := self.again.popleft() if self.again else next(tasks, None)) is not None:
                items: Any = task.rows
                own = num_samples = 0 if items is None else len(items)
                if plan.num_ranks > 1:
                    planned = make_plan(plan, task)
                    items = planned.row[planned.places(rank)].tolist()
                    own, num_samples = len(items), len(planned.row)
                    items = items or planned.row[:1].tolist()  # as torch's DistributedSampler pads
                self.under_way[task.step] = task, own
                self.next_step = max(self.next_step, task.step + 1)
                info = step_info(task.epoch, task.step, num_samples, plan.num_ranks) if self._takes_step else None
                yield Asked(task.step, items, info)
        except Exception as error:  # noqa: BLE001 - it is raised where the step would come
            self.error, self._tasks = error, None
        except KeyboardInterrupt:  # this generator is over, and the epoch is not
            self._tasks = None
            raise


class MapStream:
    """The steps of one iteration over a map-style data set.

    The position is computed on request: besides torch's loader, a step costs only the code in `__next__` and `Feed`.
    """

    computes_position = True

    def __init__(self, context: LoopContext, source: MapSource, loop: EpochLoop) -> None:
        self._context = context
        self._source = source
        self._loop: EpochLoop | None = loop  # until it is open: a loop knows this stream, by its progress
        self._start = loop.start.position
        self._interrupted, self._begun = begun_by(context, loop)
        self._feed: Feed | None = None
        self._opened: list[Any] = []  # torch's iterator and its loader; a list, which the finalizer can clear
        self._ending: Ending | None = None
        # What was delivered.
        self._left: set[int] = set()
        self._delivered: StepTask | None = None
        self._step = self._start.step
        self._worker = 0
        self._states: list[StateGetter | None] = []
        self._failed: int | None = None  # the step that failed; None if a worker was lost: the iteration is over

    @property
    def position(self) -> Position:
        if self._delivered is None or self._feed is None:
            return self._start
        reached = self._start.reaching(self._step, (*self._left, *self._feed.under_way))
        workers = tuple(self._states) if self._source.workers.num_workers else self._source.state_before()
        return replace(reached, sampler=self._delivered.sampler_state, workers=workers, worker=self._worker)

    @property
    def undelivered(self) -> list[int]:
        return [] if self._feed is None else list(self._feed.under_way)

    @property
    def next_step(self) -> int:
        """See `Stream`."""
        return self._start.step if self._feed is None else self._feed.next_step

    def __next__(self) -> list[Any]:
        feed = self._feed or self._open()
        started = perf_counter()
        try:
            made = next(self._opened[0])
            while made.step < 0:
                made = next(self._opened[0])
        except StopIteration:
            if (failure := feed.error) is None:
                raise
            feed.error = None
            try:
                raise failure from None
            finally:
                del failure  # as below
        except (Exception, SystemExit) as error:
            if self._source.workers.num_workers:
                error.with_traceback(None)  # torch's frame has the error as a variable: a cycle would keep the workers
            else:
                self._failed = next(iter(feed.under_way), None)
            raise
        if type(made.batch) is Failed:
            failed, self._failed = made.batch, made.step
            try:
                raise failed.error
            finally:
                del failed, made  # or the error's traceback, which has this frame, would be a cycle

        self._delivered, num_samples = feed.under_way.pop(made.step)
        counts = self._source.counts
        counts.steps += 1
        counts.samples += num_samples
        counts.waiting_seconds += perf_counter() - started
        self._step = max(self._step, made.step + 1)
        if self._left:
            self._left.discard(made.step)
        if made.state is not None:
            self._states[made.worker], self._worker = partial(unpacked, made.state), made.worker
        return [made.batch]

    def leave(self) -> Interrupted:
        return Interrupted(self._begun, None if self._feed is None else self._feed.undelivered)

    def skip_failed(self, error: BaseException) -> bool:
        feed, context = self._feed, self._context
        failed, self._failed = self._failed, None
        if feed is None:
            return False
        if isinstance(error, KeyboardInterrupt):
            # This process was making it: as with torch, one rank alone loses it.
            if not self._source.workers.num_workers:
                feed.again.extend(() if context.rank.size == 1 else (task for task, _ in feed.under_way.values()))
                feed.under_way.clear()
            return feed.undelivered is not None
        if failed is None or context.rank.size > 1:
            return False
        del feed.under_way[failed]
        if failed < self._step:  # others have overtaken it
            self._left.add(failed)
        return True

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        if self._feed is not None and self._opened and not has_failed:
            self._source.keep(self._feed, self._opened[1], is_over=is_over)
        if self._ending is not None:
            self._ending.cancel() if waits else self._ending.soon()
        self._opened = []

    def _open(self) -> Feed:
        """Draw the steps, once all ranks have the random inputs of the epoch, and open torch's loader."""
        context, source, plan = self._context, self._source, self._context.spec.plan
        loop, left, self._interrupted = self._loop, self._interrupted, None
        assert loop is not None
        self._start, tasks = draw_tasks(context, loop, self._begun, left)
        if isinstance(context.steps, OrderedSteps) and plan.num_ranks == 1:
            tasks = _ordered(plan, context.steps, tasks)
        in_order = source.in_order
        if not in_order:
            first = list(islice(tasks, 1))
            tasks = chain(first, tasks)
            if in_order := any(task.sampler_state is not None for task in first):
                warn_once(
                    "a sampler with a state keeps order",
                    "in_order=False has no effect: the sampler has its own state, which does not store which of its "
                    "batches others have overtaken, so batches come in order",
                )
        self._left = set(self._start.left)
        self._step = self._start.step
        # The state of a worker goes on with its own steps.
        num_workers = source.workers.num_workers
        num_before = self._step % num_workers if source.is_stateful and num_workers else 0
        self._states = list(self._start.workers) or [None] * (num_workers if source.is_stateful else 0)
        feed, loader = source.open(loop, in_order=in_order)
        feed.begin(tasks, context.spec, next_step=self._step, num_before=num_before)
        self._opened = [iterate(loader), loader]
        # Torch's iterator waits for its workers when it is dropped: the collector must not be the one who drops it.
        self._ending = Ending(self, self._opened.clear) if num_workers else None
        self._feed, self._loop = feed, None
        return feed


def _ordered(plan: PlanSpec, steps: OrderedSteps, tasks: Iterator[StepTask]) -> Iterator[StepTask]:
    """Yield the tasks of an order with their rows, those of several steps computed together."""
    while block := list(islice(tasks, _BLOCK_STEPS)):
        bounds = [steps.bounds(task) for task in block]
        begin = bounds[0][0]
        rows = plan.order.rows(block[0].epoch, begin, bounds[-1][1])[1].tolist()
        for task, (start, stop) in zip(block, bounds, strict=True):
            yield task._replace(rows=rows[start - begin : stop - begin])


@dataclass(eq=False)
class IterableSource:
    """An IterableDataset, and the workers, which iterate copies and are kept from one iteration to the next."""

    content: IterableContent
    workers: Workers
    counts: TorchCounts
    opens: Callable[..., DataLoader[Any]]
    _begun: Batches | None = None
    _kept: tuple[int, DataLoader[Taken]] | None = None
    _restored: dict[str, Any] | None = None
    _rest: int = -1  # steps of a pass that began inside an epoch

    def stream(self, context: LoopContext, loop: EpochLoop) -> IterableStream:
        assert isinstance(context.steps, StreamSteps)
        return IterableStream(self, context.steps, loop)

    def open(self, loop: EpochLoop) -> tuple[BatchStream, DataLoader[Taken]]:
        """Return what the next iteration iterates."""
        origin = loop.origin
        (ended, loader), self._kept = self._kept or (-1, None), None
        if loader is not None and ended != origin.epoch and isinstance(loader.dataset, BatchStream):
            return loader.dataset, loader
        states = loop.dataset_states
        first, self._begun = self._begun, None
        stream = BatchStream(
            self.content,
            states,
            epoch=origin.epoch,
            last=origin.worker if states and origin.step else -1,
            first=first,
            restored=self._restored,
        )
        if states and not self.workers.num_workers:
            self._restored = states[0]
        return stream, self.opens(stream, base_seed=loop.base_seed)

    def passed(self, num_steps: int, *, is_rest: bool) -> None:
        """A pass is over. Warn if it ended as the one before, which had only the rest of its epoch."""
        if not is_rest and num_steps == self._rest:
            warn_once(
                "a pass with the rest of another",
                f"{type(self.content.dataset).__name__} yielded only {num_steps} batches, as in the epoch before, of "
                "which a state had left these: it begins each pass where its load_state_dict put it. Give it a "
                "set_epoch that the next epoch begins with, or have it forget the state once it was used",
            )
        self._rest = num_steps if is_rest else -1

    def keep(self, epoch: int, loader: DataLoader[Taken]) -> None:
        """Keep the workers, which are at the end of this epoch, if they are persistent."""
        if self.workers.persistent_workers:
            self._kept = epoch, loader

    def state_before(self) -> tuple[StateGetter, ...]:
        """Return the data set's own state before the first step; () if it has none, or workers iterate copies."""
        if self.workers.num_workers:
            return ()
        self._begun = self._begun or Batches(self.content)
        getter = partial(self._begun.state, None)
        return (getter,) if has_own_state(getter()) else ()

    def close(self) -> None:
        """Stop workers that are kept."""
        self._begun = self._kept = None


class IterableStream:
    """The steps of one iteration over an IterableDataset."""

    computes_position = False

    def __init__(self, source: IterableSource, steps: StreamSteps, loop: EpochLoop) -> None:
        self.position = loop.know(None)
        self.undelivered: list[int] = []
        self.next_step = self.position.step
        self._source = source
        self._steps = steps
        self._begins_at = self.next_step
        self._stream, loader = source.open(loop)
        self._opened: list[Any] = [iterate(loader), loader]  # see `MapStream`
        self._ending = Ending(self, self._opened.clear) if source.workers.num_workers else None

    def __next__(self) -> list[Any]:
        started = perf_counter()
        try:
            taken = next(self._opened[0])
            while not taken.num_samples:  # from a worker that waits for its turn (see `BatchStream`)
                if taken.error is not None:
                    raise taken.error
                taken = next(self._opened[0])
        except Exception as error:
            # Torch's frame has the error as a variable: a cycle would keep the workers.
            if self._source.workers.num_workers:
                error.with_traceback(None)
            raise
        counts = self._source.counts
        counts.steps += 1
        counts.samples += taken.num_samples
        counts.waiting_seconds += perf_counter() - started

        # Warn, as torch does, of more batches than the length that the user has asked for.
        step, source, epoch = self.next_step, self._source, self.position.epoch
        if (length := self._steps.asked_length) is not None and step >= length:
            has_workers = bool(source.workers.num_workers)
            copies = (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
            warn_user(
                f"Length of IterableDataset {source.content.dataset} was reported to be {length} (when accessing "
                f"len(dataloader)), but {step + 1} samples have been fetched. {copies if has_workers else ''}"
            )
        batch = taken.batch
        if source.content.takes_step:
            batch = source.content.collated_at(batch, epoch, step)
        here = self._stream.first
        self.position = self.position.after(
            step,
            state=partial(taken.progress, epoch) if here is None else partial(here.state, epoch, taken.steps),
            worker=taken.worker,
            num_workers=source.workers.num_workers or 1,
        )
        self.next_step += 1
        return [batch]

    def leave(self) -> None:
        """Do nothing: the next iteration resumes at the failed step with the states of the workers."""

    def skip_failed(self, error: BaseException) -> bool:
        if not isinstance(error, KeyboardInterrupt):
            self.next_step += 1
        return True

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        if is_over and not has_failed:
            self._source.passed(self.next_step - self._begins_at, is_rest=self._begins_at > 0)
            self._source.keep(self.position.epoch, self._opened[1])
        if self._ending is not None:
            self._ending.cancel() if waits else self._ending.soon()
        self._opened = []  # its workers end with it
