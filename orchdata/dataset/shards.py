"""Shards as a source: open the index, leave out what cannot be used, read and decode rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.building.collate import SampleAssembler, shard_loader
from orchdata.building.media_pages import PageSource
from orchdata.building.memory import BufferPool
from orchdata.building.shard_content import PackedAssembler
from orchdata.building.step import Assembler
from orchdata.dataset.options import Source, SourceOptions, refuse_parts
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.delivery.policy import ErrorPolicy
from orchdata.loaders.errors import DataError
from orchdata.loaders.index.index import Index, content_fingerprint
from orchdata.loaders.modalities.decoders import load_decoders
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.order.order import Order
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import Layout, Packed, Padded, padded_encoders
from orchdata.progress import progress_bar

Ints = NDArray[np.int64]


def shard_source(dataset: ShardDataset, options: SourceOptions, quarantine: Sequence[tuple[str, str]]) -> Source:
    """Open the index and leave out what cannot be used. Raises as DataLoader says."""
    if options.cost is not None and not isinstance(options.cost, CostModel):
        raise ValueError(f"cost for a ShardDataset is an od.CostModel, got {type(options.cost).__name__}")
    layout = options.collate_fn if isinstance(options.collate_fn, Packed | Padded) else Packed()
    _check_caps(options.balance, layout)
    load_decoders()
    index = _open_index(dataset, options)
    costs = IndexCosts(index, options.cost, layout.multiple_of, rectangular=isinstance(layout, Padded))
    quarantined = _quarantined_rows(index, quarantine)
    bad = np.setdiff1d(index.bad_rows(), quarantined)
    _refuse(index, bad, options.policy)
    excluded = np.union1d(quarantined, bad)
    excluded = np.union1d(excluded, _oversize_rows(index, costs, options.balance, excluded))
    order = Order(index.num_samples, shuffle=options.shuffle, seed=options.seed, excluded=excluded)
    shards = OpenShards(limits=dataset.recipe.limits, cache=CacheFolder())
    assembler = _assembler(dataset, options, index, layout, costs.phases[:-1], shards)
    return Source(
        spec=options.step_spec(costs, order, assembler),
        fingerprint={
            "dataset": content_fingerprint(index.shards, ""),
            "recipe": dataset.recipe.describe(),
            "order": order.describe(),
            "global_batch_size": options.global_batch_size,
        },
        failures=_Failures(index, bad),
        num_indexed=index.num_samples,
        num_lost=_warn_of_lost(index) if len(bad) else 0,
        reads=shards.reads,
    )


def _open_index(dataset: ShardDataset, options: SourceOptions) -> Index:
    with progress_bar("indexing") as progress:
        index = dataset.index(num_ranks=options.rank.size, progress=progress)
        if options.rank.size == 1 and options.policy.action == "raise" and index.totals["bad"]:
            # It will be refused, unless shards were mended since: look at them again.
            index = dataset.index(rebuild=True, progress=progress)
    return index


def _assembler(
    dataset: ShardDataset,
    options: SourceOptions,
    index: Index,
    layout: Layout,
    encoders: tuple[str, ...],
    shards: OpenShards,
) -> Assembler:
    if options.collate_fn is None or isinstance(options.collate_fn, Packed | Padded):
        pages = PageSource(index=index, recipe=dataset.recipe, layout=layout, encoders=encoders, pool=BufferPool())
        return PackedAssembler(source=pages, shards=shards, pin_memory=options.pin_memory)
    refuse_parts(options.balance, "a collate_fn gets whole samples")
    return SampleAssembler(
        load=shard_loader(index, shards, dataset.recipe),
        collate_fn=options.collate_fn,
        repeat_first=False,
        pin_memory=options.pin_memory,
    )


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


def _refuse(index: Index, bad: Ints, policy: ErrorPolicy) -> None:
    """Under "raise", do not begin with bad samples in the data set."""
    if not len(bad) or policy.action == "skip":
        return
    first = index.failure(int(bad[0]))
    raise DataError(
        first.shard,
        first.key,
        first.field,
        f"{first.reason} (the first of {len(bad)} bad samples; on_error='skip' leaves them out, quarantine= "
        "names samples to leave out; after mending shards, run `orchdata index` again)",
    )


def _warn_of_lost(index: Index) -> int:
    """How many samples damaged shards hide. A warning where there are such shards: no failure is listed for each."""
    lost = index.lost_samples()
    damaged = [number for number, shard in enumerate(index.shards) if shard.lost_bytes]
    if damaged:
        first = damaged[0]
        reason = index.failure(int(np.intersect1d(index.bad_rows(), index.rows_of(first))[-1])).reason
        warnings.warn(
            f"{len(damaged)} of {len(index.shards)} shards are damaged, and about {int(lost.sum())} of their samples "
            f"lost beside those listed; the first is {index.shards[first].url}: {reason}",
            stacklevel=2,
        )
    return int(lost.sum())


def _check_caps(balance: Balance, layout: Layout) -> None:
    """The plan knows how many positions an encoder gets, not how large the rectangle around its items is."""
    capped = [phase for phase in balance.caps if phase != "llm"]
    if capped and padded_encoders(layout):
        raise ValueError(
            f"Balance.max_tokens caps {', '.join(capped)}, which od.Padded(encoders='padded') would exceed: its "
            "padding is not planned; use encoders='packed', or cap llm alone"
        )


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
        if phase not in (known := (*index.modalities[1:], "llm")):
            raise ValueError(f"Balance.max_tokens names phase {phase!r}; the phases are {', '.join(known)}")
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
                shard = index.shard_of(int(row[worst])).url
                raise ValueError(
                    f"{shard}: sample {index.key(int(row[worst]))!r} has {int(sizes[worst])} {phase} positions, "
                    f"max_tokens allows {cap}; raise it, or use Balance(oversize='own') or 'drop'"
                )
            found.append(large)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
