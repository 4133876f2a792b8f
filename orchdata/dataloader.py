"""DataLoader: a face. It checks arguments, says where the loader stands, and iterates.

DataLoader --iter--> LoaderIterator (loop/loop.py) <-- EpochLoop: where it starts <-- Stream: the steps (runtime.py)
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from orchdata.copies import Standing, changed_arguments, loader_text, stand, standing_of
from orchdata.dataset.arguments import Arguments
from orchdata.dataset.map_style import warn_shared
from orchdata.dataset.mixed import restore
from orchdata.dataset.options import DEFAULT_BATCH_SIZE, IndexUse
from orchdata.dataset.shards import Quarantine
from orchdata.delivery.export import export_plan
from orchdata.delivery.policy import ErrorPolicy
from orchdata.delivery.replay import build_again, plan_again
from orchdata.engines.choice import DEFAULT_PREFETCH
from orchdata.loaders.errors import DataError, StateError
from orchdata.loop.loop import LoaderIterator
from orchdata.loop.position import Progress
from orchdata.loop.state import check_allowed, dump_state
from orchdata.notices import calling_place, calling_trainer, warn_once, warn_user
from orchdata.order.order import Shuffle
from orchdata.planning.balance import Balance
from orchdata.planning.layout import Packed, Padded
from orchdata.planning.plan import Plan
from orchdata.ranks.comparing import Agreement
from orchdata.ranks.gathering import gather_json
from orchdata.ranks.parallel import check_still_alone, resolve_rank
from orchdata.runtime import Runtime
from orchdata.steps import OptimizerSteps
from orchdata.trainers import AccelerateEnd, TrainerEpochs, check_accumulation

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
        arguments = Arguments(**{name: value for name, value in locals().items() if name != "self"})
        self._given = changed_arguments(DataLoader.__init__, vars(arguments))
        rank = resolve_rank(dp)
        agreement = Agreement(rank)
        with agreement.telling_others():
            self._runtime = Runtime(arguments, rank, agreement)
            self._progress = Progress()
            self._iterated_at: object = None
            self._set_attributes(arguments)
            self._own_names = frozenset((*vars(self), "_own_names"))
            if dp is None and not arguments.in_shards and sampler is None and batch_sampler is None:
                warn_shared(dataset, rank)
            self._warn_if_empty()

    dataset: Any
    num_workers: int
    prefetch_factor: int | None
    drop_last: bool

    def _set_attributes(self, arguments: Arguments) -> None:
        """The attributes that torch's loader has: arguments, with defaults filled in."""
        prepared = self._runtime.prepared
        size = prepared.spec.plan.batches.describe()
        vars(self).update({name: value for name, value in vars(arguments).items() if name in _AS_GIVEN})
        self.batch_size = self._runtime.batch_size
        self.global_batch_size = size.get("global_batch_size")
        self.global_batch_tokens = size.get("global_batch_tokens")
        self.sampler, self.batch_sampler = prepared.sampler, prepared.batch_sampler
        if self.sampler is None and self.batch_sampler is None:
            self.sampler = TrainerEpochs(self._progress)
        self.collate_fn = arguments.collate_fn or prepared.collate_fn
        if self.num_workers and self.prefetch_factor is None:
            self.prefetch_factor = DEFAULT_PREFETCH

    def _warn_if_empty(self) -> None:
        prepared = self._runtime.prepared
        if self._runtime.known_count(self._progress.start.position) == 0:
            size = prepared.spec.plan.batches.describe()
            warn_user(
                f"no step to make: {prepared.num_samples} usable rows of {prepared.num_indexed} samples, "
                f"{', '.join(f'{name}={value}' for name, value in size.items())}, drop_last={self.drop_last}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_own_names" in self.__dict__:
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

        Raises ValueError if a trainer asks that takes it for the number of microbatches.
        """
        # list(loader) asks too, for a hint, at the very place where it has begun to iterate.
        self._follow_sampler()
        num_steps = self._runtime.count(self._progress.start.position)
        if self._runtime.has_microbatches and self._iterated_at != calling_place():
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
        """Microbatches from where the loader stands to the end of the epoch. The next `iter()` starts the next epoch,
        after `break` too, once a batch was delivered; after an error of the loader's own it continues with the step
        that failed.
        """
        self._iterated_at = calling_place()
        return self._iterate(whole_steps=False)

    def steps(self) -> OptimizerSteps:
        """Optimizer steps, each the list of its microbatches: an iterable that starts and continues as `iter()`, whose
        `len()` is the number of its items, and which has this loader's state; for trainers that count.
        """
        return OptimizerSteps(self, self._runtime, self._progress, lambda: self._iterate(whole_steps=True))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: JSON-safe, the same on all ranks. Delivered steps count, prefetched ones do not;
        inside a step it points at the step's start.

        On one rank, it has the own state of a map-style data set, an iterable, its iterator or a sampler, if they have
        `state_dict` and `load_state_dict`. Between two epochs, the random draws that the next one depends on are made
        now.
        """
        runtime, prepared = self._runtime, self._runtime.prepared
        position = self._progress.position
        if runtime.is_single_rank:
            self._follow_sampler()
            position = self._progress.promised(runtime.seeds.draw, prepared.steps.draw)
            if not position.workers:
                position = replace(position, workers=runtime.state_before())
        state = dump_state(position, prepared.fingerprint, prepared.steps)
        return state | prepared.state_of_order(state)

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Continue from `state` at the next iteration, in O(1).

        Args:
            state: of `state_dict`, of any rank of any number of them.
            allow: what may differ from what the state was taken with: "global_batch_size" and "global_batch_tokens",
                and the "weights" of a mixture. What is left of the epoch is then cut again, from the state's position
                on; other weights are a stage that begins there, which later states store.

        Raises StateError, naming the difference, if it belongs to another data set, recipe, order or size, or if the
        data set of each worker has a state of its own and the number of workers differs.
        """
        check_allowed(allow)
        runtime = self._runtime
        prepared, position = restore(runtime.prepared, state, allow, self.num_workers)
        if prepared.is_iterable and position.step and not position.workers:
            raise StateError("the state does not say how far each worker has iterated the data set")
        if prepared is not runtime.prepared:
            runtime.install(prepared)
        self._progress.load(position, by_trainer=calling_trainer() is not None)
        if runtime.is_single_rank:
            runtime.close()  # workers that are kept have gone on

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at the next iteration: at its start, or where a state of this epoch was loaded."""
        self._progress.set_epoch(checked_epoch(epoch))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def plan_at(self, epoch: int, step: int) -> Plan:
        """Who gets what in any step: nothing is read or decoded, and the loader stays where it is. Raises as `step_at`,
        but for DataError.
        """
        prepared = self._runtime.prepared
        return plan_again(prepared.spec, prepared.steps, self._progress.draw_of(epoch), epoch=epoch, step=step)

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
        runtime, draw = self._runtime, self._progress.draw_of(epoch)
        rank = runtime.rank.rank if rank is None else rank
        built = build_again(runtime.prepared.spec, runtime.prepared.steps, draw, epoch=epoch, step=step, rank=rank)
        if built.failures and runtime.raises:
            raise built.failures[0]
        return runtime.context.delivery.named(built.batches)

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
        prepared = self._runtime.prepared
        return export_plan(path, prepared.spec, prepared.steps, prepared.fingerprint, of_epochs=epochs, steps=steps)

    def stats(self) -> dict[str, Any]:
        """Balance, milliseconds by stage and failures of the delivered steps, as `Stats.as_dict` says."""
        return self._runtime.stats.as_dict()

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """The listed failures of all ranks, each once, sorted by shard and key. A collective over `group`, where
        torch.distributed is initialised; without it this loader's own.
        """
        listed = [list(failure.args) for failure in self._runtime.stats.failures]
        by_rank = [listed]
        if dist.is_available() and dist.is_initialized():
            by_rank = gather_json(listed, dist.group.WORLD if group is None else group)
        found = {DataError(*args) for failures in by_rank for args in failures}
        return sorted(found, key=lambda failure: failure.args)

    def close(self) -> None:
        """Stop the workers, or threads, that `persistent_workers` keeps."""
        self._runtime.close()

    def _iterate(self, *, whole_steps: bool) -> LoaderIterator:
        runtime, progress = self._runtime, self._progress
        if self._given.get("dp") is None:
            check_still_alone(runtime.rank)
        self._follow_sampler()
        ends_accumulation = check_accumulation(
            scales_loss=runtime.scales_loss,
            knows_end=lambda: runtime.known_count(progress.start.position) is not None,
        )
        loop = runtime.begin(progress)
        watcher = AccelerateEnd(lambda: loop.num_left(runtime.count(loop.origin))) if ends_accumulation else None
        return LoaderIterator(loop, whole_steps=whole_steps, as_torch=runtime.is_single_rank, watcher=watcher)

    def _follow_sampler(self) -> None:
        """The user's sampler may have been replaced, by `object.__setattr__`, as trainers do."""
        self._runtime.follow(self.sampler if self.batch_sampler is None else self.batch_sampler)


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters)
_AS_GIVEN = (
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
"""Arguments that are attributes of a loader, as of torch's."""
