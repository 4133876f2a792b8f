"""A torch IterableDataset, prepared: one rank iterates it, as torch's loader does.

Each process that builds steps iterates a copy of its own, from the first step it is asked for: worker k of n knows by
`get_worker_info` which share is its, and its batches are those that its copy gives.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

from torch.utils.data import default_collate, default_convert

from orchdata.building.assembler import Assembled, EndOfData, Share, Task
from orchdata.building.collate import SampleAssembler, map_refusal
from orchdata.building.memory import Memory
from orchdata.dataset.options import LoaderOptions, PreparedDataset, refuse_parts
from orchdata.loaders.watch import Watch
from orchdata.order.sampler import SamplerOrder
from orchdata.order.stateful import exhaust, give_back, held_by, is_place
from orchdata.order.steps import EndlessEpochs
from orchdata.planning.costs import EqualCosts


@dataclass(frozen=True, kw_only=True)
class IterableContent:
    """What a `collate_fn`, by default torch's, makes of what an IterableDataset gives.

    Attributes:
        batch_size: samples of a batch; None hands them to collate_fn one by one.
        drop_last: whether a last batch that is smaller is dropped: of each copy.
    """

    dataset: Any
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[..., Any] | None

    def open(self, watch: Watch) -> IterableAssembler:
        """A copy's batches, one iteration of it long."""
        return IterableAssembler(self, watch)

    def name_of(self, row: int) -> str:
        return f"an item of {type(self.dataset).__name__}"


class IterableAssembler(SampleAssembler):
    """The batches of one iteration of the data set an epoch, in its order; each step takes the next one."""

    def __init__(self, content: IterableContent, watch: Watch) -> None:
        batched = content.batch_size is not None
        collate = content.collate_fn or (default_collate if batched else default_convert)
        super().__init__(
            load=_no_rows,
            watch=watch,
            refuse=map_refusal(content.dataset, skip_errors=False),
            collate_fn=collate,
            batched=batched,
            num_map_rows=1,
        )
        self._content = content
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._taken = 0  # batches
        self._epoch: int | None = None

    def begin(self, share: Share) -> IterableAssembly:  # type: ignore[override]
        if self._epoch not in (None, share.plan.epoch):
            self._begin_anew()
        self._epoch = share.plan.epoch
        return IterableAssembly(self, share)

    @property
    def restores(self) -> IterableAssembler:
        return self

    def held(self) -> dict[str, Any]:
        dataset, items = self._content.dataset, self._iterator()
        owners = {"iterator": items} if items is dataset else {"dataset": dataset, "iterator": items}
        place = {"epoch": self._epoch, "steps": self._taken, "ended": self._ended}
        return place | held_by(**owners)

    def restore(self, held: Mapping[str, Any], epoch: int) -> None:
        if is_place(held):
            return
        give_back(held, dataset=self._content.dataset)
        self._taken, self._ended = held["steps"], held["ended"]
        if "iterator" in held or not self._ended:
            give_back(held, iterator=self._iterator())
        if held["epoch"] not in (None, epoch):
            if not self._ended:
                exhaust(self._iterator())  # it had given its last item, and not said yet that there is none
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._items, self._ended, self._taken = None, False, 0

    def _iterator(self) -> Iterator[Any]:
        if self._items is None:
            self._items = iter(self._content.dataset)
        return self._items

    def take(self) -> list[Any]:
        """The samples of the next batch. Raises EndOfData, and what the data set does."""
        if self._ended:
            raise EndOfData
        size, items = self._content.batch_size or 1, self._iterator()
        samples: list[Any] = []
        with contextlib.suppress(StopIteration):
            while len(samples) < size:
                samples.append(next(items))  # and not islice: one that is the data set may begin anew at each iter()
        self._ended = len(samples) < size
        if not samples or (self._ended and self._content.drop_last):
            raise EndOfData
        self._taken += 1
        return samples


class IterableAssembly:
    """The next batch, under construction."""

    num_bytes = 0

    def __init__(self, assembler: IterableAssembler, share: Share) -> None:
        self._assembler = assembler
        self._share = share
        self._samples: list[Any] = []
        self._seconds = 0.0

    def fill(self, memory: Memory) -> list[Task]:
        return [self._take]

    def finish(self) -> Assembled:
        started = time.perf_counter()
        batch = self._assembler.collated(dict(enumerate(self._samples)), self._share)
        return Assembled(batch, [], {"decoding": self._seconds, "packing": time.perf_counter() - started})

    def _take(self) -> None:
        started = time.perf_counter()
        self._samples = self._assembler.take()
        self._seconds = time.perf_counter() - started


def prepare_iterable(dataset: Any, options: LoaderOptions) -> PreparedDataset:
    """Serve what iterating `dataset` gives, on one rank. Raises as DataLoader says."""
    name = type(dataset).__name__
    if options.rank.size > 1:
        raise ValueError(
            f"{name} is an IterableDataset, and this loader's samples are shared by {options.rank.size} ranks: nobody "
            "knows which of its samples are whose. Shards: od.ShardDataset reads them, balanced and resumable. Any "
            "other: od.post_balance(loader) balances what each rank's own loader gives; a loader of this rank alone, "
            "whose data set splits itself by rank, is made with dp=(0, 1)"
        )
    if options.cost is not None:
        raise ValueError("cost shares samples out over ranks; an IterableDataset is read by one: leave it out")
    if options.policy.action == "skip":
        raise ValueError(
            "on_error='skip' goes on with the next sample, and an IterableDataset that raised has none: skip in its "
            "__iter__"
        )
    refuse_parts(options.balance, "the items of an IterableDataset are whole")
    batches = options.sample_batches
    content = IterableContent(
        dataset=dataset,
        batch_size=batches.size if options.batched else None,
        drop_last=batches.drop_last,
        collate_fn=cast("Any", options.collate_fn),
    )
    order = SamplerOrder(sampler=name, num_samples=sys.maxsize)
    return PreparedDataset(
        collate_fn=default_collate if options.batched else default_convert,
        spec=options.build_spec(EqualCosts(), order, batches, content),
        fingerprint={"dataset": {"type": name}, **batches.describe()},
        failures=[],
        num_indexed=0,
        epochs=EndlessEpochs(length=partial(len, dataset), batches=batches),
        iterated=True,
    )


def say_longer(dataset: Any, told: int, count: int, num_workers: int) -> None:
    """Warn, as torch does, where an iterable gives more batches than its length, once that was asked for."""
    workers = (
        "For multiprocessing data-loading, this could be caused by not properly configuring the "
        "IterableDataset replica at each worker. Please see "
        "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
    )
    warnings.warn(
        f"Length of IterableDataset {dataset} was reported to be {told} (when accessing "
        f"len(dataloader)), but {count} samples have been fetched. {workers if num_workers else ''}",
        stacklevel=5,
    )


def _no_rows(row: int) -> NoReturn:
    raise TypeError(f"an IterableDataset has no row {row}")
