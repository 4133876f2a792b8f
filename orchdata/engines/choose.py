"""Chooses what builds a loader's steps, by its arguments."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import IterableDataset

from orchdata.balancers.checks import checked_count
from orchdata.engines.choice import DEFAULT_PREFETCH, DEFAULT_THREADS, EngineChoice
from orchdata.engines.engine import EngineRun, OpensEngine, WorkerOptions
from orchdata.engines.processes.engine import Workers, start_server
from orchdata.order.stateful import is_stateful


def choose_engine(
    dataset: Any,
    *,
    in_shards: bool,
    by_torch: bool,
    num_workers: int,
    num_threads: int | None,
    prefetch_factor: int | None,
    persistent_workers: bool,
    timeout: float,
    worker_init_fn: Callable[[int], None] | None,
    multiprocessing_context: Any,
    worker_memory: int | None,
    in_order: bool,
    engine: OpensEngine | None = None,
    num_ranks: int = 1,
) -> EngineChoice:
    """Choose by the arguments of a DataLoader. Raises ValueError for those that would have no effect, as torch does.

    Args:
        dataset: as workers get it in `torch.utils.data.get_worker_info()`.
        in_shards: whether we decode. A map-style data set may not be safe to use from several threads, and its
            randomness follows `torch.manual_seed` in one thread only: it loads inline unless `num_threads` is given.
        by_torch: whether torch's own loader reads the data set.
        engine: of the user's; it gets the options of `num_workers` workers.
        num_ranks: ranks of the loader.
    """
    num_workers = checked_count(num_workers, "num_workers", 0)
    threads = None if num_threads is None else checked_count(num_threads, "num_threads", 0)
    depth = None if prefetch_factor is None else checked_count(prefetch_factor, "prefetch_factor")
    if worker_memory is not None:
        worker_memory = checked_count(worker_memory, "worker_memory")

    for name, given in (("num_threads", threads), ("worker_memory", worker_memory)):
        if by_torch and given:
            raise ValueError(
                f"{name} is for steps that this library builds, and torch's own DataLoader reads an IterableDataset, "
                "and map-style data without costs: leave it out (num_workers=4 reads in four processes). With cost= or "
                "on_error='skip' this library builds the steps of map-style data"
            )

    if not (by_torch or in_shards) and (num_ranks == 1 or engine is not None) and is_stateful(dataset):
        raise ValueError(
            f"{type(dataset).__name__} has a state of its own (state_dict), which is stored where torch's own "
            "DataLoader reads the data: leave out cost=, on_error='skip' and engine=, or make the data set a function "
            "of the index"
        )

    # Workers.
    if num_workers:
        options = WorkerOptions(
            num_workers=num_workers,
            num_threads=threads if threads is not None else DEFAULT_THREADS if in_shards else 0,
            max_jobs=depth or DEFAULT_PREFETCH,
            worker_init_fn=worker_init_fn,
            dataset=dataset,
            memory=worker_memory,
        )
        in_turn = not in_shards and in_order
        if engine is not None:
            _check_given(engine, dataset, multiprocessing_context)
            run = EngineRun(options=options, num_ranks=num_ranks, timeout=timeout, in_turn=in_turn)
            return EngineChoice(num_threads=0, depth=0, given=(engine, run))
        workers = Workers(
            context=_context(multiprocessing_context, in_shards=in_shards),
            options=options,
            timeout=timeout,
            in_turn=in_turn,
            persistent=persistent_workers,
        )
        # A loader that is sent to a new process (mp.spawn) starts the server when it iterates.
        if not getattr(multiprocessing.current_process(), "_inheriting", False):
            start_server(workers.context)
        return EngineChoice(num_threads=0, depth=0, workers=workers)
    if engine is not None:
        raise ValueError(
            f"engine={engine!r} builds steps in workers, and num_workers is 0: pass num_workers=, their number for "
            "each rank, or leave engine out to build steps in this process"
        )

    # This process: inline, or threads.
    if worker_memory is not None:
        raise ValueError("worker_memory is for worker processes: leave it out, or pass num_workers")
    if threads == 0 or (not in_shards and not threads):
        ahead = {"prefetch_factor": prefetch_factor is not None, "persistent_workers": persistent_workers}
        for name in (name for name, given in ({"timeout": timeout} | ahead).items() if given):
            raise ValueError(
                f"{name} needs threads or workers, and this loader builds each batch when it is requested: leave it "
                "out, or pass num_workers"
            )
        return EngineChoice(num_threads=0, depth=0)
    if worker_init_fn is not None:
        raise ValueError(
            "worker_init_fn is for worker processes, and this loader builds with threads of the training process: it "
            "would seed the training process's random state. Leave it out, or pass num_workers"
        )
    return EngineChoice(num_threads=DEFAULT_THREADS if threads is None else threads, depth=depth)


def _check_given(engine: Any, dataset: Any, multiprocessing_context: Any) -> None:
    """Raise TypeError or ValueError if an engine of the user's cannot build the steps of a data set."""
    if not callable(getattr(engine, "open", None)) or isinstance(engine, type):
        raise TypeError(f"engine is a value with a method open(spec, run), such as od.RayEngine(), got {engine!r:.80}")
    if multiprocessing_context is not None:
        raise ValueError("multiprocessing_context is for worker processes of this machine: leave it out, or engine")
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "engine= builds steps that are planned, and an IterableDataset is read by torch's own workers: leave "
            "engine out, or give the data as shards or as a map-style data set"
        )


def _context(given: Any, *, in_shards: bool) -> BaseContext:
    """Return the context that starts workers. For other data than shards, which may not pickle, it is torch's."""
    if isinstance(given, BaseContext):
        return given
    if given is None:
        has_server = in_shards and "forkserver" in multiprocessing.get_all_start_methods()
        given = "forkserver" if has_server else multiprocessing.get_start_method()
    context: BaseContext = multiprocessing.get_context(given)
    return context
