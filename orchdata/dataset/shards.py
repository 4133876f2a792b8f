"""Shards, prepared: open the index, leave out what cannot be used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.spec import Content, IndexedShards, SampleContent, ShardContent
from orchdata.dataset.options import LoaderOptions, PreparedDataset, refuse_parts
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.delivery.policy import ErrorPolicy
from orchdata.loaders.errors import DataError
from orchdata.loaders.index.index import Index, content_fingerprint
from orchdata.loaders.recipe import Recipe
from orchdata.order.order import Order
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import Layout, Packed, Padded, layout_of, padded_encoders
from orchdata.progress import progress_bar

Ints = NDArray[np.int64]
Quarantine = Sequence[tuple[str, str]] | str | PathLike[str]


def prepare_shards(dataset: ShardDataset, options: LoaderOptions, quarantine: Quarantine | None) -> PreparedDataset:
    """Open the index and leave out what cannot be used. Raises as DataLoader says."""
    if options.cost is not None and not isinstance(options.cost, CostModel):
        raise ValueError(f"cost for a ShardDataset is an od.CostModel, got {type(options.cost).__name__}")
    named = _read_quarantine(quarantine)
    layout = _layout(options)
    check_layout(options.balance, layout)
    index = _open_index(dataset, options)
    costs = IndexCosts(index, options.cost, layout.multiple_of, rectangular=isinstance(layout, Padded))
    if isinstance(options.collate_fn, ModelInputs):
        options.collate_fn.check(dataset.recipe, costs.phases[:-1], options.balance)
    quarantined = _quarantined_rows(index, named)
    bad = np.setdiff1d(index.bad_rows(), quarantined)
    _refuse(index, bad, options.policy)
    excluded = np.union1d(quarantined, bad)
    check_caps(options.balance, index)
    if options.balance.caps and options.balance.oversize != "own":
        above = oversize_rows(costs, options.balance, excluded)
        excluded = np.union1d(excluded, np.concatenate(list(above.values())))
    order = Order(index.num_samples, shuffle=options.shuffle, seed=options.seed, excluded=excluded)
    return PreparedDataset(
        spec=options.build_spec(costs, order, _content(dataset, options, index, costs.phases[:-1])),
        fingerprint={
            "dataset": content_fingerprint(index.shards, ""),
            "recipe": dataset.recipe.describe(),
            "order": order.describe(),
            "global_batch_size": options.batches.size,
        },
        failures=_Failures(index, bad),
        num_indexed=index.num_samples,
        num_lost=_warn_of_lost(index) if len(bad) else 0,
    )


def _open_index(dataset: ShardDataset, options: LoaderOptions) -> Index:
    with progress_bar("indexing") as progress:
        index = dataset.index(num_ranks=options.rank.size, progress=progress)
        if options.rank.size == 1 and options.policy.action == "raise" and index.totals["bad"]:
            # It will be refused, unless shards were mended since: look at them again.
            index = dataset.index(rebuild=True, progress=progress)
    return index


def _content(dataset: ShardDataset, options: LoaderOptions, index: Index, encoders: tuple[str, ...]) -> Content:
    if options.balance.assignment == "per_phase":
        _refuse_placeless(dataset.recipe, encoders)
    shards = IndexedShards(index=index, build_id=index.build_id, recipe=dataset.recipe)
    if not callable(options.collate_fn):
        return ShardContent(shards=shards, layout=_layout(options), encoders=encoders)
    refuse_parts(options.balance, "a collate_fn gets whole samples")
    return SampleContent(shards=shards, collate_fn=options.collate_fn)


def _refuse_placeless(recipe: Recipe, encoders: tuple[str, ...]) -> None:
    """Features travel by their tokens in the sequence, and some modalities have none there."""
    for name in encoders:
        if name in recipe.modalities and not recipe.modalities[name].places:
            raise ValueError(
                f"Balance.assignment='per_phase' sends features to the places of their tokens, and {name} has none "
                "(places=False), as beside an encoder-decoder's text: use assignment='joint'"
            )


def _layout(options: LoaderOptions) -> Layout:
    return layout_of(options.collate_fn) or Packed()


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


def check_layout(balance: Balance, layout: Layout) -> None:
    """The plan knows how many positions an encoder gets, not how large the rectangle around its items is."""
    capped = [phase for phase in balance.caps if phase != "llm"]
    if capped and padded_encoders(layout):
        raise ValueError(
            f"Balance.max_tokens caps {', '.join(capped)}, which od.Padded(encoders='padded') would exceed: its "
            "padding is not planned; use encoders='packed', or cap llm alone"
        )


def _read_quarantine(quarantine: Quarantine | None) -> list[tuple[str, str]]:
    if quarantine is None:
        return []
    if isinstance(quarantine, (str, PathLike)):
        quarantine = list(_quarantine_lines(quarantine))
    for pair in quarantine:
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"quarantine is (shard, key) pairs, got {pair!r}")
    return [(shard, key) for shard, key in quarantine]


def _quarantine_lines(path: str | PathLike[str]) -> Iterator[tuple[str, str]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield row["shard"], row["key"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'quarantine file {path}, line {number}: expected {{"shard": ..., "key": ...}}, got {line[:80]!r}'
                ) from None


def _quarantined_rows(index: Index, quarantine: Sequence[tuple[str, str]]) -> Ints:
    rows = []
    for shard, key in quarantine:
        row = index.find(shard, key)
        if row is None:
            raise ValueError(f"quarantine names sample {key!r} of shard {shard!r}, which the data set does not have")
        rows.append(row)
    return np.unique(np.array(rows, np.int64))


def check_caps(balance: Balance, index: Index) -> None:
    """Raise ValueError for a cap on a phase that the recipe does not have."""
    known = (*index.modalities[1:], "llm")
    for phase in balance.caps:
        if phase not in known:
            raise ValueError(f"Balance.max_tokens names phase {phase!r}; the phases are {', '.join(known)}")


def oversize_rows(costs: IndexCosts, balance: Balance, excluded: Ints) -> dict[str, Ints]:
    """Rows above each cap, by phase, ascending; without those that are excluded already.

    Raises:
        ValueError: there is one under oversize="error".
    """
    index, caps = costs.index, balance.caps
    found: dict[str, list[Ints]] = {phase: [np.zeros(0, np.int64)] for phase in caps}
    largest = dict.fromkeys(caps, (0, -1))  # positions and row
    for start in range(0, index.num_samples, 1 << 20):
        row = np.arange(start, min(start + (1 << 20), index.num_samples))
        row = row[~np.isin(row, excluded)]
        for phase, cap in caps.items():
            sizes = costs.positions(phase, np.zeros(len(row), np.int32), row)
            found[phase].append(row[sizes > cap])
            if len(row) and int(sizes.max()) > largest[phase][0]:
                largest[phase] = int(sizes.max()), int(row[sizes.argmax()])
    above = {phase: np.concatenate(rows) for phase, rows in found.items()}
    for phase, rows in above.items():
        if len(rows) and balance.oversize == "error":
            size, worst = largest[phase]
            raise ValueError(
                f"{index.shard_of(worst).url}: sample {index.key(worst)!r} has {size} {phase} positions, max_tokens "
                f"allows {caps[phase]} (the largest of {len(rows)} samples above it); raise it, or use "
                "Balance(oversize='own') or 'drop'"
            )
    return above
