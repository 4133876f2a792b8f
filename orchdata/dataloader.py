"""DataLoader: the running thing. It plans, keeps steps under way, hands them out and knows where it stands."""

from __future__ import annotations

import contextlib
import inspect
import json
import operator
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from orchdata.balancers import CostModel
from orchdata.balancers.checks import checked_count
from orchdata.building.step import BuiltStep, StepSpec
from orchdata.dataset.describe import describe_loader
from orchdata.dataset.map_style import map_source, say_shared
from orchdata.dataset.options import Source, SourceOptions
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import shard_source
from orchdata.delivery.cursor import Cursor, Iteration, Steps
from orchdata.delivery.failed_parts import Settling
from orchdata.delivery.policy import ErrorPolicy, as_policy
from orchdata.delivery.replicate import ReceivingEngine, Replication
from orchdata.delivery.state import Position, dump_state, load_state
from orchdata.delivery.stats import Stats
from orchdata.engines.choice import choose_builders
from orchdata.engines.threads import Engine
from orchdata.loaders.errors import DataError, TooManyFailures
from orchdata.notices import calling_place, warn_once
from orchdata.order.batch_sizes import DEFAULT_BATCH_SIZE, batch_sizes
from orchdata.order.order import Shuffle
from orchdata.planning.balance import Balance, as_balance
from orchdata.planning.layout import Packed, Padded
from orchdata.planning.plan import make_plan
from orchdata.ranks.agreement import check_plans
from orchdata.ranks.comparing import Agreement, Beginning, tells_others
from orchdata.ranks.gathering import gather_json
from orchdata.ranks.parallel import Rank, resolve_rank


class DataLoader:
    """Balanced microbatches of multimodal samples. Argument names are torch's; what differs, the README lists.

    Iterating gives microbatches: `Batch` for a ShardDataset, or what `collate_fn` makes. `len()` is the number of
    optimizer steps, the same on every rank.

    Args:
        dataset: a ShardDataset, or any torch map-style data set (a Hugging Face Dataset too). With a map-style one
            counts are equal by default, each step gives `collate_fn`'s result, and scaling the loss is the user's.
        batch_size: samples per rank and step, a mean once balanced; 1 if neither size is given. None, for map-style
            data, gives one sample a rank and step, converted as torch does or handed to `collate_fn` itself.
        shuffle: True, False, or an `od.Shuffle`.
        sampler, batch_sampler: for map-style data sets on one rank, as in torch.
        num_workers: worker processes, `num_threads` threads in each; 0 uses threads of this process. Until worker
            processes exist, n workers are n times `num_threads` threads, or for map-style data none, unless
            `num_threads` is given.
        collate_fn: default `od.Packed()` for shards, torch's for map-style; or list of samples -> anything, called by
            one thread at a time.
        pin_memory: copy batches to page-locked memory.
        drop_last: drop the global remainder of an epoch; without it the last global batch is smaller.
        timeout: seconds to wait for a step, 0 without limit; then RuntimeError, some 2 seconds later where a thread
            hangs. It is left behind, and does not keep the process from ending. The next iteration tries the step
            again. Inline there is nobody to time it, and a limit is refused. Peers that get theirs by broadcast wait as
            long for the reader's (without a limit, as long as the job's process group), so that it must cover its
            longest pause.
        worker_init_fn: for worker processes. Refused with threads, which share the training process's random state;
            inline it is not called, as in torch.
        prefetch_factor: steps kept under way per worker, default 2; refused inline, as in torch.
        persistent_workers: keep threads from one epoch to the next; refused inline, as in torch.
        generator: its initial seed is the seed, where none is given.
        multiprocessing_context: for worker processes; refused without num_workers, as in torch.
        num_threads: threads per worker; 0 with 0 workers runs inline. Default: 4 for shards, 0 for map-style data: with
            more, several threads call `__getitem__` at once, and random augmentations no longer follow
            `torch.manual_seed`.
        global_batch_size: samples of one optimizer step over all ranks; exactly one of the two sizes. It need not
            divide by the ranks; use it when their number may change.
        seed: of the order. The sequence of global batches depends on data set, exclusions, shuffle, seed, epoch and
            global batch size only, never on ranks or workers.
        cost: a CostModel for shards (None balances LLM tokens; its phases name the model's); for map-style data
            sets a callable sample -> int, or one integer per sample.
        balance: "none", "grouped", "grid", "global", or an `od.Balance`.
        dp: process group, DeviceMesh, `od.DataParallel` or (rank, size); default torch.distributed's world. Of a mesh
            of several dims the data-parallel ones balance ("dp_replicate", "dp_shard", "dp", "data"; DataParallel
            names others), and ranks that differ in the rest get the same batches. Ranks that would plan other steps are
            refused: with a group or mesh when the loader is made, which is then a collective; by default at the first
            step, through the job's store. With (rank, size) nothing is compared, and (0, 1) gives this process every
            sample, whatever others do.
        on_error: "raise", "skip" or an `od.ErrorPolicy`.
        quarantine: (shard, key) pairs to leave out, or a JSON Lines file of `{"shard": ..., "key": ...}`.

    Raises:
        ValueError: an argument outside its range, arguments that contradict each other, or ranks that differ.
        DataError: under on_error="raise", when the index lists bad samples; names the first and counts them.
        MissingIndexError: more than one rank and no index.
    """

    @tells_others
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
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
        num_threads: int | None = None,
        global_batch_size: int | None = None,
        seed: int | None = None,
        cost: CostModel | Callable[[Any], int] | Sequence[int] | None = None,
        balance: str | Balance = "global",
        dp: Any = None,
        on_error: str | ErrorPolicy = "raise",
        quarantine: Sequence[tuple[str, str]] | str | PathLike[str] | None = None,
    ) -> None:
        self._rank = resolve_rank(dp)
        self._agreement = Agreement(self._rank)
        if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout >= 0:
            raise ValueError(f"timeout is a number of seconds, 0 for no limit, got {timeout!r}")
        functions: dict[str, Any] = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
        for name, given in functions.items():
            known = given is None or isinstance(given, Packed | Padded) or callable(given)
            if given in (Packed, Padded) or not known:
                raise TypeError(f"{name} must be callable, got {given!r}")
        self._policy = as_policy(on_error)
        self._timeout = timeout
        in_shards = isinstance(dataset, ShardDataset)
        self._builders = choose_builders(
            in_shards=in_shards,
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )
        self._keeps_threads = persistent_workers
        self.drop_last = drop_last
        self.batch_size, self.global_batch_size = batch_sizes(
            batch_size, global_batch_size, batch_sampler is not None, self._rank.size
        )
        batched = self.batch_size is not None or global_batch_size is not None or batch_sampler is not None
        if not batched and in_shards:
            raise ValueError(
                "batch_size=None takes a map-style data set's samples one by one; steps of a ShardDataset have sizes: "
                "give batch_size=1, or global_batch_size"
            )
        options = SourceOptions(
            rank=self._rank,
            global_batch_size=self.global_batch_size,
            shuffle=_as_shuffle(shuffle),
            seed=_seed(seed, generator),
            drop_last=drop_last,
            balance=_grouped(as_balance(balance, equal_count=not in_shards), self._rank),
            policy=self._policy,
            collate_fn=collate_fn,
            batched=batched,
            pin_memory=pin_memory and _can_pin(),
            cost=cost,
        )
        self._source = self._agreement.make(
            lambda: _make_source(dataset, options, sampler, batch_sampler, quarantine),
            lambda source: describe_loader(dataset, source, options, dp),
        )
        self._replication = Replication(self._rank, self._source.spec, timeout) if self._rank.shared else None
        self._settling = _make_settling(options, self._replication)
        self._pin_memory = options.pin_memory
        self.dataset = dataset
        self._cursor: Cursor[Beginning] = Cursor()
        self._has_microbatches = bool(options.balance.caps)
        self._iterated_at: object = None
        self._idle_engine: Engine | None = None
        self._stats = Stats(self._source.reads)
        self._bear(self._source.failures, lost=self._source.num_lost)
        if dp is None and not in_shards:
            say_shared(dataset, self._rank)
        if not self._num_steps:
            warnings.warn(
                f"no step to make: {self._source.num_samples} usable samples of {self._source.num_indexed}, global "
                f"batch size {self.global_batch_size}, drop_last={drop_last}",
                stacklevel=2,
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_stats" in self.__dict__:
            raise ValueError(
                f"{name} of a loader is given when it is made, and changes nothing later: make another loader"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank; under `Balance.max_tokens` there are more microbatches."""
        # list(loader) asks too, for a hint, at the very place where it has begun to iterate.
        if self._has_microbatches and self._iterated_at != calling_place():
            warn_once(
                "len of a loader with max_tokens",
                f"len() of a loader is its optimizer steps, {self._num_steps}; iterating gives microbatches, and "
                "under max_tokens a step may have several. A trainer that counts batches by len() stops early, in a "
                "global batch: let it iterate loader.steps(), which gives each step's microbatches as a list",
            )
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        """Microbatches from where the loader stands to the end of the epoch. The next `iter()` begins the next epoch,
        after `break` too, once a batch was delivered; after an error of the loader's own it goes on with the step that
        failed.
        """
        self._iterated_at = calling_place()
        return Steps(self._microbatches(Iteration(self._cursor)))

    def steps(self) -> Iterator[list[Any]]:
        """Optimizer steps, `len()` of an epoch, each the list of its microbatches; begins and goes on as `iter()`."""
        return Steps(self._whole_steps(Iteration(self._cursor)))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: JSON-safe, the same on all ranks. Delivered steps count, prefetched ones do not;
        inside a step it points at the step's start.
        """
        return dump_state(self._cursor.delivered, self._source.fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` at the next iteration, in O(1). Raises StateError, naming the difference, where it
        belongs to another data set, recipe, order or global batch size.
        """
        self._cursor.restore(load_state(state, self._source.fingerprint, self._num_steps))

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next iteration: at its start, or where a state of this epoch was loaded."""
        self._cursor.set_epoch(checked_count(epoch, "epoch", 0))

    def stats(self) -> dict[str, Any]:
        """Balance, milliseconds by stage and failures of the delivered steps, as `Stats.as_dict` says."""
        return self._stats.as_dict()

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """The listed failures of all ranks, each once, sorted by shard and key. A collective over `group`, where
        torch.distributed is initialised; without it this loader's own.
        """
        listed = [list(failure.args) for failure in self._stats.failures]
        by_rank = [listed]
        if dist.is_available() and dist.is_initialized():
            by_rank = gather_json(listed, dist.group.WORLD if group is None else group)
        found = {DataError(*args) for failures in by_rank for args in failures}
        return sorted(found, key=lambda failure: failure.args)

    def close(self) -> None:
        """Stop the threads that `persistent_workers` keeps."""
        if self._idle_engine is not None:
            self._idle_engine.close()
            self._idle_engine = None

    @property
    def _num_steps(self) -> int:
        return self._source.spec.plan.num_steps

    def _microbatches(self, iteration: Iteration[Beginning]) -> Generator[Any, None, None]:
        for step, batches in self._run(iteration):
            batches.reverse()
            while batches:
                if len(batches) == 1:
                    iteration.deliver(step)
                yield batches.pop()  # kept by nobody here, so that the caller decides how long it lives

    def _whole_steps(self, iteration: Iteration[Beginning]) -> Generator[list[Any], None, None]:
        for step, batches in self._run(iteration):
            iteration.deliver(step)
            yield batches

    def _run(self, iteration: Iteration[Beginning]) -> Iterator[tuple[int, list[Any]]]:
        """Each step and its microbatches, up to the end of the epoch."""
        first, stop, epoch = iteration.begin.step, self._num_steps, iteration.epoch
        iteration.start()
        drawn = self._source.begin_epoch(epoch)
        engine, self._idle_engine = self._idle_engine or self._make_engine(), None
        under_way: deque[Future[BuiltStep]] = deque()
        every = self._rank.check_plan_every

        def submit(ahead: int, depth: int) -> None:
            for step in range(ahead + len(under_way), min(stop, ahead + depth)):
                under_way.append(engine.submit(epoch, step))

        def deliver(step: int) -> list[Any]:
            begun.compare()
            if every and (step - first) % every == 0:
                self._check_plans(Position(epoch, step))
            elif step == first:
                make_plan(self._source.spec.plan, epoch, step)  # compiles on first use, which `timeout` is not for
            submit(step, max(1, engine.depth))
            return self._deliver(engine, under_way.popleft(), Position(epoch, step))

        try:
            begun = self._agreement.begin(epoch, first, iteration.left())
            if every and first == stop:
                self._check_plans(iteration.begin)
            for step in range(first, stop):
                try:
                    batches = deliver(step)
                    submit(step + 1, engine.depth)
                except Exception:
                    iteration.fail(step, begun)
                    raise
                iteration.hand_out(step)
                yield step, batches
                del batches  # or the last step would live on while the next is waited for
        except BaseException:
            engine.close()
            raise
        if self._keeps_threads and self._idle_engine is None:
            self._idle_engine = engine
        else:
            engine.close()
        iteration.end()
        del drawn

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
            return self._receive(engine, future, position)
        try:
            built = self._receive(engine, future, position)
        except Exception as error:
            self._settling.give_up(position.step, error)
            raise
        return replace(built, batches=self._settling.settle(position.step, built.batches))

    def _receive(self, engine: Engine, future: Future[BuiltStep], position: Position) -> BuiltStep:
        started = time.perf_counter()
        with contextlib.suppress(FutureTimeout):
            future.exception(min(self._timeout, threading.TIMEOUT_MAX) or None)
        if not future.done():
            engine.close()  # before other ranks hear of it: what hangs is then known, and this process ends first
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds, waiting for step {position.step} of epoch "
                f"{position.epoch}"
            )
        built = future.result()
        waited = time.perf_counter() - started
        if not isinstance(engine, ReceivingEngine):  # whoever read them has borne them
            self._bear(built.failures)
        self._stats.add_step(built, waited)
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
        return self._builders.make_engine(spec)


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


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters)
