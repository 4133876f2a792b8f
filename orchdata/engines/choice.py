"""Chooses what builds a loader's steps: worker processes, threads of this process, or the thread that iterates."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import IterableDataset

from orchdata.balancers.checks import checked_count
from orchdata.building.map_items import stateful_source
from orchdata.building.spec import BuildSpec
from orchdata.building.step import Builder
from orchdata.engines.engine import Engine, EngineRun, InlineEngine, OpensEngine, WorkerOptions
from orchdata.engines.processes.engine import ProcessEngine, Workers, start_server
from orchdata.engines.threads import ThreadEngine

DEFAULT_THREADS = 4
DEFAULT_PREFETCH = 2
FAR_PREFETCH = 4
"""With threads that read object storage: two steps wait for answers while two are built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """What builds steps, and how many it builds ahead.

    Attributes:
        num_threads: threads of this process; 0 for none.
        depth: steps under way in these threads; None for the default.
        workers: worker processes; None for none.
        given: the user's `engine=`, and what it is opened with; None for none.
    """

    num_threads: int
    depth: int | None
    workers: Workers | None = None
    given: tuple[OpensEngine, EngineRun] | None = None

    @property
    def is_inline(self) -> bool:
        """Whether the thread that iterates builds each step when it is requested."""
        return self.workers is None and self.given is None and not self.num_threads

    @property
    def forks(self) -> bool:
        """Whether worker processes are forked from this one."""
        return self.workers is not None and self.workers.context.get_start_method() == "fork"

    @property
    def wants_kernels(self) -> bool:
        """Whether this process must load kernels: it calls them, or forks processes that would each load them."""
        return (self.workers is None and self.given is None) or self.forks

    def make(
        self,
        spec: BuildSpec,
        builder: Builder,
        *,
        base_seed: int,
        known_bad_rows: dict[int, str],
        states: Sequence[dict[str, Any] | None] = (),
    ) -> Engine:
        """Return the engine that builds the steps of `spec`.

        Args:
            builder: of the spec, in this process.
            base_seed: of the random states of worker processes.
            known_bad_rows: row -> why it must not be loaded; worker processes add to it.
            states: for each worker, the state that its data set starts with; None for its own.
        """
        if self.given is not None:
            engine, run = self.given
            filled = replace(
                run,
                base_seed=base_seed,
                reads=builder.reads,
                name_of=spec.content.name_of,
                known_bad_rows=known_bad_rows,
                states=states,
            )
            return engine.open(spec, filled)
        if self.workers is not None:
            return ProcessEngine(
                spec,
                self.workers,
                base_seed=base_seed,
                reads=builder.reads,
                name_of=spec.content.name_of,
                known_bad_rows=known_bad_rows,
                states=states,
            )
        if not self.num_threads:
            return InlineEngine(builder, states)
        depth = self.depth or (FAR_PREFETCH if spec.reads_far else DEFAULT_PREFETCH)
        return ThreadEngine(builder, num_threads=self.num_threads, depth=depth)


def choose_engine(
    dataset: Any,
    *,
    in_shards: bool,
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
        engine: of the user's; it gets the options of `num_workers` workers.
        num_ranks: ranks of the loader.
    """
    num_workers = checked_count(num_workers, "num_workers", 0)
    iterated = isinstance(dataset, IterableDataset)
    threads = None if num_threads is None else checked_count(num_threads, "num_threads", 0)
    depth = None if prefetch_factor is None else checked_count(prefetch_factor, "prefetch_factor")
    if worker_memory is not None:
        worker_memory = checked_count(worker_memory, "worker_memory")

    # Workers.
    if num_workers:
        options = WorkerOptions(
            num_workers=num_workers,
            num_threads=0 if iterated else threads if threads is not None else DEFAULT_THREADS if in_shards else 0,
            max_jobs=depth or DEFAULT_PREFETCH,
            worker_init_fn=worker_init_fn,
            dataset=dataset,
            as_torch=not in_shards,
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
    for name, given in (("multiprocessing_context", multiprocessing_context), ("worker_memory", worker_memory)):
        if given is not None:
            raise ValueError(f"{name} is for worker processes: leave it out, or pass num_workers")
    if threads == 0 or (not in_shards and not threads):
        _check_inline(prefetch_factor, persistent_workers, timeout)
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
    if stateful_source(dataset) is not None:
        raise ValueError(
            f"{type(dataset).__name__} has a state of its own (state_dict), and an engine may build a step again after "
            "a worker is lost: it would draw from that state twice. Leave engine out, or make the data set a function "
            "of the index"
        )


def _context(given: Any, *, in_shards: bool) -> BaseContext:
    """Return the context that starts worker processes. For map-style data sets it is multiprocessing's default, as with
    torch's loader: many of them do not pickle.
    """
    if isinstance(given, BaseContext):
        return given
    known = multiprocessing.get_all_start_methods()
    if given is None:
        given = "forkserver" if in_shards and "forkserver" in known else multiprocessing.get_start_method()
    if not isinstance(given, str):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the start method, "
            f"but got multiprocessing_context={given!r}"
        )
    if given not in known:
        raise ValueError(
            f"multiprocessing_context option should specify a valid start method in {known!r}, but got "
            f"multiprocessing_context={given!r}"
        )
    return multiprocessing.get_context(given)


def _check_inline(prefetch_factor: int | None, persistent_workers: bool, timeout: float) -> None:
    given = {
        "timeout": timeout > 0,
        "prefetch_factor": prefetch_factor is not None,
        "persistent_workers": persistent_workers,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"{name} needs threads or workers, and this loader builds each batch when it is requested: leave it out, "
            "or pass num_workers (or num_threads, for a map-style data set that is safe to use from several threads)"
        )
