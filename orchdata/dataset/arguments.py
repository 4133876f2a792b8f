"""The arguments of a DataLoader as a value, and the checks of torch's arguments, with torch's errors and messages."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.batch.step_info import StepInfo
from orchdata.dataset.options import (
    DEFAULT_BATCH_SIZE,
    IndexUse,
    LoaderOptions,
    Quarantine,
    as_shuffle,
    batch_sizes,
    checked_index,
    chosen_seed,
    rank_balance,
)
from orchdata.dataset.sharded import is_mixture, is_sharded
from orchdata.delivery.policy import ErrorPolicy, as_policy
from orchdata.engines.choice import EngineChoice
from orchdata.engines.choose import choose_engine
from orchdata.engines.engine import OpensEngine
from orchdata.engines.kernel_families import kernel_families
from orchdata.engines.warm import Warming
from orchdata.loaders.storage.node.cache import Cache
from orchdata.notices import warn_user
from orchdata.order.order import Shuffle
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Packed, Padded, layout_of
from orchdata.ranks.parallel import Rank


class CollateWithStep(Protocol):
    """A function of the user's that makes a batch of samples, and has a parameter named `step`."""

    def __call__(self, samples: Any, /, *, step: StepInfo) -> Any: ...


CollateFn = Packed | Padded | ModelInputs | Callable[[Any], Any] | CollateWithStep
"""Makes a batch of a list of samples; with `batch_size=None` of one item."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of a `DataLoader`, by name: its docstring documents them."""

    dataset: Any
    batch_size: int | None
    shuffle: bool | Shuffle | NDArray[Any] | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: CollateFn | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    num_threads: int | None
    worker_memory: int | None
    global_batch_size: int | None
    global_batch_tokens: int | Sequence[tuple[int, int]] | None
    accumulate: int
    seed: int | None
    cost: CostModel | Callable[[Any], int] | Sequence[int] | None
    cost_id: str | None
    balance: str | Balance
    dp: Any
    on_error: str | ErrorPolicy
    quarantine: Quarantine | None
    index: IndexUse
    cache: Cache | None
    engine: OpensEngine | None

    @property
    def in_shards(self) -> bool:
        """Whether samples are in shards, with an index."""
        return is_sharded(self.dataset)

    def by_torch(self, rank: Rank) -> bool:
        """Whether torch's own loader reads the data set: no step is planned, and none built on other machines."""
        if isinstance(self.dataset, IterableDataset):
            return True
        is_ours = self.in_shards or self.cost is not None or self.engine is not None or bool(rank.check_plan_every)
        return not is_ours and as_policy(self.on_error).action != "skip"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that may be balanced, as far as they are known before the data set is read."""
        if isinstance(self.cost, CostModel):
            return self.cost.phases
        if not is_sharded(self.dataset):
            return ("llm",)
        first = self.dataset.leaves[0].dataset if is_mixture(self.dataset) else self.dataset
        return (*first.recipe.modalities, "llm")

    def attributes(self) -> dict[str, Any]:
        """Return what a loader has as attributes, as torch's loader has them."""
        return {name: getattr(self, name) for name in _ATTRIBUTES}


_ATTRIBUTES = (
    "dataset",
    "drop_last",
    "generator",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "persistent_workers",
    "multiprocessing_context",
    "in_order",
)


def check_combination(arguments: Arguments) -> None:
    """Raise ValueError for arguments of a torch data set that exclude each other."""
    shuffle, sampler, batch_sampler = arguments.shuffle, arguments.sampler, arguments.batch_sampler
    if isinstance(arguments.dataset, IterableDataset):
        for name, given in (("shuffle", shuffle or None), ("sampler", sampler), ("batch_sampler", batch_sampler)):
            if given is not None:
                raise ValueError(
                    f"DataLoader with IterableDataset: expected unspecified {name} option, but got {name}={given}"
                )
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    if batch_sampler is not None:
        # A caller who copies torch's default passes batch_size=1.
        if arguments.batch_size != DEFAULT_BATCH_SIZE or shuffle or sampler is not None or arguments.drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
            )
    elif arguments.batch_size is None and arguments.drop_last:
        raise ValueError(
            "batch_size=None option disables auto-batching and is mutually exclusive with drop_last: there is no "
            "remainder to drop"
        )


def check_cost_id(arguments: Arguments) -> None:
    """Raise TypeError for a name that is no string, and ValueError for a name of costs that no function computes."""
    name = arguments.cost_id
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise TypeError(f"cost_id must be a string that is not empty, got {name!r}")
    if arguments.in_shards or isinstance(arguments.dataset, IterableDataset) or not callable(arguments.cost):
        raise ValueError("cost_id names the costs of a map-style data set that a function given as cost= computes")


def check_workers(arguments: Arguments) -> None:
    """Raise ValueError or TypeError for invalid arguments; warn if there are more processes than cores."""
    num_workers: Any = arguments.num_workers
    timeout: Any = arguments.timeout
    if isinstance(num_workers, int) and num_workers < 0:
        raise ValueError(
            f"num_workers option should be non-negative; use num_workers=0 to disable multiprocessing. "
            f"num_workers must be at least 0, got {num_workers}"
        )
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        raise ValueError(f"timeout is a number of seconds, 0 for no limit, got {timeout!r}")
    if not timeout >= 0:
        raise ValueError(
            f"timeout is a number of seconds, 0 for no limit: timeout option should be non-negative, got {timeout!r}"
        )
    _check_context(arguments.multiprocessing_context, num_workers)
    if arguments.engine is not None:
        return  # its workers may be on other machines
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(num_workers, int) and num_workers > cores:
        warn_user(
            f"This DataLoader will create {num_workers} worker processes, and this process has {cores} cores: "
            "excessive worker creation might get DataLoader running slow or even freeze; lower num_workers"
        )


def _check_context(context: Any, num_workers: Any) -> None:
    if context is None:
        return
    if not num_workers:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got "
            f"num_workers={num_workers}: leave it out, or pass num_workers"
        )
    known = multiprocessing.get_all_start_methods()
    if isinstance(context, str) and context not in known:
        raise ValueError(
            f"multiprocessing_context option should specify a valid start method in {known!r}, but got "
            f"multiprocessing_context={context!r}"
        )
    if not isinstance(context, str | BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={context}"
        )


def engine_choice(arguments: Arguments, rank: Rank, *, in_order: bool) -> EngineChoice:
    """Return what builds steps."""
    return choose_engine(
        arguments.dataset,
        in_shards=arguments.in_shards,
        by_torch=arguments.by_torch(rank),
        num_workers=arguments.num_workers,
        num_threads=arguments.num_threads,
        prefetch_factor=arguments.prefetch_factor,
        persistent_workers=arguments.persistent_workers,
        timeout=arguments.timeout,
        worker_init_fn=arguments.worker_init_fn,
        multiprocessing_context=arguments.multiprocessing_context,
        worker_memory=arguments.worker_memory,
        in_order=in_order,
        engine=arguments.engine,
        num_ranks=rank.size * rank.num_peers,
    )


def options_of(
    arguments: Arguments, rank: Rank, listed: NDArray[np.int64] | None, reaches_all: bool
) -> tuple[int | None, LoaderOptions]:
    """Return the samples of a rank in a step, and the options of steps.

    Args:
        listed: rows in the order of the user's; None: there is none.
        reaches_all: whether ranks can send each other anything.
    """
    in_shards, shuffle = arguments.in_shards, arguments.shuffle
    sizes = arguments.global_batch_size, arguments.global_batch_tokens
    has_batch_sampler = arguments.batch_sampler is not None
    batch_size, batches = batch_sizes(
        arguments.batch_size,
        *sizes,
        num_ranks=rank.size,
        in_shards=in_shards,
        has_batch_sampler=has_batch_sampler,
        drop_last=arguments.drop_last,
        accumulate=arguments.accumulate,
    )
    return batch_size, LoaderOptions(
        rank=rank,
        batches=batches,
        shuffle=as_shuffle(shuffle),
        listed=listed,
        seed=chosen_seed(arguments.seed, arguments.generator),
        drawn=arguments.seed is None and not isinstance(shuffle, Shuffle) and (rank.size == 1 or reaches_all),
        generator=arguments.generator,
        balance=rank_balance(arguments.balance, rank, equal_count=not in_shards),
        policy=as_policy(arguments.on_error),
        collate_fn=arguments.collate_fn,
        index=checked_index(arguments.index),
        batched=batch_size is not None or any(size is not None for size in sizes) or has_batch_sampler,
        cost=arguments.cost,
        by_torch=arguments.by_torch(rank),
        accumulate=int(arguments.accumulate),
        timeout=float(arguments.timeout),
    )


def warming_of(arguments: Arguments, options: LoaderOptions) -> Warming:
    """Begin to compile the kernels that steps need."""
    layout = layout_of(arguments.collate_fn)
    return Warming(
        kernel_families(
            options.balance,
            options.rank.size * options.rank.num_peers,
            phases=arguments.phases,
            padded=isinstance(layout, Padded),
            fixed=getattr(layout, "length", None) is not None and not getattr(layout, "concatenate", False),
            in_shards=arguments.in_shards,
            accumulates=options.accumulate > 1,
        )
    )
