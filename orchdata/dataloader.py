"""DataLoader: the running thing. It plans, keeps steps under way, hands them out and knows where it stands."""

from __future__ import annotations

import copyreg
import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Generic

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import TypeVar

from orchdata.balancers import CostModel
from orchdata.balancers.checks import checked_epoch
from orchdata.batch.batch import ModelInputs
from orchdata.building.step import Builder
from orchdata.copies import Standing, changed_arguments, loader_text, stand, standing_of
from orchdata.dataset.describe import describe_loader
from orchdata.dataset.iterable import say_longer
from orchdata.dataset.map_style import say_shared
from orchdata.dataset.mixed import restore
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.options import (
    DEFAULT_BATCH_SIZE,
    IndexUse,
    LoaderOptions,
    PreparedDataset,
    as_shuffle,
    batch_sizes,
    check_functions,
    checked_index,
    chosen_seed,
    listed_rows,
    rank_balance,
)
from orchdata.dataset.prepare import prepare
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import Quarantine
from orchdata.dataset.torch_arguments import base_seed, check_combination, check_workers
from orchdata.delivery.cursor import Cursor, EpochOfTrainer, Failed, Iteration, Steps
from orchdata.delivery.delivery import Delivery
from orchdata.delivery.export import export_plan
from orchdata.delivery.pin import PinningEngine, can_pin
from orchdata.delivery.policy import ErrorPolicy, FailureBudget, as_policy
from orchdata.delivery.replay import build_again, plan_again
from orchdata.delivery.running import Course, Left, Running
from orchdata.delivery.state import Held, Position, check_allowed, dump_state, known_count
from orchdata.delivery.stats import Stats
from orchdata.delivery.steps import OptimizerSteps, Stepping
from orchdata.engines.choice import DEFAULT_PREFETCH, choose_engine
from orchdata.engines.engine import Engine, Resumed
from orchdata.engines.warm import Warming, kernel_families
from orchdata.loaders.errors import DataError, StateError
from orchdata.notices import calling_place, calling_trainer, warn_once
from orchdata.order.order import Shuffle
from orchdata.order.stateful import is_place
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Packed, Padded, layout_of
from orchdata.planning.plan import Plan
from orchdata.ranks.comparing import Agreement, tells_others
from orchdata.ranks.gathering import gather_json
from orchdata.ranks.parallel import check_still_alone, resolve_rank
from orchdata.trainers import check_accumulation, known_to_accelerate

T_co = TypeVar("T_co", covariant=True, default=Any)  # as torch's, for `DataLoader[int]`


class DataLoader(Generic[T_co]):
    """Balanced microbatches of multimodal samples. Argument names are torch's; what differs, the README lists.

    Iterating gives microbatches: `Batch` for a ShardDataset, or what `collate_fn` makes. `len()` is the number of
    optimizer steps, the same on every rank.

    Args:
        dataset: a ShardDataset, an `od.Mixture` of several, any torch map-style data set (a Hugging Face Dataset too),
            or an IterableDataset on one rank. With the latter two each step gives `collate_fn`'s result, counts are
            equal by default, and scaling the loss is the user's.
        batch_size: samples per rank and step, a mean once balanced; 1 if neither size is given. None, for map-style
            data, gives one sample a rank and step, converted as torch does or handed to `collate_fn` itself.
        shuffle: True, False, an `od.Shuffle`, or for a ShardDataset an order of your own: rows of its index in an array
            of integers, the same in each epoch. Those of samples that are left out are skipped.
        sampler, batch_sampler: for map-style data sets, as in torch: any iterable, drawn as batches are asked for. Over
            several ranks a `DistributedSampler` of the same ranks and data, whose order, seed and `set_epoch` hold.
        num_workers: worker processes, `num_threads` threads in each, each step built whole by one of them; 0 uses
            threads of this process. One that is lost is replaced, and its steps are built again.
        collate_fn: default `od.Packed()` for shards, torch's for map-style; `od.hf.Inputs(config)` for a Hugging Face
            model; or list of samples -> anything, called by one thread at a time. One with a parameter named `step`
            gets an `od.StepInfo` there.
        pin_memory: copy batches to page-locked memory, in a thread of its own.
        drop_last: drop the global remainder of an epoch; without it the last global batch is smaller.
        timeout: seconds to wait for a step, 0 without limit. Then a worker process that has it is replaced, and the
            step built again; a sample that does so in two processes of its own is a failure. With threads RuntimeError,
            some 2 seconds later where one hangs. It is left behind, and does not keep the process from ending. The next
            iteration tries the step again. Inline there is nobody to time it, and a limit is refused. Peers that get
            theirs by broadcast wait as long for the reader's (without a limit, as long as the job's process group), so
            that it must cover its longest pause.
        worker_init_fn: called with its number in each worker process, before it builds. Refused with threads, which
            share the training process's random state; inline it is not called, as in torch.
        prefetch_factor: steps kept under way per worker, default 2; refused inline, as in torch.
        persistent_workers: keep workers, or threads, from one epoch to the next; refused inline, as in torch.
        generator: what shuffles map-style data where no seed is given, in place of torch's default one; its initial
            seed is the seed of shards and of an `od.Shuffle`.
        in_order: False gives batches of worker processes as they are ready, for map-style data and iterables on one
            rank; elsewhere they come in order, and a word says so.
        pin_memory_device: the current accelerator is pinned for.
        multiprocessing_context: how worker processes are started: a start method, or a context of multiprocessing.
            Default: "forkserver" for shards, multiprocessing's own for others, whose data sets often do not pickle.
            Refused without num_workers, as in torch.
        num_threads: threads per worker; 0 with 0 workers runs inline. Default: 4 for shards, 0 for map-style data: with
            more, several threads call `__getitem__` at once, and random augmentations no longer follow
            `torch.manual_seed`.
        worker_memory: bytes that a worker process may allocate beyond what it starts with; one that needs more counts
            as lost. Slabs of shared memory, where batches lie, are not counted.
        global_batch_size: samples of one optimizer step over all ranks; exactly one of the three sizes. It need not
            divide by the ranks; use it when their number may change.
        global_batch_tokens: LLM tokens of one optimizer step over all ranks, for shards: a step has the samples that
            end within its share of the epoch's tokens, less than one sample more or less, whatever their number. A
            sample's tokens are aligned up as `od.Packed(multiple_of=)` does; padding of `od.Padded` is not counted. A
            ramp is a list of (tokens of training from which on it holds, tokens of a step), from 0 on.
        seed: of the order, 0 by default for shards. Map-style data without one are shuffled as torch does: at each
            `iter()` by its generator, over several ranks by rank 0's. With one, the sequence of global
            batches depends on data set, exclusions, shuffle, seed, epoch and global batch size only, never on ranks or
            workers.
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
        index: where several ranks find no index of their shards: "build" has them make it together when the loader is
            made, where torch.distributed is up, each another part of the shards; "require" refuses.

    Raises:
        ValueError: an argument outside its range, arguments that contradict each other, or ranks that differ.
        DataError: under on_error="raise", when the index lists bad samples; names the first and counts them.
        MissingIndexError: more than one rank and no index, without a process group or with index="require".
    """

    @tells_others
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        shuffle: bool | Shuffle | NDArray[Any] | None = False,
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
        pin_memory_device: str = "",
        in_order: bool = True,
        num_threads: int | None = None,
        worker_memory: int | None = None,
        global_batch_size: int | None = None,
        global_batch_tokens: int | Sequence[tuple[int, int]] | None = None,
        seed: int | None = None,
        cost: CostModel | Callable[[Any], int] | Sequence[int] | None = None,
        balance: str | Balance = "global",
        dp: Any = None,
        on_error: str | ErrorPolicy = "raise",
        quarantine: Quarantine | None = None,
        index: IndexUse = "build",
    ) -> None:
        self._given = changed_arguments(DataLoader.__init__, locals())
        self._rank = resolve_rank(dp)
        self._is_default_rank = dp is None
        self._agreement = Agreement(self._rank)
        check_workers(num_workers, timeout, multiprocessing_context)
        check_functions(collate_fn=collate_fn, worker_init_fn=worker_init_fn)
        in_shards = self._in_shards = isinstance(dataset, ShardDataset | Mixture)
        listed = listed_rows(shuffle, in_shards=in_shards)
        if not in_shards:
            check_combination(
                dataset,
                batch_size=batch_size,
                default_batch_size=DEFAULT_BATCH_SIZE,
                shuffle=shuffle,
                sampler=sampler,
                batch_sampler=batch_sampler,
                drop_last=drop_last,
                num_threads=num_threads,
            )
        self._is_alone = not in_shards and self._rank.size == 1  # so that a state may hold what is this rank's alone
        self._engine_choice = choose_engine(
            dataset,
            in_shards=in_shards,
            num_workers=num_workers,
            num_threads=num_threads,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            worker_memory=worker_memory,
            in_order=in_order or not self._is_alone,
        )
        self._blamed: dict[int, str] = {}
        self._keeps_threads = persistent_workers
        policy = as_policy(on_error)
        self.batch_size, batches = batch_sizes(
            batch_size,
            global_batch_size,
            global_batch_tokens,
            num_ranks=self._rank.size,
            in_shards=in_shards,
            has_batch_sampler=batch_sampler is not None,
            drop_last=drop_last,
        )
        self.drop_last = drop_last
        self.dataset = dataset
        self.generator = generator
        options = LoaderOptions(
            rank=self._rank,
            batches=batches,
            shuffle=as_shuffle(shuffle),
            listed=listed,
            seed=chosen_seed(seed, generator),
            drawn=seed is None
            and not isinstance(shuffle, Shuffle)
            and (self._rank.size == 1 or self._agreement.reaches_all),
            generator=generator,
            balance=rank_balance(balance, self._rank, equal_count=not in_shards),
            policy=policy,
            collate_fn=collate_fn,
            index=checked_index(index),
            batched=self.batch_size is not None
            or global_batch_size is not None
            or global_batch_tokens is not None
            or batch_sampler is not None,
            cost=cost,
        )
        self._pins = pin_memory and can_pin()
        self._warming = Warming(
            kernel_families(
                options.balance,
                self._rank.size,
                phases=cost.phases if isinstance(cost, CostModel) else ("llm",),
                padded=isinstance(layout_of(collate_fn), Padded),
                fixed=getattr(layout_of(collate_fn), "length", None) is not None,
                in_shards=in_shards,
            )
        )

        def make() -> tuple[PreparedDataset, Builder]:
            prepared = prepare(dataset, options, sampler=sampler, batch_sampler=batch_sampler, quarantine=quarantine)
            return prepared, prepared.spec.open()

        self._prepared, self._builder = self._agreement.make(
            make, lambda made: describe_loader(dataset, made[0], options, dp)
        )
        size = self._prepared.spec.plan.batches.describe()
        self.global_batch_size, self.global_batch_tokens = (
            size.get("global_batch_size"),
            size.get("global_batch_tokens"),
        )
        self._told_length: int | None = None
        self._cursor: Cursor[Left] = Cursor()
        self.sampler, self.batch_sampler = self._prepared.sampler, self._prepared.batch_sampler
        if self.sampler is None and self.batch_sampler is None:
            self.sampler = EpochOfTrainer(self._cursor)
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        if num_workers and prefetch_factor is None:
            self.prefetch_factor = DEFAULT_PREFETCH
        self.collate_fn = collate_fn or self._prepared.collate_fn
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        self.timeout, self.worker_init_fn, self.generator = timeout, worker_init_fn, generator
        self.persistent_workers, self.multiprocessing_context = persistent_workers, multiprocessing_context
        self.in_order = in_order
        self._stats = Stats(self._builder.reads)
        budget = FailureBudget(policy, self._stats, self._prepared.num_indexed + self._prepared.num_lost)
        self._delivery = Delivery(
            self._prepared.spec, self._rank, policy=policy, budget=budget, stats=self._stats, timeout=timeout
        )
        self._course = Course(
            epochs=self._prepared.epochs,
            rank=self._rank,
            agreement=self._agreement,
            delivery=self._delivery,
            iterated=self._prepared.iterated,
            goes_on=self._is_alone,
            in_order=in_order or not (num_workers and self._is_alone) or self._prepared.iterated,
            num_workers=max(1, num_workers),
            goes_over=not num_workers or persistent_workers,
        )
        if not (in_order or self._is_alone) and num_workers:
            warn_once("in_order=False of planned steps", _IN_ORDER)
        self._inputs = collate_fn if isinstance(collate_fn, ModelInputs) else None
        self._raises = policy.action == "raise"
        self._has_microbatches = bool(self._prepared.spec.plan.balance.caps)
        self._scales_loss = self._has_microbatches or (in_shards and not callable(collate_fn))
        self._ends_accumulation = False
        self._iterated_at: object = None
        self._idle_engine: Engine | None = None
        self._later_seeds: torch.Generator | None = None
        self._idle_epoch = -1
        self._opened: Builder | None = None  # for the next iteration, of an iterable that was asked for its state
        self._own_names = frozenset((*vars(self), "_own_names"))
        budget.count(self._prepared.failures, lost=self._prepared.num_lost)
        if dp is None and not in_shards and sampler is None and batch_sampler is None:
            say_shared(dataset, self._rank)
        if self._known_steps() == 0:
            warnings.warn(
                f"no step to make: {self._prepared.num_samples} usable rows of {self._prepared.num_indexed} samples, "
                f"{', '.join(f'{name}={value}' for name, value in size.items())}, drop_last={drop_last}",
                stacklevel=2,
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_stats" in self.__dict__:
            raise ValueError(
                f"{name} attribute should not be set after DataLoader is initialized: "
                f"{name} of a loader is given when it is made, and changes nothing later: make another loader"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return loader_text(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or what is unpickled, has the same arguments and stands at the same position; nothing of it runs yet.

        Raises TypeError for a loader over a process group, or one with an iterator among its arguments.
        """
        return copyreg.__newobj__, (type(self),), (self._given, standing_of(self))  # type: ignore[attr-defined]

    def __setstate__(self, copied: tuple[Mapping[str, Any], Standing]) -> None:
        given, standing = copied
        DataLoader.__init__(self, **given)
        stand(self, standing)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raises TypeError: Accelerate asks loaders of torch's before it makes another of their data set."""
        raise TypeError(
            "accelerator.prepare_data_loader makes a loader of torch's of the data set, without plan or state: "
            "od.hf.accelerate(loader, accelerator) is for this one"
        )

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank; under `Balance.max_tokens` there are more microbatches.

        Raises ValueError where a trainer asks that takes it for the number of microbatches.
        """
        # list(loader) asks too, for a hint, at the very place where it has begun to iterate.
        num_steps = self._count(self._cursor.begin)
        if self._has_microbatches and self._iterated_at != calling_place():
            if trainer := calling_trainer():
                raise ValueError(
                    f"{trainer} takes len() of a loader for the number of items, and this one's are microbatches, of "
                    f"which its {num_steps} steps may have several (max_tokens, or od.Packed(length=...)): it would "
                    "stop inside an epoch, and step inside a global batch. Give it loader.steps(), whose items are "
                    "whole steps, each the list of its microbatches; of transformers' Trainer od.hf.TrainerMixin "
                    "makes one that takes them"
                )
            warn_once(
                "len of a loader with max_tokens",
                f"len() of a loader is its optimizer steps, {num_steps}; iterating gives microbatches, and "
                "under max_tokens a step may have several. A trainer that counts batches by len() stops early, in a "
                "global batch: let it iterate loader.steps(), which gives each step's microbatches as a list",
            )
        return num_steps

    def __iter__(self) -> Iterator[Any]:
        """Microbatches from where the loader stands to the end of the epoch. The next `iter()` begins the next epoch,
        after `break` too, once a batch was delivered; after an error of the loader's own it goes on with the step that
        failed.
        """
        self._iterated_at = calling_place()
        iteration = self._begin()
        return Steps(self._known_to_trainer(self._microbatches(iteration), iteration), as_torch=self._course.goes_on)

    def steps(self) -> OptimizerSteps:
        """Optimizer steps, each the list of its microbatches: an iterable that begins and goes on as `iter()`, whose
        `len()` is the number of its items, and which has this loader's state; for trainers that count.
        """
        return OptimizerSteps(
            self,
            Stepping(
                cursor=self._cursor,
                begin=self._begin,
                run=lambda iteration: self._known_to_trainer(self._whole_steps(iteration), iteration),
                count=self._count,
                is_known=not self._prepared.iterated,
                goes_over=self._course.goes_over,
                as_torch=self._course.goes_on,
                scales_loss=self._scales_loss,
                num_samples=self._prepared.num_samples,
                num_ranks=self._rank.size,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: JSON-safe, the same on all ranks. Delivered steps count, prefetched ones do not;
        inside a step it points at the step's start.

        On one rank, what a map-style data set, an iterable, its iterator or a sampler with `state_dict` and
        `load_state_dict` holds of its own is in it, as they give it. Between two epochs, the random draws that the
        next one depends on are made now.
        """
        position = self._cursor.delivered
        if self._is_alone:
            position = self._cursor.draw(self._base_seed, self._prepared.epochs.tell)
            if self._builds_here and not position.held:
                position = replace(position, held=self._held_here())
        prepared = self._prepared
        state = dump_state(position, prepared.fingerprint, prepared.epochs)
        return state | prepared.state_of_order(state)

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Continue from `state` at the next iteration, in O(1).

        Args:
            state: of `state_dict`, of any rank of any number of them.
            allow: what may differ from what the state was taken with: "global_batch_size" and "global_batch_tokens",
                and the "weights" of a mixture. What is left of the epoch is then cut anew, from the state's place on;
                other weights are a stage that begins there, which later states tell.

        Raises StateError, naming the difference, where it belongs to another data set, recipe, order or size,
        or where the data set of each worker has a state of its own to another number of workers.
        """
        check_allowed(allow)
        prepared, position = restore(self._prepared, state, allow, self.num_workers)
        if prepared.iterated and position.step and not position.held:
            raise StateError("the state does not say how far each worker has iterated the data set")
        if prepared is not self._prepared:
            self._install(prepared)
        self._cursor.restore(position, by_trainer=calling_trainer() is not None)
        if self._is_alone:
            self.close()  # workers that are kept have gone on
            self._opened = None

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next iteration: at its start, or where a state of this epoch was loaded."""
        self._cursor.set_epoch(checked_epoch(epoch))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def plan_at(self, epoch: int, step: int) -> Plan:
        """Who gets what in any step: nothing is read or decoded, and the loader stays where it is. Raises as `step_at`,
        but for DataError.
        """
        prepared = self._prepared
        return plan_again(prepared.spec, prepared.epochs, self._cursor.told_of(epoch), epoch=epoch, step=step)

    def step_at(self, epoch: int, step: int, *, rank: int | None = None) -> list[Any]:
        """The microbatches of any step, as `steps()` gives them, built here and now; the loader stays where it is.

        A step of a month-old run is built again from its index and arguments: `dp=(0, 64)` stands for its 64 ranks. A
        state of the run says what arguments do not: load it first where weights of a mixture changed, or an epoch was
        cut anew, in the middle, and for the epoch of map-style data without a seed.

        Args:
            rank: whose; default: this one's.

        What failed on other ranks is not masked (see `Batch.mask_failed`), and what `__getitem__` or `collate_fn` draws
        at random is drawn anew. Nothing is counted in `stats()`.

        Raises:
            IndexError: outside the epoch, or before the place where it was cut anew.
            ValueError: samples that come in turn alone: of an IterableDataset, of a sampler of the user's.
            DataError: of the first sample that cannot be loaded, under on_error="raise".
        """
        rank = self._rank.rank if rank is None else rank
        prepared, told = self._prepared, self._cursor.told_of(epoch)
        built = build_again(prepared.spec, prepared.epochs, told, epoch=epoch, step=step, rank=rank)
        if built.failures and self._raises:
            raise built.failures[0]
        return self._named(built.batches)

    def export_plan(
        self, path: str | PathLike[str], *, epochs: Iterable[int] = (0,), steps: range | None = None
    ) -> int:
        """Write who gets which sample in these epochs and steps (default: all of the first), as an Arrow IPC file with
        a row a sample, or piece of one.

        Columns: epoch, step, source (its name; "" without a mixture), pass (through the source), row (of the source's
        index), shard, key, piece, rank, microbatch, llm_tokens, loss_tokens, and parts: of each image, clip or other
        part its modality, part (its place among the sample's parts), positions (that it gives the encoder), tokens (of
        the LLM) and rank (that encodes it: the sample's, or under assignment="per_phase" any).

        For shards. Nothing is read or decoded, and the loader stays where it is. Returns the number of rows.

        Raises:
            ValueError: epochs or steps that are none, or a data set without an index; nothing is written then.
        """
        prepared = self._prepared
        return export_plan(path, prepared.spec, prepared.epochs, prepared.fingerprint, of_epochs=epochs, steps=steps)

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

    def _install(self, prepared: PreparedDataset) -> None:
        """Go on with another order of the same data set."""
        self.close()  # workers that are kept would go on with theirs
        self._prepared = prepared
        self._builder = self._builder.planned_by(prepared.spec.plan)
        self._delivery.follow(prepared.spec)
        self._course = replace(self._course, epochs=prepared.epochs)

    def _count(self, position: Position) -> int:
        """Optimizer steps of its epoch. Raises TypeError where nobody knows before the end."""
        num_steps = self._prepared.epochs.count(position.epoch, position.told)
        if self._prepared.iterated:
            self._told_length = num_steps
        return num_steps

    def _known_steps(self) -> int | None:
        """Optimizer steps of an epoch; None where nobody knows before the end."""
        return known_count(self._prepared.epochs, self._cursor.begin.epoch, self._cursor.begin.told)

    def _begin(self) -> Iteration[Left]:
        if self._is_default_rank:
            check_still_alone(self._rank)
        self._ends_accumulation = check_accumulation(
            scales_loss=self._scales_loss, knows_end=lambda: self._known_steps() is not None
        )
        iteration = Iteration(self._cursor, is_alone=self._is_alone)
        if self._is_alone:
            origin = iteration.origin
            # Workers that hold nothing are not to draw for later steps what they drew for the first ones.
            again = origin.is_drawn and (not origin.step or origin.held or self._prepared.iterated)
            kept = origin.base_seed if again else None
            iteration.base_seed = self._base_seed() if kept is None else self._later_seeds_from(kept)
            self._cursor.seed(iteration.base_seed)
        elif not self._in_shards:
            iteration.base_seed = self._base_seed()
        return iteration

    def _base_seed(self) -> int:
        """Of workers that an iteration starts. Torch's loader draws one at each `iter()`, but for kept workers at the
        first alone: those that are started later, after an error or for a state, have seeds that follow from it.
        """
        if self._later_seeds is not None:
            return base_seed(self._later_seeds)
        return self._later_seeds_from(base_seed(self.generator))

    def _later_seeds_from(self, first: int) -> int:
        if self._later_seeds is None and self.persistent_workers and self.num_workers:
            self._later_seeds = torch.Generator().manual_seed(first)
        return first

    @property
    def _builds_here(self) -> bool:
        """Whether steps are built in this process, by one thread."""
        return self._engine_choice.workers is None and not self._engine_choice.num_threads

    def _held_here(self) -> tuple[Held, ...]:
        """What a data set holds before its first step."""
        if self._prepared.iterated and self._opened is None:
            self._opened = self._prepared.spec.open()
        restores = (self._opened or self._builder).restores
        return () if restores is None or is_place(restores.held()) else (restores.held,)

    def _known_to_trainer(
        self, items: Generator[Any, None, None], iteration: Iteration[Left]
    ) -> Generator[Any, None, None]:
        """The items of an iteration, of which Accelerate is told the last where it accumulates gradients."""
        if not self._ends_accumulation:
            return items
        return known_to_accelerate(items, lambda: iteration.num_left(self._count(iteration.origin)))

    def _microbatches(self, iteration: Iteration[Left]) -> Generator[Any, None, None]:
        for batches in self._run(iteration):
            if isinstance(batches, Failed):
                yield batches
                continue
            batches.reverse()
            while batches:
                if len(batches) == 1:
                    iteration.deliver()
                yield batches.pop()  # kept by nobody here, so that the caller decides how long it lives

    def _whole_steps(self, iteration: Iteration[Left]) -> Generator[Any, None, None]:
        for batches in self._run(iteration):
            if not isinstance(batches, Failed):
                iteration.deliver()
            yield batches

    def _run(self, iteration: Iteration[Left]) -> Iterator[list[Any] | Failed]:
        """Each step's microbatches, up to the end of the epoch."""
        iteration.go()
        if self._prepared.iterated and iteration.epoch == self._idle_epoch:
            self.close()  # its workers are at the end of this very epoch
        engine, self._idle_engine = self._idle_engine or self._make_engine(iteration), None
        # As torch's, kept workers finish what `break` leaves under way, and draw for it. What a data set holds of its
        # own would not be that of any state.
        goes_on = self._keeps_threads and self._is_alone and self._builder.restores is None
        try:
            for step, made in Running(self._course, iteration, engine).steps():
                if self._told_length is not None and step >= self._told_length:
                    say_longer(self.dataset, self._told_length, step + 1, self.num_workers)
                if not isinstance(made, Failed):
                    made = self._named(made)
                yield made
                del made  # or the last step would live on while the next is waited for
        except GeneratorExit:
            self._leave(engine, iteration.epoch, keep=goes_on)
            raise
        except BaseException:
            engine.close()
            raise
        self._leave(engine, iteration.epoch, keep=self._keeps_threads)

    def _named(self, batches: list[Any]) -> list[Any]:
        """With the names that the model has for what is in them."""
        if self._inputs is None:
            return batches
        return [replace(batch, inputs=self._inputs) for batch in batches]

    def _leave(self, engine: Engine, epoch: int, *, keep: bool) -> None:
        """For the next iteration, or end its workers."""
        if keep and self._idle_engine is None:
            self._idle_engine, self._idle_epoch = engine, epoch
        else:
            engine.close()

    def _make_engine(self, iteration: Iteration[Left]) -> Engine:
        spec = self._prepared.spec
        if self._engine_choice.wants_kernels:
            self._warming.finish(spec)  # kernels are compiled on first use, which `timeout` is not for
        else:
            self._warming.wait()
        builder, self._opened = self._opened or (spec.open() if self._prepared.iterated else self._builder), None
        origin = iteration.origin
        resumed = None
        if iteration.is_resumed and origin.held:
            held = tuple(None if ask is None else ask() for ask in origin.held)
            resumed = Resumed(iteration.epoch, held, origin.worker)
        engine = self._delivery.receiving_engine() or self._engine_choice.make(
            spec, builder, base_seed=iteration.base_seed, blamed=self._blamed, resumed=resumed
        )
        return PinningEngine(engine) if self._pins else engine


_IN_ORDER = (
    "in_order=False: batches come in order all the same, for their steps are planned over ranks, or of shards, and a "
    "state of them is a position"
)
_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters)
