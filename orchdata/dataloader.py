"""DataLoader: the running thing. It plans, keeps steps under way, hands them out and knows where it stands."""

from __future__ import annotations

import json
import operator
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import fields, is_dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from orchdata.balance import Balance, as_balance
from orchdata.balancers import CostModel
from orchdata.balancers.checks import checked_count
from orchdata.dataset import ShardDataset
from orchdata.engines import Engine, InlineEngine, ThreadEngine
from orchdata.layout import Packed, Padded
from orchdata.loaders.errors import DataError, TooManyFailures
from orchdata.loaders.order import Shuffle
from orchdata.map_source import map_source
from orchdata.plan import make_plan
from orchdata.policy import ErrorPolicy, as_policy
from orchdata.ranks.agreement import check_plans, make_alike
from orchdata.ranks.parallel import DataParallel, Rank, resolve_rank
from orchdata.ranks.replicate import ReceivingEngine, Replication
from orchdata.ranks.settling import Settling
from orchdata.shard_source import shard_source
from orchdata.sources import Source, SourceOptions
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
        timeout: seconds to wait for a step, 0 without limit. A thread that hangs is left behind, and keeps the process
            from ending; inline there is nobody to time it.
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
        balance: "none", "grouped", "grid", "global", or an `od.Balance`.
        dp: process group, DeviceMesh, `od.DataParallel` or (rank, size); default torch.distributed's world. Of a mesh
            of several dims the data-parallel ones balance ("dp_replicate", "dp_shard", "dp", "data"; DataParallel
            names others), and ranks that differ in the rest get the same batches. With a group or mesh, making the
            loader is a collective: ranks that would plan other steps are refused.
        on_error: "raise", "skip" or an `od.ErrorPolicy`.
        quarantine: (shard, key) pairs to leave out, or a JSON Lines file of `{"shard": ..., "key": ...}`.

    Raises:
        ValueError: an argument outside its range, arguments that contradict each other, or ranks that differ.
        DataError: under on_error="raise", when the index lists bad samples; names the first and counts them.
        MissingIndexError: more than one rank and no index.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool | Shuffle | None = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Packed | Padded | Callable[[list[Any]], Any] | None = None,
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
        if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout >= 0:
            raise ValueError(f"timeout is a number of seconds, 0 for no limit, got {timeout!r}")
        functions: dict[str, Any] = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
        for name, given in functions.items():
            known = given is None or isinstance(given, Packed | Padded) or callable(given)
            if given in (Packed, Padded) or not known:
                raise TypeError(f"{name} must be callable, got {given!r}")
        self._rank = resolve_rank(dp)
        self._policy = as_policy(on_error)
        self._timeout = timeout
        self._num_workers = checked_count(num_workers, "num_workers", 0)
        self._num_threads = checked_count(num_threads, "num_threads", 0)
        self._prefetch_factor = checked_count(2 if prefetch_factor is None else prefetch_factor, "prefetch_factor")
        self._persistent = persistent_workers
        self._worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.drop_last = drop_last
        self.batch_size, self.global_batch_size = _batch_sizes(
            batch_size, global_batch_size, batch_sampler, self._rank.size
        )
        options = SourceOptions(
            rank=self._rank,
            global_batch_size=self.global_batch_size,
            shuffle=_as_shuffle(shuffle),
            seed=_seed(seed, generator),
            drop_last=drop_last,
            balance=_grouped(as_balance(balance, equal_count=not isinstance(dataset, ShardDataset)), self._rank),
            policy=self._policy,
            collate_fn=collate_fn,
            pin_memory=pin_memory and _can_pin(),
            cost=cost,
        )
        self._source = make_alike(
            lambda: _make_source(dataset, options, sampler, batch_sampler, quarantine),
            lambda source: _describe(source, options, dp),
            self._rank.groups,
        )
        self._replication = Replication(self._rank, self._source.spec) if self._rank.shared else None
        self._settling = _make_settling(options, self._replication)
        self._pin_memory = options.pin_memory
        self.dataset = dataset
        self._position = Position()  # what was delivered
        self._begin = Position()  # where the next iteration starts: after `break` not the same
        self._idle_engine: Engine | None = None
        self._stats = Stats(self._rank.rank, self._source.reads)
        self._bear(self._source.failures, lost=self._source.num_lost)
        if not len(self):
            warnings.warn(
                f"no step to make: {self._source.num_samples} usable samples of {self._source.num_indexed}, global "
                f"batch size {self.global_batch_size}, drop_last={drop_last}",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank."""
        return self._source.spec.plan.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Microbatches from where the loader stands to the end of the epoch, then the next epoch begins."""
        for after, batches in self._run():
            batches.reverse()
            while batches:
                if len(batches) == 1:
                    self._position = after
                yield batches.pop()  # kept by nobody here, so that the caller decides how long it lives

    def steps(self) -> Iterator[list[Any]]:
        """Optimizer steps, each the list of its microbatches."""
        for after, batches in self._run():
            self._position = after
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
        self._position = self._begin = load_state(state, self._source.fingerprint, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next iteration; in the epoch the loader already stands in, its position is kept."""
        epoch = checked_count(epoch, "epoch", 0)
        if epoch != self._begin.epoch:
            self._position = self._begin = Position(epoch)

    def stats(self) -> dict[str, Any]:
        """Balance, milliseconds by stage and failures of the delivered steps; see `orchdata.stats.Stats.as_dict`."""
        return self._stats.as_dict()

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """The listed failures of all ranks, each once, sorted by shard and key. A collective over `group`, where
        torch.distributed is initialised; without it this loader's own.
        """
        listed = self._stats.failures
        by_rank: list[Any] = [listed]
        if dist.is_available() and dist.is_initialized():
            by_rank = [None] * dist.get_world_size(group)
            dist.all_gather_object(by_rank, listed, group=group)
        return sorted({failure for failures in by_rank for failure in failures}, key=lambda failure: failure.args)

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps."""
        if self._idle_engine is not None:
            self._idle_engine.close()
            self._idle_engine = None

    def _run(self) -> Iterator[tuple[Position, list[Any]]]:
        """Each step's microbatches, and where the loader stands once they are delivered."""
        begin, stop = self._begin, len(self)
        epoch = begin.epoch
        self._position = begin
        again = self._begin = Position(epoch)
        self._source.begin_epoch(epoch)
        engine, self._idle_engine = self._idle_engine or self._make_engine(), None
        under_way: deque[Future[BuiltStep]] = deque()
        every = self._rank.check_plan_every
        if every:
            self._check_plans(begin)
        elif begin.step < stop:
            make_plan(self._source.spec.plan, epoch, begin.step)  # compiles on first use, which `timeout` is not for

        def submit(first: int, depth: int) -> None:
            for step in range(first + len(under_way), min(stop, first + depth)):
                under_way.append(engine.submit(epoch, step))

        try:
            for step in range(begin.step, stop):
                submit(step, max(1, engine.depth))
                batches = self._deliver(engine, under_way.popleft(), Position(epoch, step))
                submit(step + 1, engine.depth)
                yield Position(epoch, step + 1), batches
                del batches  # or the last step would live on while the next is waited for
                if every and step + 1 < stop and (step + 1 - begin.step) % every == 0:
                    self._check_plans(Position(epoch, step + 1))
        except BaseException:
            engine.close()
            raise
        if self._persistent and self._idle_engine is None:
            self._idle_engine = engine
        else:
            engine.close()
        if self._begin == again:
            self._begin = Position(epoch + 1)
        self._position = self._begin

    def _check_plans(self, position: Position) -> None:
        plan = self._source.spec.plan
        ends = position.step == plan.num_steps
        plan_hash = None if ends else make_plan(plan, position.epoch, position.step).hash
        check_plans(position.epoch, position.step, plan_hash, self._rank.groups)

    def _deliver(self, engine: Engine, future: Future[BuiltStep], position: Position) -> list[Any]:
        """A step's microbatches; where this rank reads for peers, they get them too, or the error."""
        if self._replication is None or not self._replication.is_reader:
            return self._settled(engine, future, position).batches
        try:
            built = self._settled(engine, future, position)
        except Exception as error:
            self._replication.send_error(error)
            raise
        self._replication.send(position.epoch, position.step, built)
        return built.batches

    def _settled(self, engine: Engine, future: Future[BuiltStep], position: Position) -> BuiltStep:
        if self._settling is None:
            return self._receive(engine, future)
        try:
            built = self._receive(engine, future)
        except Exception as error:
            self._settling.give_up(position.step, error)
            raise
        return replace(built, batches=self._settling.settle(position.step, built.batches))

    def _receive(self, engine: Engine, future: Future[BuiltStep]) -> BuiltStep:
        started = time.perf_counter()
        try:
            built = future.result(self._timeout or None)
        except FutureTimeout:
            if future.done():
                raise
            engine.close(wait=False)
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        self._stats.add_step(built, time.perf_counter() - started)
        if not isinstance(engine, ReceivingEngine):  # whoever read them has borne them
            self._bear(built.failures)
        return built

    def _bear(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        if not failures:
            return
        if self._policy.action == "raise":
            raise failures[0]
        self._stats.add_failures(failures, lost=lost)
        if self._policy.handler is not None:
            for failure in failures:
                self._policy.handler(failure)
        budget = self._policy.budget(self._source.num_indexed + self._source.num_lost)
        if budget is not None and self._stats.num_failed_samples > budget:
            raise TooManyFailures(
                f"{self._stats.num_failed_samples} samples failed, the policy allows {budget}; the last: {failures[-1]}"
            ) from failures[-1]

    def _make_engine(self) -> Engine:
        spec: StepSpec = self._source.spec
        if self._replication is not None and not self._replication.is_reader:
            return ReceivingEngine(spec, self._replication, pin_memory=self._pin_memory)
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


def _make_settling(options: SourceOptions, replication: Replication | None) -> Settling | None:
    """Where parts may fail on one rank and matter to another; receivers of a broadcast get what is settled."""
    rank = options.rank
    apart = options.balance.assignment == "per_phase" and options.policy.action == "skip"
    if not apart or (replication is not None and not replication.is_reader):
        return None
    if rank.size == 1:
        return Settling(())
    return Settling(rank.dp_groups) if rank.dp_groups else None


def _make_source(dataset: Any, options: SourceOptions, sampler: Any, batch_sampler: Any, quarantine: Any) -> Source:
    if not isinstance(dataset, ShardDataset):
        if quarantine is not None:
            raise ValueError("quarantine names samples of shards; leave them out of a map-style data set yourself")
        return map_source(dataset, options, sampler=sampler, batch_sampler=batch_sampler)
    if sampler is not None or batch_sampler is not None:
        raise ValueError("a ShardDataset has an order of its own: use shuffle= in place of a sampler")
    return shard_source(dataset, options, _read_quarantine(quarantine))


def _describe(source: Source, options: SourceOptions, dp: Any) -> dict[str, Any]:
    """What all ranks must share, JSON-safe."""
    collate = options.collate_fn
    return {
        **source.fingerprint,
        "balance": {field.name: getattr(options.balance, field.name) for field in fields(options.balance)},
        "cost": options.cost.describe() if isinstance(options.cost, CostModel) else None,
        "drop_last": options.drop_last,
        "on_error": options.policy.action,
        "collate_fn": f"{collate}" if is_dataclass(collate) else getattr(collate, "__qualname__", None),
        "replicate": dp.replicate if isinstance(dp, DataParallel) else "broadcast",
        "check_plan_every": options.rank.check_plan_every,
    }


def _grouped(balance: Balance, rank: Rank) -> Balance:
    """Groups are nodes where their size is not given."""
    if balance.scope not in ("grouped", "grid") or balance.group_size is not None:
        return balance
    if rank.ranks_per_node is None:
        raise ValueError(
            f"balance={balance.scope!r} needs a group size: od.Balance(scope={balance.scope!r}, group_size=...),"
            " od.DataParallel(mesh, ranks_per_node=...), or LOCAL_WORLD_SIZE, which torchrun sets"
        )
    return replace(balance, group_size=rank.ranks_per_node)


def _seed(seed: int | None, generator: torch.Generator | None) -> int:
    if generator is None:
        if isinstance(seed, bool) or not (seed is None or hasattr(seed, "__index__")):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        return 0 if seed is None else operator.index(seed)
    if seed is not None:
        raise ValueError("seed and generator both given: the seed comes from one of them")
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
    return int(generator.initial_seed())


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
        return None, checked_count(global_batch_size, "global_batch_size")
    batch_size = checked_count(1 if batch_size is None else batch_size, "batch_size")
    return batch_size, batch_size * num_ranks


def _as_shuffle(shuffle: bool | Shuffle | None) -> Shuffle | None:
    if isinstance(shuffle, Shuffle):
        return shuffle
    if shuffle is not None and not isinstance(shuffle, (bool, np.bool_)):
        raise ValueError(f"shuffle must be True, False or an od.Shuffle, got {shuffle!r}")
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


_said_workers_are_threads = False


def _say_workers_are_threads(num_workers: int, num_threads: int) -> None:
    global _said_workers_are_threads
    if not _said_workers_are_threads:
        _said_workers_are_threads = True
        warnings.warn(
            f"num_workers={num_workers} runs as {num_workers * max(1, num_threads)} threads of this process",
            stacklevel=4,
        )
