"""Data sets of torch's, prepared: map-style items, balanced by one integer each, and IterableDatasets."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from orchdata.building.collate import MapContent
from orchdata.dataset.arguments import Arguments, PreparedDataset, is_sharded
from orchdata.dataset.item_costs import ItemCosts, costs_of_items
from orchdata.delivery.policy import Unusable, refuse_above_budget
from orchdata.engines.torch_workers import IterableContent
from orchdata.loaders.errors import DataError
from orchdata.notices import progress_bar, warn_once
from orchdata.order.order import Order, Shuffle
from orchdata.order.sampler import AllRanksSampler, SamplerOrder, SamplerSteps, Source, TorchSampler
from orchdata.order.steps import GlobalBatches, OrderedSteps, Steps, StreamSteps
from orchdata.planning.make_plan import ArrayCosts, EqualCosts
from orchdata.ranks.parallel import Rank

Ints = NDArray[np.int64]


def prepare_map_style(arguments: Arguments) -> PreparedDataset:
    """Prepare `dataset[i]` for i below `len(dataset)`, balanced by `cost`. Raises as DataLoader documents."""
    dataset, sampler, batch_sampler = arguments.dataset, arguments.sampler, arguments.batch_sampler
    rank, batched = arguments.rank, arguments.batched
    _check(arguments)
    num_indexed = len(dataset) if hasattr(dataset, "__len__") else 0
    values, failures = _map_costs(arguments)
    refuse_above_budget([Unusable(failures, 0, num_indexed)], arguments.on_error)
    usable: Ints | None = None
    if failures and sampler is None and batch_sampler is None:
        usable = np.delete(np.arange(num_indexed), [int(failure.key) for failure in failures])
    batches = arguments.batches
    # Torch's generator, or `generator`, shuffles where there is no seed.
    is_plain = arguments.seed is None and not isinstance(arguments.shuffle, Shuffle)
    is_drawn = is_plain and (rank.size == 1 or arguments.reaches_all)
    order: Order | SamplerOrder
    steps: Steps
    if sampler is None and batch_sampler is None and arguments.shuffled is not None and not is_drawn:
        # A seeded order, as of shards.
        excluded = None if usable is None else np.setdiff1d(np.arange(num_indexed), usable)
        order = Order(num_indexed, shuffle=arguments.shuffled, seed=arguments.order_seed, excluded=excluded)
        check = partial(_check_size, dataset, num_indexed)
        steps = OrderedSteps(batches=batches, order=order, check=check)
    else:
        # A sampler: the user's, or the one that torch's loader would create.
        if sampler is None and batch_sampler is None:
            data = dataset if usable is None else range(len(usable))
            shuffled = arguments.shuffled is not None
            sampler = RandomSampler(data, generator=arguments.generator) if shuffled else SequentialSampler(data)
        chosen = sampler if batch_sampler is None else batch_sampler
        is_single = rank.size == 1
        if is_single and batch_sampler is None and batched:
            batch_sampler = BatchSampler(sampler, batches.size, batches.drop_last)
        elif is_single and batch_sampler is not None:
            sampler = SequentialSampler(dataset)
        source, size = _source(sampler, batch_sampler, dataset, rank)
        if size:
            batches = GlobalBatches(size=size * rank.size, drop_last=batch_sampler.drop_last)
            sampler = batch_sampler.sampler
        steps = SamplerSteps(
            source,
            batched=batch_sampler is not None and not size,
            batches=batches,
            usable=usable,
            integers=values is not None or not is_single,
            as_drawn=is_single and arguments.by_torch,
        )
        order = SamplerOrder.of(chosen if is_single else source.sampler, chosen if is_single else source)
    content = MapContent(
        dataset=dataset,
        num_rows=num_indexed,
        collate_fn=cast("Any", arguments.collate_fn),
        batched=batched,
        skip_errors=arguments.on_error.action == "skip",
    )
    costs = EqualCosts() if values is None else ArrayCosts(values)
    if arguments.dp is None and arguments.sampler is None and arguments.batch_sampler is None:
        _warn_shared(dataset, rank)
    return PreparedDataset(
        collate_fn=default_collate if batched else default_convert,
        spec=arguments.build_spec(costs, order, batches, content),
        fingerprint={
            "dataset": {
                "type": type(dataset).__name__,
                "num_samples": num_indexed,
                "costs": None if values is None else hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest(),
            },
            "order": order.describe(),
            **batches.describe(),
        },
        failures=failures,
        num_indexed=num_indexed,
        torch_steps=steps,
        sampler=sampler,
        batch_sampler=batch_sampler,
    )


def prepare_iterable(arguments: Arguments) -> PreparedDataset:
    """Prepare an IterableDataset, on one rank."""
    dataset, batches, batched = arguments.dataset, arguments.batches, arguments.batched
    name = type(dataset).__name__
    content = IterableContent(
        dataset=dataset,
        batch_size=batches.size if batched else None,
        drop_last=batches.drop_last,
        collate_fn=cast("Any", arguments.collate_fn),
    )
    order = SamplerOrder(sampler=name, num_samples=sys.maxsize)
    return PreparedDataset(
        collate_fn=default_collate if batched else default_convert,
        spec=arguments.build_spec(EqualCosts(), order, batches, content),
        fingerprint={"dataset": {"type": name}, **batches.describe()},
        failures=[],
        num_indexed=0,
        torch_steps=StreamSteps(length=partial(len, dataset), batches=batches),
    )


def _warn_shared(dataset: Any, rank: Rank) -> None:
    """Warn once, on rank 0, that a map-style data set is split over ranks although `dp` was not passed."""
    if rank.size == 1 or rank.rank:
        return
    size, ranks, split = len(dataset), rank.size, ""
    if isinstance(dataset, Subset):
        whole = len(cast("Any", dataset.dataset))
        if abs(size * ranks - whole) < ranks:
            split = f" (this Subset has {size} of {whole} samples, and seems to be)"
    warn_once(
        "samples are shared",
        f"the {size} samples of {type(dataset).__name__} are shared over {ranks} ranks: each gets about 1 in {ranks}. "
        "For an evaluation that every rank, or only one, does in full, and for data that are already split by rank"
        f"{split}, pass dp=(0, 1); to share them without this warning, dp=torch.distributed.group.WORLD",
    )


def _check(arguments: Arguments) -> None:
    """Raise TypeError for what is no map-style data set, and for torch's wrappers of a ShardDataset: nothing would be
    balanced, or read by shards.
    """
    dataset = arguments.dataset
    parts = [dataset.dataset] if isinstance(dataset, Subset) else getattr(dataset, "datasets", ())
    if isinstance(dataset, Subset | ConcatDataset) and any(map(is_sharded, parts)):
        way_out = (
            "dataset[:1000], dataset.take(1000), dataset.select(numbers) or dataset.split('train', 0.9)"
            if isinstance(dataset, Subset)
            else "od.ShardDataset([*paths, *other_paths]), or od.Mixture for shares of each"
        )
        raise TypeError(
            f"a {type(dataset).__name__} of a ShardDataset would be map-style data, decoded one by one and without "
            f"token costs: use {way_out}"
        )
    if isinstance(dataset, (str, bytes, PathLike)):
        raise TypeError(f"DataLoader takes a data set, got the path {dataset!r}: use od.ShardDataset({dataset!r})")
    if isinstance(dataset, type):
        raise TypeError(f"DataLoader takes a data set, got the class {dataset.__name__}: create one")
    # No length is needed if only the user's sampler knows the items.
    samplers = (arguments.sampler, arguments.batch_sampler)
    chosen = arguments.rank.size == 1 and arguments.cost is None and samplers != (None, None)
    has_items = hasattr(dataset, "__getitem__") or (arguments.batched and hasattr(dataset, "__getitems__"))
    if not has_items or not (chosen or hasattr(dataset, "__len__")):
        raise TypeError(
            f"DataLoader takes a ShardDataset, a map-style data set with __getitem__ and __len__, or a torch "
            f"IterableDataset, got {type(dataset).__name__}; od.post_balance balances batches of another loader, such "
            "as one over an iterable"
        )


def _check_size(dataset: Any, num_samples: int) -> None:
    if len(dataset) != num_samples:
        raise ValueError(
            f"{type(dataset).__name__} had {num_samples} samples when this loader was created and has {len(dataset)} "
            "now: create another loader"
        )


def _source(sampler: Any, batch_sampler: Any, dataset: Any, rank: Rank) -> tuple[Source, int]:
    """Return what draws the samples of all ranks, and the samples per rank and step of a batch sampler, else 0."""
    if rank.size == 1:
        return TorchSampler(sampler if batch_sampler is None else batch_sampler), 0
    size = 0
    if type(batch_sampler) is BatchSampler:
        sampler, size = batch_sampler.sampler, batch_sampler.batch_size
    elif (
        batch_sampler is None and type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset
    ):
        return TorchSampler(sampler), 0
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise ValueError(
            "sampler and batch_sampler choose samples for one rank, and this loader shares them over "
            f"{rank.size}: they would be sharded twice; use shuffle= and seed="
        )
    matching = {
        "num_replicas": (sampler.num_replicas, rank.size),
        "rank": (sampler.rank, rank.rank),
        "dataset": (sampler.dataset, dataset),
    }
    for name, (theirs, ours) in matching.items():
        if theirs is not ours and (name == "dataset" or theirs != ours):
            other = "another data set" if name == "dataset" else f"{name}={theirs}, and this loader's is {ours}"
            raise ValueError(
                f"the DistributedSampler has {other}: create it with this loader's ranks and data, or leave it out: "
                "the loader splits samples over ranks itself (shuffle=, seed=, drop_last=)"
            )
    return AllRanksSampler(sampler), size


def _map_costs(arguments: Arguments) -> tuple[Ints | None, list[DataError]]:
    """Return one integer per sample, None if all are equal. A callable is called once for each loaded sample."""
    dataset, cost, rank = arguments.dataset, arguments.cost, arguments.rank
    if callable(cost):
        items = ItemCosts(dataset, cost, arguments.on_error.action == "skip")
        with progress_bar("costs of items") as bar:
            progress = bar if rank.rank == 0 else None
            return costs_of_items(items, arguments.cost_id, arguments.workers(), progress, is_shared=rank.size > 1)
    if cost is None:
        return None, []
    num_samples = len(dataset)
    values = np.asarray(cost) if num_samples else np.zeros(0, np.int64)
    if values.shape != (num_samples,):
        raise ValueError(f"cost must be one integer per sample, {num_samples} of them; got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"costs are integers, got {values.dtype}; scale and round them")
    if num_samples and int(values.min()) < 0:
        raise ValueError(f"costs are at least 0, sample {int(values.argmin())} has {int(values.min())}")
    return values.astype(np.int64), []
