"""Batches by a user's collate_fn: of samples that are loaded by their rows, or of a map-style data set's items."""

from __future__ import annotations

import contextlib
import errno
import inspect
import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch.utils.data import default_collate, default_convert

from orchdata.building.step import Assembled, Assembler, Memory, Share, Task, kept
from orchdata.loaders.errors import NOT_DATA, DataError, pass_broken_package
from orchdata.loaders.generators import Pass
from orchdata.loaders.locks import lock_of
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.loaders.watch import Watch

Load = Callable[[int], Any]

STOP_ITERATION = "the data set, or collate_fn, raised StopIteration"
"""Message of the error that takes its place: StopIteration would look like the end of the epoch."""

_THREAD_SAFE = (default_collate, default_convert)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """The step of a microbatch, passed to a `collate_fn` that has a parameter named `step`.

    Attributes:
        epoch, step: number of the optimizer step.
        microbatch, num_microbatches: its number among the rank's microbatches of the step, and their count.
        dp_size: data-parallel ranks.
        num_step_samples: of the whole step, over all ranks and microbatches, those that fail included; a piece of a
            long sample counts as a sample.
        loss_tokens: planned loss tokens of the whole step, over all ranks and microbatches; 0 for map-style data,
            with unknown tokens. In a mixture each counts the loss weight of its source.
        loss_scale: factor of a summed loss where gradients are averaged over the data-parallel ranks, as
            `Batch.loss_scale`: dp_size / loss_tokens (1 where there are none), for a sum over loss tokens. For
            map-style data dp_size / num_step_samples, for a sum over samples.
        sources: of a mixture, the name of each sample's source; else empty.
    """

    epoch: int
    step: int
    microbatch: int
    num_microbatches: int
    dp_size: int
    num_step_samples: int
    loss_tokens: float
    loss_scale: float
    sources: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False)
class SampleAssembler:
    """Loads each sample by its row, then hands the list to `collate_fn`: in all steps together, one thread at a time
    calls it, unless it is torch's own. A parameter `step` of it gets a `StepInfo`. A rank of a map-style data set
    without a sample gets the global batch's first one, as torch's DistributedSampler pads; if the whole global batch
    fails, the next row that works.
    """

    loader: Callable[..., Any]  # row -> sample, of shards with its pass; raises DataError for one that cannot be used
    watch: Watch  # records each sample while it is loaded
    refuse: Callable[[int, str], Exception]  # row, why it must not be loaded -> the exception to raise
    collate_fn: Callable[..., Any]
    batched: bool = True  # collate_fn gets a list, not one sample
    num_map_rows: int = 0  # of a map-style data set; 0 for shards: `collate_fn` gets an empty list
    load_many: Callable[[list[int]], Any] | None = None  # rows -> all samples of a microbatch together
    reads: ReadBytes | None = None  # counts the bytes that are read from shards
    seed: int | None = None  # of the generators that decoding of shards draws from
    ahead: Callable[[Iterable[int]], object] | None = None  # begins to read the samples of these rows of shards

    def __post_init__(self) -> None:
        self.takes_step = takes_step(self.collate_fn)

    def begin(self, share: Share) -> SampleAssembly:
        return SampleAssembly(self, share)

    def read_ahead(self, wanted: Iterable[int]) -> object:
        return None if self.ahead is None else self.ahead(wanted)

    def load(self, row: int, of: Pass | None = None) -> Any:
        """Load a sample by its row, as in a pass."""
        load = self.loader if of is None else partial(self.loader, of=of)
        return self.watch.load(row, load, self.refuse)

    def load_alone(self, row: int) -> None:
        self.load(row)


def takes_step(collate_fn: Callable[..., Any]) -> bool:
    """Return whether it has a parameter `step` besides that of the samples, and no value is bound to it yet."""
    bound = collate_fn
    while isinstance(bound, partial):
        if "step" in bound.keywords:
            return False
        bound = bound.func
    try:
        parameters = list(inspect.signature(collate_fn, follow_wrapped=False).parameters.values())
    except (ValueError, TypeError):  # some built-in functions have no signature
        return False
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    by_name += [each for each in parameters[1:] if each.kind is each.POSITIONAL_OR_KEYWORD]  # the first is the samples
    return any(each.name == "step" for each in by_name)


def step_info(epoch: int, step: int, num_samples: int, dp_size: int) -> StepInfo:
    """Return the step of samples whose loss tokens are not known."""
    return StepInfo(
        epoch=epoch,
        step=step,
        microbatch=0,
        num_microbatches=1,
        dp_size=dp_size,
        num_step_samples=num_samples,
        loss_tokens=0,
        loss_scale=dp_size / num_samples,
    )


class SampleAssembly:
    """One microbatch of samples under construction."""

    def __init__(self, assembler: SampleAssembler, share: Share) -> None:
        self._assembler = assembler
        self._share = share
        self._places = share.plan.places(share.rank, share.microbatch)
        self._samples: dict[int, Any] = {}
        self._together: Any = None  # all samples, as the data set's `__getitems__` returned them
        self._failures: dict[int, DataError] = {}
        self._seconds: list[float] = []
        self.num_bytes = 0  # a sample's memory is its own

    def wanted(self) -> Iterable[int]:
        rows: list[int] = self._share.plan.row[self._places].tolist()
        return rows

    def fill(self, memory: Memory) -> list[Task]:
        rows, load_many = self._share.plan.row[self._places].tolist(), self._assembler.load_many
        if load_many is not None and rows:
            return [partial(self._load_many, load_many, rows)]
        return [partial(self._load, index, row) for index, row in enumerate(rows)]

    def finish(self) -> Assembled:
        of, share, plan, options = self._assembler, self._share, self._share.plan, {}
        if not self._samples and self._together is None and of.num_map_rows and len(plan.row):
            self._samples[0] = self._repeated()
        started = time.perf_counter()
        loaded_at = sorted(self._samples)
        if of.takes_step:
            sources = plan.source[self._places[loaded_at]] if plan.sources else ()
            counted = len(plan.row) if of.num_map_rows else plan.global_loss_tokens
            options["step"] = StepInfo(
                epoch=plan.epoch,
                step=plan.step,
                microbatch=share.index,
                num_microbatches=plan.num_microbatches,
                dp_size=plan.num_ranks,
                num_step_samples=len(plan.row),
                loss_tokens=plan.global_loss_tokens,
                loss_scale=plan.num_ranks / (counted or 1),
                sources=tuple(plan.sources[number] for number in sources),
            )
        loaded = [self._samples[index] for index in loaded_at] if self._together is None else self._together
        with contextlib.nullcontext() if of.collate_fn in _THREAD_SAFE else lock_of(of.collate_fn):
            batch = of.collate_fn(loaded if of.batched else loaded[0], **options)
        seconds = {"decoding": sum(self._seconds), "packing": time.perf_counter() - started}
        failures = [self._failures[index] for index in sorted(self._failures)]
        return Assembled(batch, failures, seconds)

    def _repeated(self) -> Any:
        """Return the first sample of the global batch that works, else the next one of the data set."""
        rows, total = self._share.plan.row.tolist(), self._assembler.num_map_rows
        following = ((rows[-1] + distance) % total for distance in range(1, total))
        failure: DataError | None = None
        for row in chain(rows, following):
            try:
                return self._assembler.load(row)
            except DataError as error:
                failure = failure or kept(error)
        assert failure is not None
        raise failure

    def _load(self, index: int, row: int) -> None:
        started = time.perf_counter()
        seed, of = self._assembler.seed, None
        if seed is not None:
            of = self._share.plan.pass_of(int(self._places[index]), seed)
        try:
            self._samples[index] = self._assembler.load(row, of)
        except DataError as failure:
            self._failures[index] = kept(failure)
        else:
            self._seconds.append(time.perf_counter() - started)

    def _load_many(self, load: Callable[[list[int]], Any], rows: list[int]) -> None:
        started = time.perf_counter()
        self._together = load(rows)
        self._seconds.append(time.perf_counter() - started)


# System errors that say nothing about the file: it may be readable later.
_NOT_NOW = frozenset(
    (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
)


@dataclass(frozen=True, kw_only=True)
class MapContent:
    """Batches of a `collate_fn` (default: torch's) from the items of a map-style data set, `num_rows` when the spec was
    made. With `skip_errors` an item that cannot be loaded is a failure, and its exception is not raised.
    """

    dataset: Any
    num_rows: int
    collate_fn: Callable[..., Any] | None
    batched: bool
    skip_errors: bool

    def made(self, items: list[Any], info: StepInfo | None) -> Any:
        """Return the batch of these items; `info` is for a collate_fn that has a parameter `step`."""
        dataset, item = self.dataset, None
        many = self._many
        samples: Any = []
        try:
            if many is not None:
                item, samples = items, many(items)
            else:
                for item in items:
                    samples.append(dataset[item])
        except (Exception, SystemExit) as error:
            error.add_note(self.name_of(item))
            if isinstance(error, StopIteration):
                raise RuntimeError(STOP_ITERATION) from error
            raise
        collate, options = self.collate, {} if info is None else {"step": info}
        try:
            return collate(samples if self.batched else samples[0], **options)
        except StopIteration as error:
            raise RuntimeError(STOP_ITERATION) from error

    @property
    def collate(self) -> Callable[..., Any]:
        """The function that makes a batch of items, or of one item."""
        return self.collate_fn or (default_collate if self.batched else default_convert)

    def open(self, watch: Watch) -> Assembler:
        return SampleAssembler(
            loader=map_loader(self.dataset, skip_errors=self.skip_errors),
            watch=watch,
            refuse=lambda row, why: DataError(type(self.dataset).__name__, str(row), "", f"its worker {why}"),
            load_many=None if self.skip_errors else self._many,
            collate_fn=self.collate,
            batched=self.batched,
            num_map_rows=self.num_rows,
        )

    @property
    def _many(self) -> Callable[[list[int]], Any] | None:
        """The data set's `__getitems__`, which torch calls for all samples of a batch. Its result is for collate_fn."""
        return getattr(self.dataset, "__getitems__", None) if self.batched else None

    def name_of(self, row: Any) -> str:
        return f"item {row!r} of {type(self.dataset).__name__}"


def map_loader(dataset: Any, *, skip_errors: bool) -> Callable[[int], Any]:
    """Return row -> `dataset[row]`. With `skip_errors`, an exception that may be about the data becomes a DataError."""
    if not skip_errors:
        return partial(operator.getitem, dataset)

    def load(row: int) -> Any:
        try:
            return dataset[row]
        except NOT_DATA:
            raise
        except (Exception, SystemExit) as error:
            pass_broken_package(error)
            if isinstance(error, DataError) or getattr(error, "errno", None) in _NOT_NOW:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise DataError(type(dataset).__name__, str(row), "", reason) from error

    return load
