"""DataLoader: the running thing. It plans, keeps steps under way, hands them out and knows where it stands."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from orchdata.balancers import CostModel
from orchdata.balancers.checks import checked_count
from orchdata.batch.batch import ModelInputs
from orchdata.building.step import Builder, BuiltStep
from orchdata.dataset.describe import describe_loader
from orchdata.dataset.map_style import say_shared
from orchdata.dataset.options import (
    DEFAULT_BATCH_SIZE,
    LoaderOptions,
    PreparedDataset,
    as_shuffle,
    batch_sizes,
    check_functions,
    check_timeout,
    chosen_seed,
    rank_balance,
)
from orchdata.dataset.prepare import prepare
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import Quarantine
from orchdata.delivery.cursor import Cursor, Iteration, Steps
from orchdata.delivery.delivery import Delivery
from orchdata.delivery.pin import PinningEngine, can_pin
from orchdata.delivery.policy import ErrorPolicy, FailureBudget, as_policy
from orchdata.delivery.state import dump_state, load_state
from orchdata.delivery.stats import Stats
from orchdata.engines.choice import choose_engine
from orchdata.engines.engine import Engine
from orchdata.loaders.errors import DataError
from orchdata.notices import calling_place, warn_once
from orchdata.order.order import Shuffle
from orchdata.order.steps import StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Packed, Padded
from orchdata.planning.make_plan import make_plan
from orchdata.ranks.agreement import check_plans
from orchdata.ranks.comparing import Agreement, Beginning, tells_others
from orchdata.ranks.gathering import gather_json
from orchdata.ranks.parallel import resolve_rank


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
        collate_fn: default `od.Packed()` for shards, torch's for map-style; `od.hf.Inputs(config)` for a Hugging Face
            model; or list of samples -> anything, called by one thread at a time. One with a parameter named `step`
            gets an `od.StepInfo` there.
        pin_memory: copy batches to page-locked memory, in a thread of its own.
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
        collate_fn: Packed | Padded | ModelInputs | Callable[[list[Any]], Any] | None = None,
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
        quarantine: Quarantine | None = None,
    ) -> None:
        self._rank = resolve_rank(dp)
        self._agreement = Agreement(self._rank)
        check_timeout(timeout)
        check_functions(collate_fn=collate_fn, worker_init_fn=worker_init_fn)
        in_shards = isinstance(dataset, ShardDataset)
        self._engine_choice = choose_engine(
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
        policy = as_policy(on_error)
        self.batch_size, batches = batch_sizes(
            batch_size,
            global_batch_size,
            num_ranks=self._rank.size,
            in_shards=in_shards,
            has_batch_sampler=batch_sampler is not None,
            drop_last=drop_last,
        )
        self.global_batch_size = batches.size
        self.drop_last = drop_last
        self.dataset = dataset
        options = LoaderOptions(
            rank=self._rank,
            batches=batches,
            shuffle=as_shuffle(shuffle),
            seed=chosen_seed(seed, generator),
            balance=rank_balance(balance, self._rank, equal_count=not in_shards),
            policy=policy,
            collate_fn=collate_fn,
            batched=self.batch_size is not None or global_batch_size is not None or batch_sampler is not None,
            cost=cost,
        )
        self._pin_memory = pin_memory and can_pin()

        def make() -> tuple[PreparedDataset, Builder]:
            prepared = prepare(dataset, options, sampler=sampler, batch_sampler=batch_sampler, quarantine=quarantine)
            return prepared, prepared.spec.open()

        self._prepared, self._builder = self._agreement.make(
            make, lambda made: describe_loader(dataset, made[0], options, dp)
        )
        self._stats = Stats(self._builder.reads)
        budget = FailureBudget(policy, self._stats, self._prepared.num_indexed + self._prepared.num_lost)
        self._delivery = Delivery(
            self._prepared.spec, self._rank, policy=policy, budget=budget, stats=self._stats, timeout=timeout
        )
        self._cursor: Cursor[Beginning] = Cursor()
        self._inputs = collate_fn if isinstance(collate_fn, ModelInputs) else None
        self._has_microbatches = bool(options.balance.caps)
        self._iterated_at: object = None
        self._idle_engine: Engine | None = None
        budget.count(self._prepared.failures, lost=self._prepared.num_lost)
        if dp is None and not in_shards:
            say_shared(dataset, self._rank)
        if not self._num_steps:
            warnings.warn(
                f"no step to make: {self._prepared.num_samples} usable samples of {self._prepared.num_indexed}, global "
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
        return dump_state(self._cursor.delivered, self._prepared.fingerprint)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` at the next iteration, in O(1). Raises StateError, naming the difference, where it
        belongs to another data set, recipe, order or global batch size.
        """
        self._cursor.restore(load_state(state, self._prepared.fingerprint, self._num_steps))

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
        return self._prepared.spec.plan.num_steps

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
        task_of = self._prepared.epoch_tasks(epoch)
        engine, self._idle_engine = self._idle_engine or self._make_engine(), None
        under_way: deque[tuple[StepTask, Future[BuiltStep]]] = deque()
        spec, every = self._prepared.spec.plan, self._rank.check_plan_every
        inputs = self._inputs

        def submit(ahead: int, depth: int) -> None:
            for step in range(ahead + len(under_way), min(stop, ahead + depth)):
                task = task_of(step)
                under_way.append((task, engine.submit(task)))

        def deliver(step: int) -> list[Any]:
            begun.compare()
            is_checked = every and (step - first) % every == 0
            if is_checked or step == first:
                plan = make_plan(spec, task_of(step))  # compiles on first use, which `timeout` is not for
                if is_checked:
                    check_plans(epoch, step, plan.hash, self._rank.groups)
            submit(step, max(1, engine.depth))
            task, future = under_way.popleft()
            batches = self._delivery.deliver(engine, future, task)
            return [replace(batch, inputs=inputs) for batch in batches] if inputs is not None else batches

        try:
            begun = self._agreement.begin(epoch, first, iteration.left())
            if every and first == stop:
                check_plans(epoch, stop, None, self._rank.groups)  # there is no step left to plan
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

    def _make_engine(self) -> Engine:
        engine = self._delivery.receiving_engine() or self._engine_choice.make(self._builder)
        return PinningEngine(engine) if self._pin_memory else engine


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters)
