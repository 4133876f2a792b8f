"""Steps from torch's own loader: map-style data in this process, and IterableDatasets.

Nothing is planned: this rank gets every batch, and torch's loader takes less time per batch than a plan.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import chain, islice
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from orchdata.building.map_items import MapContent
from orchdata.delivery.stats import TorchCounts
from orchdata.engines.iterables import Batches, BatchStream, IterableContent, Taken, iterate, torch_loader
from orchdata.engines.processes.engine import Workers
from orchdata.engines.work import error_of
from orchdata.finalizers import Ending
from orchdata.loop.loop import STOP_ITERATION, EpochLoop
from orchdata.loop.position import Position
from orchdata.notices import warn_once, warn_user
from orchdata.order.sampler import SamplerSteps
from orchdata.order.stateful import StateGetter, has_own_state
from orchdata.order.steps import Draw, OrderedSteps, StreamSteps
from orchdata.planning.make_plan import PlanSpec

_BLOCK_STEPS = 64  # steps of an order with rows that are computed together


class Rows:
    """The rows of steps in the form that torch's loader takes: a batch sampler, or a sampler of single indices.

    Attributes:
        current: of the step that is being read.
        items: the iterator of the sampler that they come from; None for an order.
    """

    def __init__(self, steps: Iterator[list[Any]], items: Iterator[Any] | None, *, batched: bool) -> None:
        self.current: list[Any] = []
        self.items = items
        self._steps = steps
        self._batched = batched
        self._drawn = self._draw()

    def __iter__(self) -> Iterator[Any]:
        return self._drawn

    @property
    def is_over(self) -> bool:
        """Whether the sampler has ended, or has raised an error."""
        return getgeneratorstate(self._drawn) == GEN_CLOSED

    def again(self) -> Rows:
        """The same from the current step on."""
        return Rows(chain([self.current], self._steps), self.items, batched=self._batched)

    def _draw(self) -> Generator[Any, None, None]:
        batched = self._batched
        for rows in self._steps:
            self.current = rows
            yield rows if batched else rows[0]


class MapStream:
    """The steps of one iteration over a map-style data set, read in this process.

    The position is computed on request: besides torch's loader, a step costs only the code in `__next__`.
    """

    computes_position = True

    def __init__(
        self,
        content: MapContent,
        plan: PlanSpec,
        steps: SamplerSteps | OrderedSteps,
        loop: EpochLoop,
        counts: TorchCounts,
        *,
        pin_memory: bool,
    ) -> None:
        # Draw the random inputs of the epoch, unless a state or an interrupted iteration has them.
        origin, rows = loop.origin, loop.start.take_interrupted()
        draw = steps.draw() if rows is None and origin.draw is None else origin.draw
        if rows is None:
            again = origin.draw is not None
            if isinstance(steps, OrderedSteps):
                rows = Rows(_ordered(plan, steps, origin, draw), None, batched=content.batched)
            else:
                lists, items = steps.items(origin.step, draw, again=again, sampler_state=loop.sampler_state)
                rows = Rows(lists, items, batched=content.batched)

        # The data set continues with its own state.
        self._stateful = content.stateful
        if self._stateful is not None and (states := loop.dataset_states):
            self._stateful.restore(states[0] or {})

        self.undelivered: list[int] = []  # the failed step is the next one
        self._steps = steps
        self._rows = rows
        self._counts = counts
        self._start = loop.know(draw)
        self.next_step = self._yielded = self._start.step
        self._sampler_state = self._start.sampler
        self._has_sampler_state = self._state_of_sampler() is not None
        # torch's own base seed is not used: our loader draws it, or a state has stored it.
        options: dict[str, Any] = {"pin_memory": pin_memory, "generator": torch.Generator()}
        options |= {"batch_sampler": rows} if content.batched else {"batch_size": None, "sampler": rows}
        self._batches = iter(DataLoader(content.dataset, collate_fn=content.collate_fn, **options))

    def __next__(self) -> list[Any]:
        started = perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration as error:
            if self._rows.is_over:
                raise
            raise RuntimeError(STOP_ITERATION) from error
        counts = self._counts
        counts.steps += 1
        counts.samples += len(self._rows.current)
        counts.waiting_seconds += perf_counter() - started
        self._yielded = self.next_step = self.next_step + 1
        if self._has_sampler_state:
            self._sampler_state = self._state_of_sampler()
        return [batch]

    @property
    def position(self) -> Position:
        if self._yielded == self._start.step:
            return self._start
        return self._start.after(
            self._yielded - 1,
            sampler=self._sampler_state,
            state=None if self._stateful is None else self._stateful.state,
        )

    def leave(self) -> Rows | None:
        return None if self._rows.is_over else self._rows.again()

    def skip_failed(self, error: BaseException) -> bool:
        if self._rows.is_over:  # the sampler raised it
            return False
        self.next_step += 1
        return True

    def close(self, *, is_over: bool = False, has_failed: bool = False, waits: bool = True) -> None:
        pass

    def _state_of_sampler(self) -> Any:
        if isinstance(self._steps, OrderedSteps) or self._rows.items is None:
            return None
        return self._steps.state(self._rows.items, len(self._rows.current))


def _ordered(plan: PlanSpec, steps: OrderedSteps, position: Position, draw: Draw | None) -> Iterator[list[int]]:
    """Yield the rows of each step of an order, from a position on."""
    tasks = steps.tasks(position.epoch, position.step, draw, again=False)
    while block := list(islice(tasks, _BLOCK_STEPS)):
        bounds = [steps.bounds(task) for task in block]
        begin = bounds[0][0]
        rows = plan.order.rows(position.epoch, begin, bounds[-1][1])[1].tolist()
        for start, stop in bounds:
            yield rows[start - begin : stop - begin]


class IterableSource:
    """An IterableDataset, and the workers that are kept from one iteration to the next.

    Args:
        workers: that iterate copies; None for this process.
        in_order: whether workers take turns; else batches come as they are ready.
    """

    def __init__(self, content: IterableContent, workers: Workers | None, *, in_order: bool, pin_memory: bool) -> None:
        self.content = content
        self.has_workers = workers is not None
        self.num_workers = 1 if workers is None else workers.options.num_workers
        self._workers = workers
        self._in_order = in_order
        self._pin_memory = pin_memory
        self._begun: Batches | None = None
        self._kept: tuple[int, DataLoader[Taken]] | None = None
        self._restored: dict[str, Any] | None = None
        self._rest = -1  # steps of a pass that began inside an epoch

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
        if states and not self.has_workers:
            self._restored = states[0]
        return stream, torch_loader(
            stream,
            self._workers,
            base_seed=loop.base_seed,
            in_order=self._in_order,
            pin_memory=self._pin_memory,
        )

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
        if self._workers is not None and self._workers.persistent:
            self._kept = epoch, loader

    def state_before(self) -> tuple[StateGetter, ...]:
        """Return the data set's own state before the first step; () if it has none, or workers iterate copies."""
        if self._workers is not None:
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

    def __init__(self, source: IterableSource, steps: StreamSteps, loop: EpochLoop, counts: TorchCounts) -> None:
        self.position = loop.know(None)
        self.undelivered: list[int] = []
        self.next_step = self.position.step
        self._source = source
        self._begins_at = self.next_step
        self._steps = steps
        self._counts = counts
        self._stream, self._loader = source.open(loop)
        self._batches = iterate(self._loader)
        # Torch's iterator waits for its workers when it is dropped: the collector must not be the one who drops it.
        self._ending = Ending(self, [self._batches].clear) if source.has_workers else None

    def __next__(self) -> list[Any]:
        started = perf_counter()
        try:
            taken = next(self._batches)
            while not taken.num_samples:  # from a worker that waits for its turn (see `BatchStream`)
                if taken.error is not None:
                    raise error_of(taken.error)
                taken = next(self._batches)
        except Exception as error:
            if self._source.has_workers:  # torch's frame has the error as a variable: a cycle would keep the workers
                error.with_traceback(None)
            raise
        self._counts.steps += 1
        self._counts.samples += taken.num_samples
        self._counts.waiting_seconds += perf_counter() - started

        step, source, epoch = self.next_step, self._source, self.position.epoch
        if self._steps.asked_length is not None and step >= self._steps.asked_length:
            _warn_longer(source.content.dataset, self._steps.asked_length, step + 1, source.has_workers)
        batch = taken.batch
        if source.content.takes_step:
            batch = source.content.collated_at(batch, epoch, step)
        here = self._stream.first
        self.position = self.position.after(
            step,
            state=partial(taken.progress, epoch) if here is None else partial(here.state, epoch, taken.steps),
            worker=taken.worker,
            num_workers=source.num_workers,
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
            self._source.keep(self.position.epoch, self._loader)
        if self._ending is not None:
            self._ending.cancel() if waits else self._ending.soon()
        del self._batches, self._loader  # its workers end with it


def _warn_longer(dataset: Any, length: int, count: int, has_workers: bool) -> None:
    """Warn, as torch does, if an iterable yields more batches than its length, once that was asked for."""
    workers = (
        "For multiprocessing data-loading, this could be caused by not properly configuring the "
        "IterableDataset replica at each worker. Please see "
        "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
    )
    warn_user(
        f"Length of IterableDataset {dataset} was reported to be {length} (when accessing "
        f"len(dataloader)), but {count} samples have been fetched. {workers if has_workers else ''}"
    )
