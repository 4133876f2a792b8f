"""Who builds a loader's steps: threads of this process, or the thread that iterates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchdata.balancers.checks import checked_count
from orchdata.building.step import Builder
from orchdata.engines.engine import Engine
from orchdata.engines.inline import InlineEngine
from orchdata.engines.threads import ThreadEngine
from orchdata.notices import warn_once

DEFAULT_THREADS = 4
_DEFAULT_PREFETCH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """How many threads build steps, 0 for none, and how many steps they keep under way."""

    num_threads: int
    depth: int

    def make(self, builder: Builder) -> Engine:
        if not self.num_threads:
            return InlineEngine(builder)
        return ThreadEngine(builder, num_threads=self.num_threads, depth=self.depth)


def choose_engine(
    *,
    in_shards: bool,
    num_workers: int,
    num_threads: int | None,
    prefetch_factor: int | None,
    persistent_workers: bool,
    timeout: float,
    worker_init_fn: Callable[[int], None] | None,
    multiprocessing_context: Any,
) -> EngineChoice:
    """From the arguments of a DataLoader. Raises ValueError for those that would have no effect, as torch does where
    it has them.

    Args:
        in_shards: whether we decode. A map-style data set may not be safe to use from several threads, and its
            randomness follows `torch.manual_seed` in one thread only: it is loaded inline unless threads are asked for.
    """
    workers = checked_count(num_workers, "num_workers", 0)
    threads = None if num_threads is None else checked_count(num_threads, "num_threads", 0)
    depth = checked_count(_DEFAULT_PREFETCH if prefetch_factor is None else prefetch_factor, "prefetch_factor")
    if not workers and multiprocessing_context is not None:
        raise ValueError("multiprocessing_context is for worker processes: leave it out, or give num_workers")
    if (not in_shards and not threads) or (threads == 0 and not workers):
        _check_inline(workers, prefetch_factor, persistent_workers, timeout)
        return EngineChoice(num_threads=0, depth=0)
    if worker_init_fn is not None:
        raise ValueError(
            "worker_init_fn is for worker processes, and this loader builds with threads of the training process, "
            "whose random state it would seed anew: leave it out, or pass num_threads=0 and num_workers=0"
        )
    num_threads = max(1, workers) * max(1, DEFAULT_THREADS if threads is None else threads)
    if workers:
        warn_once("workers are threads", f"num_workers={workers} runs as {num_threads} threads of this process")
    return EngineChoice(num_threads=num_threads, depth=max(1, workers) * depth)


def _check_inline(workers: int, prefetch_factor: int | None, persistent_workers: bool, timeout: float) -> None:
    if workers:
        warn_once(
            "workers run inline",
            f"num_workers={workers} loads a map-style data set in this process, when a batch is asked for: there are "
            "no worker processes yet, worker_init_fn is not called, and timeout not kept. For a data set that is safe "
            "to use from several threads, num_threads=4 loads ahead",
        )
        return
    given = {
        "timeout": timeout > 0,
        "prefetch_factor": prefetch_factor is not None,
        "persistent_workers": persistent_workers,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"{name} needs threads or workers, and this loader builds each batch when it is asked for: leave it out, "
            "or pass num_threads (a map-style data set must then be safe to use from several threads)"
        )
