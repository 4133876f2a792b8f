"""DataLoader: the running thing. It plans, keeps steps under way, hands them out and knows where it stands."""

from __future__ import annotations

import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from os import PathLike
from typing import Any

import torch

from orchdata.balance import Balance, as_balance
from orchdata.balancers import CostModel
from orchdata.dataset import ShardDataset
from orchdata.engines import Engine, InlineEngine, ThreadEngine
from orchdata.layout import Packed
from orchdata.loaders.errors import DataError, TooManyFailures
from orchdata.loaders.order import Shuffle
from orchdata.parallel import resolve_rank
from orchdata.policy import ErrorPolicy, as_policy
from orchdata.sources import Source, map_source, shard_source
from orchdata.state import Position, dump_state, load_state
from orchdata.stats import Stats
from orchdata.step import BuiltStep, StepSpec


class DataLoader:
    """Balanced microbatches of multimodal samples; names, meanings and defaults are torch's wherever torch has them.

    Iterating gives microbatches: `Batch` for a ShardDataset, or what `collate_fn` makes. `len()` is the number of
    optimizer steps, the same on every rank.

    Args:
        dataset: a ShardDataset, or any torch map-style data set (a Hugging Face Dataset too). With a map-style one
            counts are equal by default, each step gives `collate_fn`'s result, and scaling the loss is the user's.
        batch_size: samples per rank and step, a mean once balanced; 1 if neither size is given.
        shuffle: True, False, or an `od.Shuffle`.
        sampler, batch_sampler: for map-style data sets on one rank, as in torch.
        num_workers: worker processes, `num_threads` threads in each; 0 uses threads of this process. Until worker
            processes exist, n workers are n times `num_threads` threads.
        collate_fn: default `od.Packed()` for shards, torch's for map-style; or list of samples -> anything.
        pin_memory: copy batches to page-locked memory.
        drop_last: drop the global remainder of an epoch; without it the last global batch is smaller.
        timeout: seconds to wait for a step, 0 without limit.
        worker_init_fn: called in each thread with its number.
        prefetch_factor: steps kept under way per worker, default 2.
        persistent_workers: keep threads from one epoch to the next.
        generator: its initial seed is the seed, where none is given.
        multiprocessing_context: for worker processes; threads have no use for it.
        num_threads: threads per worker; 0 with 0 workers runs inline.
        global_batch_size: samples of one optimizer step over all ranks; exactly one of the two sizes. It need not
            divide by the ranks; use it when their number may change.
        seed: of the order. The sequence of global batches depends on data set, exclusions, shuffle, seed, epoch and
            global batch size only, never on ranks or workers.
        cost: a CostModel for shards (None balances LLM tokens; its phases name the model's); for map-style data
            sets a callable sample -> int, or one integer per sample.
        balance: "none", "global", or an `od.Balance`.
        dp: process group, one-dimensional DeviceMesh or (rank, size); default torch.distributed's world.
        on_error: "raise", "skip" or an `od.ErrorPolicy`.
        quarantine: (shard, key) pairs to leave out, or a JSON Lines file of `{"shard": ..., "key": ...}`.

    Raises:
        ValueError: an argument outside its range, or arguments that contradict each other.
        DataError: under on_error="raise", when the index lists bad samples; names the first and counts them.
        MissingIndexError: more than one rank and no index.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool | Shuffle = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Packed | Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        num_threads: int = 4,
        global_batch_size: int | None = None,
        seed: int | None = None,
        cost: CostModel | Callable[[Any], int] | Sequence[int] | None = None,
        balance: str | Balance = "global",
        dp: Any = None,
        on_error: str | ErrorPolicy = "raise",
        quarantine: Sequence[tuple[str, str]] | str | PathLike[str] | None = None,
    ) -> None:
        _check_range("num_workers", num_workers, 0)
        _check_range("num_threads", num_threads, 0)
        _check_range("timeout", timeout, 0)
        _check_range("prefetch_factor", 2 if prefetch_factor is None else prefetch_factor, 1)
        if generator is not None and seed is not None:
            raise ValueError("seed and generator both given: the seed comes from one of them")
        self._rank = resolve_rank(dp)
        self._policy = as_policy(on_error)
        self._timeout = timeout
        self._num_workers = num_workers
        self._num_threads = num_threads
        self._prefetch_factor = prefetch_factor or 2
        self._persistent = persistent_workers
        self._worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.drop_last = drop_last
        self.batch_size, self.global_batch_size = _batch_sizes(
            batch_size, global_batch_size, batch_sampler, self._rank.size
        )
        common: dict[str, Any] = {
            "rank": self._rank,
            "global_batch_size": self.global_batch_size,
            "shuffle": _as_shuffle(shuffle),
            "seed": int(generator.initial_seed()) if generator is not None else (seed or 0),
            "drop_last": drop_last,
            "balance": as_balance(balance, equal_count=not isinstance(dataset, ShardDataset)),
            "policy": self._policy,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory and _can_pin(),
            "cost": cost,
        }
        if isinstance(dataset, ShardDataset):
            if sampler is not None or batch_sampler is not None:
                raise ValueError("a ShardDataset has an order of its own: use shuffle= in place of a sampler")
            self._source: Source = shard_source(dataset, quarantine=_read_quarantine(quarantine), **common)
        else:
            if quarantine is not None:
                raise ValueError("quarantine names samples of shards; leave them out of a map-style data set yourself")
            self._source = map_source(dataset, sampler=sampler, batch_sampler=batch_sampler, **common)
        self.dataset = dataset
        self._position = Position()
        self._next_step = 0
        self._engine: Engine | None = None
        self._stats = Stats(self._rank.rank)
        self._bear(self._source.failures)
        if not len(self) and self._source.num_samples:
            warnings.warn(
                f"drop_last leaves no step: {self._source.num_samples} samples, global batch size "
                f"{self.global_batch_size}",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank."""
        return self._source.spec.plan.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Microbatches from where the loader stands to the end of the epoch, then the next epoch begins."""
        for batches in self._run():
            last = len(batches) - 1
            for place, batch in enumerate(batches):
                if place == last:
                    self._deliver()
                yield batch

    def steps(self) -> Iterator[list[Any]]:
        """Optimizer steps, each the list of its microbatches."""
        for batches in self._run():
            self._deliver()
            yield batches

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: JSON-safe, the same on all ranks. Delivered steps count, prefetched ones do not;
        inside a step it points at the step's start.
        """
        return dump_state(self._position, self._source.fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` at the next iteration, in O(1). Raises StateError, naming the difference, where it
        belongs to another data set, recipe, order or global batch size.
        """
        self._position = load_state(state, self._source.fingerprint, len(self))
        self._next_step = self._position.step

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next iteration; in the epoch the loader already stands in, its position is kept."""
        _check_range("epoch", epoch, 0)
        if epoch != self._position.epoch:
            self._position = Position(epoch)
            self._next_step = 0

    def stats(self) -> dict[str, Any]:
        """Balance, milliseconds by stage and failures of the delivered steps; see `orchdata.stats.Stats.as_dict`."""
        return self._stats.as_dict()

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _run(self) -> Iterator[list[Any]]:
        epoch, start, stop = self._position.epoch, self._next_step, len(self)
        self._position = Position(epoch, start)
        self._next_step = 0
        self._source.begin_epoch(epoch)
        engine = self._engine or self._make_engine()
        self._engine = engine if self._persistent else None
        under_way: deque[Future[BuiltStep]] = deque()
        submitted = start
        try:
            for _ in range(start, stop):
                while submitted < stop and len(under_way) < engine.depth:
                    under_way.append(engine.submit(epoch, submitted))
                    submitted += 1
                yield self._receive(under_way.popleft())
        except BaseException:
            self._engine = None
            engine.close()
            raise
        if not self._persistent:
            engine.close()
        self._position = Position(epoch + 1)

    def _receive(self, future: Future[BuiltStep]) -> list[Any]:
        started = time.perf_counter()
        try:
            built = future.result(self._timeout or None)
        except FutureTimeout:
            if future.done():
                raise
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        self._stats.add_step(built, time.perf_counter() - started)
        self._bear(built.failures)
        return built.batches

    def _bear(self, failures: Sequence[DataError]) -> None:
        if not failures:
            return
        if self._policy.action == "raise":
            raise failures[0]
        self._stats.add_failures(failures)
        if self._policy.handler is not None:
            for failure in failures:
                self._policy.handler(failure)
        budget = self._policy.budget(self._source.num_indexed)
        if budget is not None and self._stats.num_failures > budget:
            raise TooManyFailures(
                f"{self._stats.num_failures} samples failed, the policy allows {budget}; the last: {failures[-1]}"
            ) from failures[-1]

    def _deliver(self) -> None:
        self._position = Position(self._position.epoch, self._position.step + 1)

    def _make_engine(self) -> Engine:
        spec: StepSpec = self._source.spec
        if self._num_workers == 0 and self._num_threads == 0:
            return InlineEngine(spec)
        workers = max(1, self._num_workers)
        if self._num_workers:
            _say_workers_are_threads(self._num_workers, self._num_threads)
        return ThreadEngine(
            spec,
            num_threads=workers * max(1, self._num_threads),
            depth=workers * self._prefetch_factor,
            initializer=self._worker_init_fn,
        )


def _check_range(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _batch_sizes(
    batch_size: int | None, global_batch_size: int | None, batch_sampler: Any, num_ranks: int
) -> tuple[int | None, int]:
    if batch_size is not None and global_batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} and global_batch_size={global_batch_size} both given: pass exactly one"
        )
    if batch_sampler is not None:
        if batch_size is not None or global_batch_size is not None:
            raise ValueError("batch_sampler sets the batch sizes: leave batch_size and global_batch_size out")
        return None, 1
    if global_batch_size is not None:
        _check_range("global_batch_size", global_batch_size, 1)
        return None, global_batch_size
    batch_size = 1 if batch_size is None else batch_size
    _check_range("batch_size", batch_size, 1)
    return batch_size, batch_size * num_ranks


def _as_shuffle(shuffle: bool | Shuffle) -> Shuffle | None:
    if isinstance(shuffle, Shuffle):
        return shuffle
    return Shuffle() if shuffle else None


def _can_pin() -> bool:
    if torch.accelerator.is_available():
        return True
    warnings.warn("pin_memory has no effect: torch finds no accelerator", stacklevel=3)
    return False


def _read_quarantine(quarantine: Sequence[tuple[str, str]] | str | PathLike[str] | None) -> list[tuple[str, str]]:
    if quarantine is None:
        return []
    if isinstance(quarantine, (str, PathLike)):
        with open(quarantine, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        return [(row["shard"], row["key"]) for row in rows]
    return [(shard, key) for shard, key in quarantine]


_said_workers_are_threads = False


def _say_workers_are_threads(num_workers: int, num_threads: int) -> None:
    global _said_workers_are_threads
    if not _said_workers_are_threads:
        _said_workers_are_threads = True
        warnings.warn(
            f"num_workers={num_workers} runs as {num_workers * max(1, num_threads)} threads of this process",
            stacklevel=4,
        )
