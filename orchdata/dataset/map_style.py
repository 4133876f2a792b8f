"""A torch map-style data set, prepared: its items, balanced by one integer each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset

from orchdata.balancers import CostModel
from orchdata.building.collate import map_loader
from orchdata.building.spec import MapContent
from orchdata.dataset.options import LoaderOptions, PreparedDataset, refuse_parts
from orchdata.loaders.errors import DataError
from orchdata.notices import warn_once
from orchdata.order.order import Order
from orchdata.order.sampler import SamplerDraws, SamplerOrder
from orchdata.order.steps import StepTask
from orchdata.planning.costs import ArrayCosts
from orchdata.planning.layout import layout_of
from orchdata.planning.make_plan import PlanSpec
from orchdata.ranks.parallel import Rank

Ints = NDArray[np.int64]
StepTasks = Callable[[int], StepTask]


def prepare_map_style(dataset: Any, options: LoaderOptions, *, sampler: Any, batch_sampler: Any) -> PreparedDataset:
    """Serve `dataset[i]` for i below `len(dataset)`, balanced by `cost`. Raises as DataLoader says."""
    _check(dataset, options, sampler, batch_sampler)
    skip_errors = options.policy.action == "skip"
    num_indexed = len(dataset)
    values, failures = _map_costs(dataset, options.cost, skip_errors=skip_errors)
    draws: SamplerDraws | None = None
    order: Order | SamplerOrder
    if sampler is not None or batch_sampler is not None:
        draws = SamplerDraws(sampler if batch_sampler is None else batch_sampler, batched=batch_sampler is not None)
        order = draws.order
    else:
        excluded = np.array([int(failure.key) for failure in failures], np.int64)
        order = Order(num_indexed, shuffle=options.shuffle, seed=options.seed, excluded=excluded)
    content = MapContent(
        dataset=dataset,
        num_rows=num_indexed,
        collate_fn=cast("Any", options.collate_fn),
        batched=options.batched,
        skip_errors=skip_errors,
    )
    spec = options.build_spec(ArrayCosts(values), order, content)
    return PreparedDataset(
        spec=spec,
        fingerprint={
            "dataset": {"type": type(dataset).__name__, "num_samples": num_indexed, "costs": _digest(values)},
            "order": order.describe(),
            "global_batch_size": options.batches.size,
        },
        failures=failures,
        num_indexed=num_indexed,
        epoch_tasks=partial(_epoch_tasks, dataset, spec.plan, draws, num_indexed),
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


def _check(dataset: Any, options: LoaderOptions, sampler: Any, batch_sampler: Any) -> None:
    if isinstance(dataset, (str, bytes, PathLike)):
        raise TypeError(f"DataLoader takes a data set, got the path {dataset!r}: use od.ShardDataset({dataset!r})")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"DataLoader takes a ShardDataset or a map-style data set with __getitem__ and __len__, got "
            f"{type(dataset).__name__}; od.post_balance balances what another loader makes of an iterable"
        )
    if layout_of(options.collate_fn) is not None or isinstance(options.cost, CostModel):
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
    if batch_sampler is not None and (options.shuffle is not None or options.batches.drop_last):
        raise ValueError("batch_sampler excludes shuffle and drop_last")
    if options.batches.drop_last and not options.batched:
        raise ValueError("batch_size=None gives samples one by one: there is no remainder for drop_last to drop")


def _epoch_tasks(dataset: Any, spec: PlanSpec, draws: SamplerDraws | None, num_samples: int, epoch: int) -> StepTasks:
    """step -> its task; a sampler is drawn now, in this process."""
    if len(dataset) != num_samples:
        raise ValueError(
            f"{type(dataset).__name__} had {num_samples} samples when this loader was made and has {len(dataset)} now: "
            "make another loader"
        )
    if draws is None:
        return partial(StepTask, epoch)
    drawn = draws.draw(epoch)
    return lambda step: StepTask(epoch, step, drawn.rows(*spec.batches.bounds(step, len(drawn))))


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
