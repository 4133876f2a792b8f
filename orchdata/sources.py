"""What a DataLoader draws from: shards through an index, or a torch map-style data set. Both end in one StepSpec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from orchdata.balance import Balance
from orchdata.balancers import CostModel
from orchdata.buffers import BufferPool
from orchdata.collating import SampleAssembler, map_loader, shard_loader
from orchdata.costs import ArrayCosts, IndexCosts
from orchdata.dataset import ShardDataset
from orchdata.layout import Packed
from orchdata.loaders.cache import CacheFolder
from orchdata.loaders.errors import DataError
from orchdata.loaders.index import Index
from orchdata.loaders.modality import ENCODERS
from orchdata.loaders.order import Order, Shuffle
from orchdata.loaders.shards import OpenShards
from orchdata.packing import PackedAssembler
from orchdata.pages import PageSource
from orchdata.parallel import Rank
from orchdata.plan import PlanSpec
from orchdata.policy import ErrorPolicy
from orchdata.progress import progress_bar
from orchdata.step import Assembler, StepSpec

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, ready to be planned and read.

    Attributes:
        spec: all that a step depends on.
        fingerprint: what a state must agree with, JSON-safe.
        failures: samples known to be bad before anything is decoded; they are out of the order.
        num_samples: samples of an epoch.
        num_indexed: samples of the data set, bad ones included.
        begin_epoch: called with the epoch before its first step.
    """

    spec: StepSpec
    fingerprint: Mapping[str, Any]
    failures: Sequence[DataError]
    num_samples: int
    num_indexed: int
    begin_epoch: Callable[[int], None] = field(default=lambda epoch: None)


def shard_source(
    dataset: ShardDataset,
    *,
    rank: Rank,
    global_batch_size: int,
    shuffle: Shuffle | None,
    seed: int,
    drop_last: bool,
    balance: Balance,
    policy: ErrorPolicy,
    collate_fn: Packed | Callable[[list[Any]], Any] | None,
    pin_memory: bool,
    cost: Any,
    quarantine: Sequence[tuple[str, str]],
) -> Source:
    """Open the index and leave out what cannot be used. Raises as DataLoader says."""
    if cost is not None and not isinstance(cost, CostModel):
        raise ValueError(f"cost for a ShardDataset is an od.CostModel, got {type(cost).__name__}")
    layout = collate_fn if isinstance(collate_fn, Packed) else Packed()
    with progress_bar("indexing") as progress:
        index = dataset.index(num_ranks=rank.size, progress=progress)
    costs = IndexCosts(index, cost, layout.multiple_of)
    _check_phases(costs, dataset)
    quarantined = _quarantined_rows(index, quarantine)
    bad = np.setdiff1d(index.bad_rows(), quarantined)
    if len(bad) and policy.action == "raise":
        first = index.failure(int(bad[0]))
        raise DataError(
            first.shard,
            first.key,
            first.field,
            f"{first.reason} (the first of {len(bad)} bad samples; on_error='skip' leaves them out, quarantine= "
            "names samples to leave out; mended shards are seen after `orchdata index`)",
        )
    excluded = np.union1d(quarantined, bad)
    excluded = np.union1d(excluded, _oversize_rows(index, costs, balance, excluded))
    order = Order(index.num_samples, shuffle=shuffle, seed=seed, excluded=excluded)
    shards = OpenShards(limits=dataset.recipe.limits, cache=CacheFolder())
    assembler: Assembler
    if collate_fn is None or isinstance(collate_fn, Packed):
        pages = PageSource(
            index=index, recipe=dataset.recipe, layout=layout, encoders=costs.phases[:-1], pool=BufferPool()
        )
        assembler = PackedAssembler(source=pages, shards=shards, pin_memory=pin_memory)
    else:
        assembler = SampleAssembler(
            load=shard_loader(index, shards, dataset.recipe),
            collate_fn=collate_fn,
            repeat_first=False,
            pin_memory=pin_memory,
        )
    plan = PlanSpec(
        source=costs,
        order=order,
        balance=balance,
        num_ranks=rank.size,
        global_batch_size=global_batch_size,
        drop_last=drop_last,
    )
    return Source(
        spec=StepSpec(plan=plan, assembler=assembler, rank=rank.rank),
        fingerprint={
            "dataset": index.fingerprint,
            "recipe": dataset.recipe.fingerprint(),
            "order": order.describe(),
            "global_batch_size": global_batch_size,
        },
        failures=_Failures(index, bad),
        num_samples=order.num_samples,
        num_indexed=index.num_samples,
    )


def map_source(
    dataset: Any,
    *,
    sampler: Any,
    batch_sampler: Any,
    rank: Rank,
    global_batch_size: int,
    shuffle: Shuffle | None,
    seed: int,
    drop_last: bool,
    balance: Balance,
    policy: ErrorPolicy,
    collate_fn: Packed | Callable[[list[Any]], Any] | None,
    pin_memory: bool,
    cost: Any,
) -> Source:
    """Serve `dataset[i]` for i below `len(dataset)`, balanced by `cost`. Raises as DataLoader says."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"DataLoader takes a ShardDataset or a map-style data set with __getitem__ and __len__, got "
            f"{type(dataset).__name__}"
        )
    if isinstance(collate_fn, Packed) or isinstance(cost, CostModel):
        raise TypeError("od.Packed and od.CostModel are for a ShardDataset; a map-style data set has its own samples")
    if balance.caps:
        raise ValueError("Balance.max_tokens is for a ShardDataset: a map-style data set gives one batch a step")
    if (sampler is not None or batch_sampler is not None) and rank.size > 1:
        raise ValueError(
            f"sampler and batch_sampler choose samples for one rank, and this loader shares them over {rank.size}: "
            "they would be sharded twice; use shuffle= and seed="
        )
    if sampler is not None and (shuffle is not None or batch_sampler is not None):
        raise ValueError("sampler excludes shuffle and batch_sampler")
    if batch_sampler is not None and (shuffle is not None or drop_last):
        raise ValueError("batch_sampler excludes shuffle and drop_last")
    num_indexed = len(dataset)
    values, failures = _map_costs(dataset, cost, skip_errors=policy.action == "skip")
    order: Order | _SamplerOrder
    if sampler is not None or batch_sampler is not None:
        order = _SamplerOrder(sampler if batch_sampler is None else batch_sampler, batched=batch_sampler is not None)
    else:
        excluded = np.array([int(failure.key) for failure in failures], np.int64)
        order = Order(num_indexed, shuffle=shuffle, seed=seed, excluded=excluded)
    plan = PlanSpec(
        source=ArrayCosts(values),
        order=order,
        balance=balance,
        num_ranks=rank.size,
        global_batch_size=global_batch_size,
        drop_last=drop_last,
    )
    assembler = SampleAssembler(
        load=map_loader(dataset, skip_errors=policy.action == "skip"),
        collate_fn=collate_fn if collate_fn is not None else default_collate,
        repeat_first=True,
        num_rows=num_indexed,
        pin_memory=pin_memory,
    )
    return Source(
        spec=StepSpec(plan=plan, assembler=assembler, rank=rank.rank),
        fingerprint={
            "dataset": {"type": type(dataset).__name__, "num_samples": num_indexed, "costs": _digest(values)},
            "order": order.describe(),
            "global_batch_size": global_batch_size,
        },
        failures=failures,
        num_samples=order.num_samples,
        num_indexed=num_indexed,
        begin_epoch=order.begin_epoch if isinstance(order, _SamplerOrder) else lambda epoch: None,
    )


class _SamplerOrder:
    """The order of a torch sampler, drawn once an epoch; a position is an index, or a whole batch of indices."""

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        self._sampler = sampler
        self._batched = batched
        self._drawn: list[Any] = []
        self.num_samples = len(sampler)

    def begin_epoch(self, epoch: int) -> None:
        self._drawn = list(cast("Iterable[Any]", self._sampler))

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], Ints]:
        drawn = self._drawn[start:stop]
        row = np.array([index for batch in drawn for index in batch] if self._batched else drawn, np.int64)
        return np.zeros(len(row), np.int32), row

    def describe(self) -> dict[str, object]:
        return {"sampler": type(self._sampler).__name__, "num_samples": self.num_samples}


class _Failures(Sequence[DataError]):
    """The failures of bad rows, made one at a time."""

    def __init__(self, index: Index, rows: Ints) -> None:
        self._index = index
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return _Failures(self._index, self._rows[place])
        return self._index.failure(int(self._rows[place]))

    def __iter__(self) -> Iterator[DataError]:
        return (self._index.failure(int(row)) for row in self._rows)


def _check_phases(costs: IndexCosts, dataset: ShardDataset) -> None:
    for phase in costs.balanced:
        if phase in ENCODERS and getattr(dataset.recipe, phase) is None:
            raise ValueError(f"the cost model names phase {phase!r}, but the recipe has no {phase} preprocessor")


def _quarantined_rows(index: Index, quarantine: Sequence[tuple[str, str]]) -> Ints:
    rows = []
    for shard, key in quarantine:
        row = index.find(shard, key)
        if row is None:
            raise ValueError(f"quarantine names sample {key!r} of shard {shard!r}, which the data set does not have")
        rows.append(row)
    return np.unique(np.array(rows, np.int64))


def _oversize_rows(index: Index, costs: IndexCosts, balance: Balance, excluded: Ints) -> Ints:
    """Rows above a cap, to be dropped. Raises ValueError under oversize="error"."""
    for phase in balance.caps:
        if phase not in (*ENCODERS, "llm"):
            raise ValueError(f"Balance.max_tokens names phase {phase!r}; the phases are {', '.join(ENCODERS)} and llm")
    if not balance.caps or balance.oversize == "own":
        return np.zeros(0, np.int64)
    found: list[Ints] = []
    for start in range(0, index.num_samples, 1 << 20):
        row = np.arange(start, min(start + (1 << 20), index.num_samples))
        row = row[~np.isin(row, excluded)]
        for phase, cap in balance.caps.items():
            sizes = costs.positions(phase, np.zeros(len(row), np.int32), row)
            large = row[sizes > cap]
            if len(large) and balance.oversize == "error":
                worst = int(sizes.argmax())
                shard = index.shards[index.shard[row[worst]]].url
                raise ValueError(
                    f"{shard}: sample {index.key(int(row[worst]))!r} has {int(sizes[worst])} {phase} positions, "
                    f"max_tokens allows {cap}; raise it, or use Balance(oversize='own') or 'drop'"
                )
            found.append(large)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))


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
