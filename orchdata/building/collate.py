"""Batches by a user's collate_fn: decoded samples of shards, or items of a torch map-style data set."""

from __future__ import annotations

import contextlib
import errno
import inspect
import operator
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import default_collate, default_convert

from orchdata.batch.step_info import StepInfo
from orchdata.building.assembler import Assembled, Share, StatefulSource, Task, kept
from orchdata.building.memory import Memory
from orchdata.building.shortage import out_of_memory
from orchdata.loaders.errors import NOT_DATA, DataError, FieldError, as_field_error, pass_broken_package
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.locks import lock_of
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.watch import Watch
from orchdata.order.stateful import is_stateful, restore_states, states_of

Load = Callable[[int], Any]

# Errors of the system that say nothing about the file they were met in: it may be read another time.
_NOT_NOW = frozenset(
    (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
)
_THREAD_SAFE = (default_collate, default_convert)


class SampleAssembler:
    """Loads each sample by its row, then hands the list to `collate_fn`.

    Args:
        load: row -> sample; raises DataError for one that cannot be used.
        watch: is told of each sample that is loaded.
        refuse: row, why its process is not to load it -> what is raised in place of loading it.
        collate_fn: list of samples -> batch, or one sample -> batch; called by one thread at a time, whichever step
            it is for, unless it is torch's own. One with a parameter `step` gets a `StepInfo` there.
        batched: whether collate_fn gets a list.
        num_map_rows: rows of a map-style data set. A rank without a sample gets the global batch's first one, as
            torch's DistributedSampler pads; where a global batch fails as a whole, the next row that works. 0 for
            shards, where `collate_fn` gets an empty list.
        load_many: rows -> samples, all those of a microbatch at once; None where each is loaded by itself.
        reads: what `load` reads of shards.
    """

    def __init__(
        self,
        *,
        load: Load,
        watch: Watch,
        refuse: Callable[[int, str], Exception],
        collate_fn: Callable[..., Any],
        batched: bool = True,
        num_map_rows: int = 0,
        load_many: Callable[[list[int]], Any] | None = None,
        reads: ReadBytes | None = None,
    ) -> None:
        self._load = load
        self._watch = watch
        self._refuse = refuse
        self.load_many = load_many
        self.num_map_rows = num_map_rows
        self.reads = reads
        self._collate_fn = collate_fn
        self._batched = batched
        self._takes_step = takes_step(collate_fn)

    def begin(self, share: Share) -> SampleAssembly:
        return SampleAssembly(self, share)

    def load(self, row: int) -> Any:
        """A sample by its row."""
        return self._watch.load(row, self._load, self._refuse)

    def load_alone(self, row: int) -> None:
        self.load(row)

    @property
    def stateful(self) -> StatefulSource | None:
        return None

    def collated(self, samples: dict[int, Any], share: Share, together: Any = None) -> Any:
        """What `collate_fn` makes of the samples, by their places in the share, or of all of them `together`."""
        collate, kept = self._collate_fn, sorted(samples)
        options = {"step": self._step_info(share, kept)} if self._takes_step else {}
        loaded = [samples[place] for place in kept] if together is None else together
        with contextlib.nullcontext() if collate in _THREAD_SAFE else lock_of(collate):
            return collate(loaded if self._batched else loaded[0], **options)

    def _step_info(self, share: Share, kept: list[int]) -> StepInfo:
        plan = share.plan
        numbers = plan.source[plan.places(share.rank, share.microbatch)[kept]] if plan.sources else ()
        return StepInfo(
            epoch=plan.epoch,
            step=plan.step,
            microbatch=share.place,
            num_microbatches=plan.num_microbatches,
            dp_size=plan.num_ranks,
            loss_tokens=plan.global_loss_tokens,
            loss_scale=plan.num_ranks / ((len(plan.row) if self.num_map_rows else plan.global_loss_tokens) or 1),
            sources=tuple(plan.sources[number] for number in numbers),
        )


class MapAssembler(SampleAssembler):
    """The items of a map-style data set, which may have a state of its own.

    Args:
        dataset: it.
        others: of SampleAssembler.
    """

    def __init__(self, dataset: Any, **others: Any) -> None:
        super().__init__(**others)
        self._dataset = dataset

    @property
    def stateful(self) -> StatefulSource | None:
        return stateful_source(self._dataset)


class StatefulDataset:
    """A map-style data set that has a state of its own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def state(self) -> dict[str, Any]:
        return states_of(dataset=self._dataset)

    def restore(self, state: Mapping[str, Any]) -> None:
        restore_states(state, dataset=self._dataset)


def stateful_source(dataset: Any) -> StatefulSource | None:
    """What returns and restores the state of a map-style data set, if it has one."""
    return StatefulDataset(dataset) if is_stateful(dataset) else None


def takes_step(collate_fn: Callable[..., Any]) -> bool:
    """Whether it has a parameter `step` beside that of the samples, which nothing is bound to yet."""
    bound = collate_fn
    while isinstance(bound, partial):
        if "step" in bound.keywords:
            return False
        bound = bound.func
    try:
        parameters = list(inspect.signature(collate_fn, follow_wrapped=False).parameters.values())
    except (ValueError, TypeError):  # some built-in functions tell nothing of themselves
        return False
    by_name = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    by_name += [each for each in parameters[1:] if each.kind is each.POSITIONAL_OR_KEYWORD]  # the first is the samples
    return any(each.name == "step" for each in by_name)


class SampleAssembly:
    """One microbatch of samples under construction."""

    def __init__(self, assembler: SampleAssembler, share: Share) -> None:
        self._assembler = assembler
        self._share = share
        self._samples: dict[int, Any] = {}
        self._together: Any = None  # those of the microbatch as a data set gave them at once
        self._failures: dict[int, DataError] = {}
        self._seconds: list[float] = []
        self.num_bytes = 0  # a sample's memory is its own

    def fill(self, memory: Memory) -> list[Task]:
        rows, load_many = self._share.rows.tolist(), self._assembler.load_many
        if load_many is not None and rows:
            return [partial(self._load_many, load_many, rows)]
        return [partial(self._load, place, row) for place, row in enumerate(rows)]

    def finish(self) -> Assembled:
        if not self._samples and self._together is None and self._assembler.num_map_rows and len(self._share.plan.row):
            self._samples[0] = self._repeated()
        started = time.perf_counter()
        batch = self._assembler.collated(self._samples, self._share, self._together)
        seconds = {"decoding": sum(self._seconds), "packing": time.perf_counter() - started}
        failures = [self._failures[place] for place in sorted(self._failures)]
        return Assembled(batch, failures, seconds)

    def _repeated(self) -> Any:
        """The first sample of the global batch that works, else the next one of the data set."""
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

    def _load(self, place: int, row: int) -> None:
        started = time.perf_counter()
        try:
            self._samples[place] = self._assembler.load(row)
        except DataError as failure:
            self._failures[place] = kept(failure)
        else:
            self._seconds.append(time.perf_counter() - started)

    def _load_many(self, load: Callable[[list[int]], Any], rows: list[int]) -> None:
        started = time.perf_counter()
        self._together = load(rows)
        self._seconds.append(time.perf_counter() - started)


def shard_loader(index: Index, shards: OpenShards, recipe_of: Callable[[int], Recipe]) -> Load:
    """row -> decoded `Sample` of an index; `recipe_of` tells by which recipe."""

    def load(row: int) -> Sample:
        stored, recipe = StoredSample(index, shards, row), recipe_of(row)
        try:
            return stored.decode(recipe)
        except FieldError as error:
            raise error.at(stored.shard, stored.key) from error.__cause__
        except MemoryError as error:
            raise out_of_memory(error, index, recipe, np.array([row]), row) from error
        except DataError:
            raise
        except Exception as error:  # whatever its bytes make a decoder raise is the sample's failure
            raise as_field_error(error, "decoded").at(stored.shard, stored.key) from error

    return load


def shard_refusal(index: Index) -> Callable[[int, str], Exception]:
    """Row of an index, reason -> the failure of that sample."""
    return lambda row, reason: DataError(index.shard_of(row).url, index.key(row), "*", f"its worker {reason}")


def map_refusal(dataset: Any, *, skip_errors: bool) -> Callable[[int, str], Exception]:
    """Row of a map-style data set, reason -> the failure of that item, or what torch raises where it ends a worker."""
    name = type(dataset).__name__
    if skip_errors:
        return lambda row, reason: DataError(name, str(row), "", f"its worker {reason}")

    def refused(row: int, reason: str) -> RuntimeError:
        who = "DataLoader" if reason.startswith("timed out") else f"DataLoader worker (pid {os.getpid()})"
        return RuntimeError(f"{who} {reason.replace('was killed', 'is killed')}: item {row} of {name}")

    return refused


def map_loader(dataset: Any, *, skip_errors: bool) -> Load:
    """row -> `dataset[row]`; under `skip_errors` an exception there is a DataError of that row, where it may be about
    its data.
    """
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


def map_many(dataset: Any) -> Callable[[list[int]], Any] | None:
    """rows -> `dataset.__getitems__(rows)`, as torch asks a data set that has it for all samples of a batch: a list of
    them, or whatever the `collate_fn` that gets it takes.
    """
    get = getattr(dataset, "__getitems__", None)
    return get if callable(get) else None
