"""A torch map-style data set as a source: its items, balanced by one integer each."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from functools import partial
from os import PathLike
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset, default_collate, default_convert

from orchdata.balancers import CostModel
from orchdata.building.collate import SampleAssembler, map_loader, map_many
from orchdata.dataset.options import Source, SourceOptions, refuse_parts
from orchdata.loaders.errors import DataError
from orchdata.notices import warn_once
from orchdata.order.order import Order
from orchdata.planning.costs import ArrayCosts
from orchdata.planning.layout import Packed, Padded
from orchdata.ranks.parallel import Rank

Ints = NDArray[np.int64]


def map_source(dataset: Any, options: SourceOptions, *, sampler: Any, batch_sampler: Any) -> Source:
    """Serve `dataset[i]` for i below `len(dataset)`, balanced by `cost`. Raises as DataLoader says."""
    _check(dataset, options, sampler, batch_sampler)
    skip_errors = options.policy.action == "skip"
    num_indexed = len(dataset)
    values, failures = _map_costs(dataset, options.cost, skip_errors=skip_errors)
    order: Order | _SamplerOrder
    if sampler is not None or batch_sampler is not None:
        order = _SamplerOrder(sampler if batch_sampler is None else batch_sampler, batched=batch_sampler is not None)
    else:
        excluded = np.array([int(failure.key) for failure in failures], np.int64)
        order = Order(num_indexed, shuffle=options.shuffle, seed=options.seed, excluded=excluded)
    assembler = SampleAssembler(
        load=map_loader(dataset, skip_errors=skip_errors),
        collate_fn=cast("Any", options.collate_fn) or (default_collate if options.batched else default_convert),
        repeat_first=True,
        batched=options.batched,
        num_rows=num_indexed,
        load_many=map_many(dataset) if options.batched and not skip_errors else None,
        pin_memory=options.pin_memory,
    )
    return Source(
        spec=options.step_spec(ArrayCosts(values), order, assembler),
        fingerprint={
            "dataset": {"type": type(dataset).__name__, "num_samples": num_indexed, "costs": _digest(values)},
            "order": order.describe(),
            "global_batch_size": options.global_batch_size,
        },
        failures=failures,
        num_indexed=num_indexed,
        begin_epoch=partial(_begin_epoch, dataset, num_indexed, order),
    )


def say_shared(dataset: Any, rank: Rank) -> None:
    """Tell once, on rank 0, that a map-style data set is shared out over ranks, where nobody has asked for it."""
    if rank.size == 1 or rank.rank:
        return
    size, ranks, split = len(dataset), rank.size, ""
    if isinstance(dataset, Subset):
        whole = len(cast("Any", dataset.dataset))
        if abs(size * ranks - whole) < ranks:
            split = f" (this Subset has {size} of {whole} samples, and looks so)"
    warn_once(
        "samples are shared",
        f"the {size} samples of {type(dataset).__name__} are shared over {ranks} ranks: each gets about 1 in {ranks}. "
        "For an evaluation that every rank, or one alone, does in full, and for data that are split by rank already"
        f"{split}, pass dp=(0, 1); to share them and not be told, dp=torch.distributed.group.WORLD",
    )


def _check(dataset: Any, options: SourceOptions, sampler: Any, batch_sampler: Any) -> None:
    if isinstance(dataset, (str, bytes, PathLike)):
        raise TypeError(f"DataLoader takes a data set, got the path {dataset!r}: use od.ShardDataset({dataset!r})")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"DataLoader takes a ShardDataset or a map-style data set with __getitem__ and __len__, got "
            f"{type(dataset).__name__}; od.post_balance balances what another loader makes of an iterable"
        )
    if isinstance(options.collate_fn, Packed | Padded) or isinstance(options.cost, CostModel):
        raise TypeError("Packed, Padded and CostModel are for a ShardDataset; a map-style data set has its own samples")
    refuse_parts(options.balance, "the items of a map-style data set are whole")
    if options.balance.caps:
        raise ValueError("Balance.max_tokens is for a ShardDataset: a map-style data set gives one batch a step")
    if (sampler is not None or batch_sampler is not None) and options.rank.size > 1:
        raise ValueError(
            "sampler and batch_sampler choose samples for one rank, and this loader shares them over "
            f"{options.rank.size}: they would be sharded twice; use shuffle= and seed="
        )
    if sampler is not None and (options.shuffle is not None or batch_sampler is not None):
        raise ValueError("sampler excludes shuffle and batch_sampler")
    if batch_sampler is not None and (options.shuffle is not None or options.drop_last):
        raise ValueError("batch_sampler excludes shuffle and drop_last")
    if options.drop_last and not options.batched:
        raise ValueError("batch_size=None gives samples one by one: there is no remainder for drop_last to drop")


def _begin_epoch(dataset: Any, num_samples: int, order: Order | _SamplerOrder, epoch: int) -> object:
    if len(dataset) != num_samples:
        raise ValueError(
            f"{type(dataset).__name__} had {num_samples} samples when this loader was made and has {len(dataset)} now: "
            "make another loader"
        )
    return order.begin_epoch(epoch) if isinstance(order, _SamplerOrder) else None


class _Drawn(list[Any]):
    """What a sampler gave for an epoch."""


class _SamplerOrder:
    """The order of a torch sampler, drawn once an epoch; a position is an index, or a whole batch of indices.

    An epoch's draw lives as long as an iteration is in it, and the last one's after that: who goes on in an epoch
    after an error goes on in the same sequence.
    """

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        self._sampler = sampler
        self._batched = batched
        self._drawn: WeakValueDictionary[int, _Drawn] = WeakValueDictionary()
        self._last = _Drawn()
        if not hasattr(sampler, "__len__"):
            raise TypeError(
                f"{'batch_sampler' if batched else 'sampler'} has no len(), which counts the steps of an epoch: "
                f"give {type(sampler).__name__} a __len__, or list(sampler) for one draw"
            )
        self.num_samples = len(sampler)

    def begin_epoch(self, epoch: int) -> _Drawn:
        drawn = self._drawn.get(epoch)
        if drawn is None:
            items = cast("Iterable[Any]", self._sampler)
            drawn = _Drawn(list(item) for item in items) if self._batched else _Drawn(items)
            if len(drawn) != self.num_samples:
                raise ValueError(
                    f"{type(self._sampler).__name__} gave {len(drawn)} items for epoch {epoch}, and its len() was "
                    f"{self.num_samples}: an epoch has as many steps as that says"
                )
            self._drawn[epoch] = drawn
        self._last = drawn
        return drawn

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        drawn = self._drawn[epoch][start:stop]
        row = np.array([_index(item) for batch in drawn for item in (batch if self._batched else [batch])], np.int64)
        return np.zeros(len(row), np.int32), row

    def describe(self) -> dict[str, object]:
        return {"sampler": type(self._sampler).__name__, "num_samples": self.num_samples}


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise TypeError(f"a sampler gives indices, integers from 0 to len(dataset) - 1; got {item!r}") from None


def _map_costs(dataset: Any, cost: Any, *, skip_errors: bool) -> tuple[Ints, list[DataError]]:
    """One integer per sample; a callable is asked once for each, which loads every sample once."""
    num_samples = len(dataset)
    failures: list[DataError] = []
    if cost is None:
        return np.ones(num_samples, np.int64), failures
    if not callable(cost):
        values = np.asarray(cost) if num_samples else np.zeros(0, np.int64)
    else:
        load = map_loader(dataset, skip_errors=skip_errors)
        listed: list[Any] = []
        for row in range(num_samples):
            try:
                listed.append(cost(load(row)))
            except DataError as failure:
                if not skip_errors:
                    raise
                failures.append(failure)
                listed.append(0)
        values = np.asarray(listed if listed else np.zeros(0, np.int64))
    if values.shape != (num_samples,):
        raise ValueError(f"cost must be one integer per sample, {num_samples} of them; got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"costs are integers, got {values.dtype}; scale and round them")
    if num_samples and int(values.min()) < 0:
        raise ValueError(f"costs are at least 0, sample {int(values.argmin())} has {int(values.min())}")
    return values.astype(np.int64), failures


def _digest(values: Ints) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()
