"""DataLoader: the public interface. It checks arguments, keeps the position, and iterates.

DataLoader --iter--> LoaderIterator (loop/loop.py) <-- EpochLoop: where it starts <-- Stream: the steps (runtime.py)
copy.deepcopy, pickle --> the arguments and the position --> another loader, in which nothing runs yet
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import TypeVar

import orchdata
from orchdata.balancers.assignment import checked_count, checked_epoch
from orchdata.balancers.costs.model import CostModel
from orchdata.dataset.arguments import DEFAULT_BATCH_SIZE, Arguments, CollateFn, IndexUse, Quarantine, is_sharded
from orchdata.dataset.prepared import SIZES
from orchdata.delivery.export import export_plan
from orchdata.delivery.policy import ErrorPolicy, flattened
from orchdata.engines.engine import DEFAULT_PREFETCH, OpensEngine
from orchdata.loaders.errors import BLANK, DataError
from orchdata.loaders.storage.files import Cache
from orchdata.loop.loop import LoaderIterator, Position, Progress, TrainerEpochs
from orchdata.order.order import Shuffle
from orchdata.order.steps import StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, make_plan
from orchdata.ranks.agreement import Agreement
from orchdata.ranks.parallel import check_still_alone, resolve_rank
from orchdata.runtime import Runtime
from orchdata.steps import OptimizerSteps
from orchdata.trainers import (
    AccelerateEnd,
    LightningFit,
    check_accumulation,
    check_counted_by_len,
    check_not_prepared,
    check_not_skipped,
    check_validation,
    is_loaded_by_trainer,
    lightnings_loop,
)

_MOST_CHARACTERS = 200


def facts_of(loader: Any) -> list[tuple[str, str]]:
    """Return the data, the arguments that differ from the defaults, the rank, and the position, each with its name."""
    given, rank, position = loader._given, loader._runtime.rank, loader._progress.position
    shown = [(name, _shown(value)) for name, value in given.items() if name not in ("dataset", "dp")]
    if not {"batch_size", "global_batch_size", "global_batch_tokens", "batch_sampler"} & given.keys():
        shown.insert(0, ("batch_size", str(loader.batch_size)))
    where = f"epoch {position.epoch}, step {position.step}"
    data, dataset = type(loader.dataset).__name__, loader.dataset
    with suppress(Exception):  # the user's own __len__, which may work later
        data = repr(dataset) if is_sharded(dataset) else f"{data} of {len(dataset):,}"
    return [
        *(("data", data), *shown),
        *(("rank", f"rank {rank.rank} of {rank.size}"), ("position", where)),
    ]


def _shown(value: Any) -> str:
    """Return any value as one line, without the address in a default repr."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    text = repr(value)
    if " object at 0x" in text:
        return type(value).__name__
    if isinstance(value, list | tuple | dict | set | str):
        return reprlib.repr(value)
    begin = text[:_MOST_CHARACTERS]  # up to a comma, so that no number is shown in part
    return text if begin == text else f"{begin.rpartition(', ')[0] or begin}, ..."


T_co = TypeVar("T_co", covariant=True, default=Any)  # as in torch, for `DataLoader[int]`


_ATTRIBUTES = (
    "dataset drop_last generator num_workers prefetch_factor pin_memory pin_memory_device timeout worker_init_fn "
    "persistent_workers multiprocessing_context in_order"
).split()
_SAMPLERS = {"sampler", "batch_sampler"}


class DataLoader(Generic[T_co]):
    """Iterable of balanced microbatches of multimodal samples, with torch's arguments: the README lists differences.

    Iteration yields microbatches: `Batch` for a ShardDataset, or results of `collate_fn`; `len()` counts steps.

    Args:
        dataset: a ShardDataset, an `od.Mixture` of several, any torch map-style data set (a Hugging Face Dataset too),
            or an IterableDataset on one rank. With the latter two, each step yields the result of `collate_fn`, all
            ranks get the same number of samples by default, and the user scales the loss.
        batch_size: samples (or windows of `od.Packed(concatenate=True)`) per rank and step, a mean once balanced. None,
            for map-style data: one sample per rank and step, converted as torch does or passed to `collate_fn` alone.
        shuffle: True, False, an `od.Shuffle`, or, for a ShardDataset, your own order: an integer array of rows of its
            index, the same in each epoch. Rows of excluded samples are skipped.
        sampler, batch_sampler: for map-style data sets, as in torch: any iterable. The loader draws from it lazily.
            Over several ranks: a `DistributedSampler` of the same ranks and data, with its order, seed and `set_epoch`.
        num_workers: number of worker processes, of which one builds a whole step; 0 for this process. Those of shards,
            and of map-style data with `cost` or `on_error="skip"`, are replaced if they are lost. Other map-style data
            are read by torch's own DataLoader, with these arguments of its.
        collate_fn: default `od.Packed()` for shards, torch's for map-style data; `od.hf.Inputs(config)` for a Hugging
            Face model; or a function of a list of samples, and of an `od.StepInfo` if it has a parameter named `step`.
            Only one thread calls it at a time.
        pin_memory: copy batches to page-locked memory, in a separate thread.
        drop_last: drop the remainder of an epoch; else it is a smaller global batch, or of windows the next epoch's
            start.
        timeout: seconds to wait for a step; 0 for no limit. A worker of ours that takes longer is replaced, and the
            step is built again. From threads, and from torch's workers: RuntimeError; the next iteration tries the step
            again. Inline: ValueError. Peers that receive steps by broadcast wait that long for the reading rank, or by
            default as long as the process group of the job waits: it must cover the reader's longest pause.
        worker_init_fn: called with the worker's number in each worker process, before it builds. ValueError with
            threads, which share the random state of the training process. Inline it is not called, as in torch.
        prefetch_factor: number of steps under way per worker, or in all threads. Default 2; 4 with threads that read
            object storage. ValueError inline, as in torch.
        persistent_workers: keep workers, or threads, from one epoch to the next. ValueError inline, as in torch.
        generator: replaces torch's default for map-style data without a seed. Its initial seed is that of shards.
        in_order: False yields batches of worker processes as they are ready, for map-style data and iterables on one
            rank. Otherwise batches stay in order, and a warning says so.
        pin_memory_device: ignored; memory is pinned for the current accelerator.
        multiprocessing_context: how worker processes are started: a start method, or a context of multiprocessing.
            Default: "forkserver" for shards, multiprocessing's own for other data. ValueError without num_workers.
        num_threads: threads per worker; 0 with 0 workers runs inline. Default: 4 for shards, 0 for map-style data. They
            call `__getitem__` at the same time, without regard to `torch.manual_seed`. ValueError where torch reads.
        worker_memory: bytes that a worker of ours may allocate beyond what it starts with, besides the batches. One
            that needs more counts as lost. ValueError where torch reads.
        global_batch_size: samples (or windows) of one optimizer step over all ranks; give exactly one of the three
            sizes. It need not be divisible by the number of ranks; use it if that number may change.
        global_batch_tokens: LLM tokens of one optimizer step over all ranks, for shards. A step has the samples that
            end within its share of the epoch's tokens, so that it is off by less than one sample; the number of samples
            varies. Tokens of a sample are aligned up as `od.Packed(multiple_of=)` does; padding of `od.Padded` is not
            counted. A ramp is a list of (training tokens from which it applies, tokens per step) that begins at 0.
        accumulate: microbatches of every step, for shards: a step has `batch_size * accumulate` samples per rank, or
            `global_batch_size` in all; a microbatch has at most an even share, rounded up. 1: as many as caps need.
        seed: seed of the order, 0 by default for shards. The sequence of global batches depends on data set,
            exclusions, shuffle, seed, epoch and global batch size only, never on ranks or workers. Map-style data
            without a seed are shuffled as torch does: at each `iter()` by the loader's generator, over several ranks by
            rank 0's.
        cost: for shards a CostModel, with the phases of the model (None: every phase of the data costs its positions);
            for map-style data one integer per sample, or a callable sample -> int, called for all when the loader is
            made, in `num_workers` processes.
        cost_id: a name under which the cache folder keeps the costs that a callable computes, for the next loader or
            run. Change it when the data or the function change.
        balance: "none", "grouped", "grid", "global", or an `od.Balance`.
        dp: process group, DeviceMesh, `od.DataParallel` or (rank, size); default torch.distributed's world. In a mesh
            of several dims, the data-parallel dims balance ("dp_replicate", "dp_shard", "dp", "data"; DataParallel
            names others), and ranks that differ only in other dims get the same batches. Ranks that would plan other
            steps raise an error: with a group or mesh at construction, which is then a collective; by default at the
            first step, through the job's store. With (rank, size) nothing is compared; (0, 1) gives all samples here.
        on_error: "raise", "skip" (up to 1 % of the samples), or an `od.ErrorPolicy`.
        quarantine: (shard, key) pairs to leave out, or a JSON Lines file of `{"shard": ..., "key": ...}`.
        index: what several ranks do if their shards have no index. "build": build it together at construction, each for
            different shards, if torch.distributed is initialized. "require": raise.
        cache: an `od.Cache`: where each node keeps whole copies of its own shards of object storage. Default: what
            ORCHDATA_SHARD_CACHE and ORCHDATA_SHARD_CACHE_BYTES say, else none.
        engine: builds steps in place of worker processes: an `od.RayEngine`, for workers on other machines, or a value
            of your own with its method `open`. It gets `num_workers` workers for each rank that reads, with
            `num_threads`, `prefetch_factor`, `timeout`, `worker_init_fn` and `persistent_workers` as processes have
            them. ValueError with 0 workers, for an IterableDataset, and for data with a state of their own.

    Raises:
        ValueError: an argument is out of range, arguments contradict each other, or ranks differ.
        DataError: the index lists bad samples under on_error="raise"; names the first and their number.
        MissingIndexError: more than one rank and no index, without a process group or with index="require".
    """

    dataset: Any
    num_workers: int
    prefetch_factor: int | None
    drop_last: bool

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = DEFAULT_BATCH_SIZE,
        shuffle: bool | Shuffle | NDArray[Any] | None = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: CollateFn | None = None,
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
        accumulate: int = 1,
        seed: int | None = None,
        cost: CostModel | Callable[[Any], int] | Sequence[int] | None = None,
        cost_id: str | None = None,
        balance: str | Balance = "global",
        dp: Any = None,
        on_error: str | ErrorPolicy = "raise",
        quarantine: Quarantine | None = None,
        index: IndexUse = "build",
        cache: Cache | None = None,
        engine: OpensEngine | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self._given = {name: value for name, value in given.items() if value is not _DEFAULTS[name]}
        rank = resolve_rank(dp)
        agreement = Agreement(rank)
        with agreement.telling_others():
            arguments = Arguments(rank=rank, reaches_all=agreement.reaches_all, **given)
            self._runtime = Runtime(arguments, agreement)
            self._progress = Progress()
            self._iterated_at: object = None
            # The attributes that torch's loader has: arguments, with defaults filled in.
            prepared = self._runtime.prepared
            vars(self).update({name: given[name] for name in _ATTRIBUTES})
            self.batch_size, self.batch_sampler = arguments.batch_size, prepared.batch_sampler
            size = prepared.spec.plan.batches.describe()
            self.global_batch_size, self.global_batch_tokens = map(size.get, SIZES)
            has_sampler = prepared.sampler is not None or prepared.batch_sampler is not None
            self.sampler = prepared.sampler if has_sampler else TrainerEpochs(self._progress)
            self.collate_fn = collate_fn or prepared.collate_fn
            if num_workers and prefetch_factor is None:
                self.prefetch_factor = DEFAULT_PREFETCH
            self._own_names = frozenset((*vars(self), "_own_names"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _DEFAULTS and "_own_names" in self.__dict__:
            how = "after DataLoader is initialized: create another loader"
            raise ValueError(f"{name} attribute should not be set {how}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Return one line: the arguments that differ from the defaults, the rank, and the position."""
        (_, data), *arguments, (_, rank), (_, position) = facts_of(self)
        shown = [data, *(f"{name}={value}" for name, value in arguments)]
        return f"{type(self).__name__}({', '.join(shown)}; {rank}; {position})"

    _repr_html_ = orchdata._html

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the loader: the same arguments and position, and nothing runs yet.

        Raises TypeError for a loader over a process group, or one with an iterator among its arguments.
        """
        runtime, given = self._runtime, self._given
        consumed = [name for name, value in given.items() if isinstance(value, Iterator)]
        if consumed:
            raise TypeError(
                f"a DataLoader with an iterator for {consumed[0]}= cannot be copied or pickled, because the copy would "
                "get only the rest of the iterator: give a list, or an iterable that begins again at each iter()"
            )
        if not isinstance(given.get("dp"), tuple | None):
            raise TypeError(
                "a DataLoader over a process group or mesh cannot be copied or pickled, because the group belongs to "
                "its process: create the loader again on each rank, or give it dp=(rank, size)"
            )
        progress, seeds = copy.deepcopy(self._progress), copy.deepcopy(runtime.seeds.later)
        # The user may have replaced samplers, and added attributes. Of a mixture the weights may be others by now.
        own = self._own_names - (_SAMPLERS if runtime.sampler_steps else set())
        changed = {name: value for name, value in vars(self).items() if name not in own}
        state = self.state_dict() if runtime.prepared.spec.plan.order.sources else None
        copied = given, (runtime.rank.rank, runtime.rank.size), progress, seeds, changed, state
        return copyreg.__newobj__, (type(self),), copied  # type: ignore[attr-defined]

    def __setstate__(self, copied: tuple[Any, ...]) -> None:
        """Move a new loader with the same arguments to the position of the copied one. Raises ValueError in a process
        of another rank: it would get the samples of the copied rank, or all of them.
        """
        given, there, progress, seeds, changed, state = copied
        DataLoader.__init__(self, **given)
        runtime = self._runtime
        if there != (here := (runtime.rank.rank, runtime.rank.size)):
            raise ValueError(
                f"this DataLoader was copied on rank {there[0]} of {there[1]}, and this process is rank {here[0]} of "
                f"{here[1]}: create the loader here, or create the copied one with dp=(rank, size)"
            )
        if state is not None:
            runtime.load_state(state, (), self.num_workers)
        vars(self._progress).update(vars(progress))
        vars(self).update(changed)
        runtime.seeds.later = seeds

    @property
    def sampler(self) -> Any:
        """What samples are drawn from, as torch's loader has it. Raises TypeError for Ray Train, which replaces it."""
        check_not_prepared()
        if self.batch_sampler is None:
            check_not_skipped()
        return vars(self)["sampler"]

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        vars(self)["sampler"] = sampler

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Raises TypeError: Accelerate reads it on torch loaders before it builds another loader of their data set."""
        raise TypeError(
            "accelerator.prepare_data_loader builds a torch DataLoader of the data set, without plan or state: "
            "use od.hf.accelerate(loader, accelerator)"
        )

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank; with `accumulate` or caps there are more microbatches.

        Raises ValueError if the caller is a trainer that takes it for the number of microbatches.
        """
        # list(loader) also calls len(), as a hint, from the line of code that has called iter().
        self._follow_sampler()
        num_steps = self._runtime.count(self._progress.start.position)
        if self._runtime.has_microbatches and self._iterated_at != _calling_line():
            check_counted_by_len(num_steps)
        return num_steps

    def __iter__(self) -> Iterator[T_co]:
        """Iterate microbatches from the loader's position to the end of the epoch.

        The next `iter()` starts the next epoch, also after `break`, once a batch was delivered. After an error of the
        loader itself it continues with the step that failed.
        """
        if _has_trainer():
            check_not_prepared()
        self._iterated_at = _calling_line()
        return self._iterate(whole_steps=False)

    def steps(self) -> OptimizerSteps:
        """Return an iterable of optimizer steps, each the list of its microbatches, with this loader's state."""
        return OptimizerSteps(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: JSON-safe, the same on all ranks. Delivered steps count, prefetched ones do
        not; inside a step it is the start of the step.

        On one rank, it contains the state of a map-style data set, an iterable, its iterator or a sampler, if they have
        `state_dict` and `load_state_dict`. Between two epochs, this draws the random inputs of the next one.

        Raises RuntimeError if model inputs with slices of `od.Teams` were taken, and no attention over teams used, or
        inside a round of `od.rounds` whose features require a gradient.
        """
        self._runtime.context.delivery.team_use.check("state_dict() was called")
        self._follow_sampler()
        self._progress.check_rounds("state_dict() was called")
        return self._runtime.state(self._progress)

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Continue from `state` at the next iteration, in O(1).

        Args:
            state: a result of `state_dict`, from any rank of any number of ranks.
            allow: what may differ from the loader that wrote the state: "global_batch_size" and "global_batch_tokens",
                and the "weights" of a mixture: the rest of the epoch is then cut again from there on. With "samples"
                the next epoch begins if other samples are usable, or have other numbers of tokens.

        Raises StateError, naming the difference, if the state belongs to another data set, recipe, order or size, or to
        other usable samples, or if the data set in each worker has its own state and the number of workers differs.
        """
        position = self._runtime.load_state(state, allow, self.num_workers)
        self._progress.load(position, by_trainer=is_loaded_by_trainer())

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at the next iteration: at its start, or at the position of a loaded state of this epoch.

        It also sets the epoch of a data set of torch's, or a sampler, that has one.
        """
        self._progress.set_epoch(checked_epoch(epoch))
        self._runtime.set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def plan_at(self, epoch: int, step: int) -> Plan:
        """Return the plan of any step: which rank gets which samples. Nothing is read or decoded, and the loader keeps
        its position. Raises as `step_at`, except for DataError.
        """
        return make_plan(self._runtime.prepared.spec.plan, self._task_at(epoch, step))

    def _task_at(self, epoch: int, step: int) -> StepTask:
        draw = self._progress.draw_of(epoch)
        return self._runtime.prepared.steps.again(checked_epoch(epoch), checked_count(step, "step", 0), draw)

    def step_at(self, epoch: int, step: int, *, rank: int | None = None) -> list[Any]:
        """Build the microbatches of any step now, as `steps()` yields them. The loader keeps its position.

        A step of a month-old run is built again from its index and arguments: `dp=(0, 64)` stands for its 64 ranks.
        First load a state of the run if weights of a mixture changed or an epoch was cut again in the middle, and for
        an epoch of map-style data without a seed: arguments do not say these.

        Args:
            rank: the rank that gets them; default: this one.

        Samples that failed on other ranks are not masked (see `Batch.mask_failed`). Random draws of `__getitem__` or
        `collate_fn` are new ones. Nothing is counted in `stats()`.

        Raises:
            IndexError: the step is outside the epoch, or before the step from which it was cut again.
            ValueError: samples can only be read in turn: those of an IterableDataset or of the user's sampler.
            DataError: of the first sample that cannot be loaded, under on_error="raise".
        """
        runtime, spec = self._runtime, self._runtime.prepared.spec
        rank = spec.rank if rank is None else rank
        if checked_count(rank, "rank", 0) >= spec.plan.num_ranks:
            raise ValueError(f"rank must be below the loader's {spec.plan.num_ranks} ranks, got {rank}")
        task = self._task_at(epoch, step)
        built = replace(spec, rank=rank).open().build(task)
        failures = [failure for failure in built.failures if failure.reason != BLANK]
        if failures and runtime.raises:
            raise failures[0]
        return runtime.context.delivery.named(built.batches)

    def export_plan(
        self, path: str | PathLike[str], *, epochs: Iterable[int] = (0,), steps: range | None = None
    ) -> int:
        """Write which rank gets which sample in these epochs and steps (default: all steps of the first epoch), as an
        Arrow IPC file with one row per sample, or piece of one. Return the number of rows. For shards only.

        Columns: epoch, step, source (its name; "" without a mixture), pass (through the source), row (of the source's
        index), shard, key, piece, rank, team_size (the ranks that share it, from `rank` on), microbatch, llm_tokens,
        loss_tokens, and parts: for each image, clip or other part its modality, part (its index among the sample's
        parts), positions (that it gives the encoder), tokens (of the LLM) and rank (that encodes it: the sample's, or
        under assignment="per_phase" any).

        Nothing is read or decoded, and the loader keeps its position.

        Raises:
            ValueError: invalid epochs or steps, or a data set without an index; nothing is written then.
        """
        prepared = self._runtime.prepared
        return export_plan(path, prepared.spec, prepared.steps, prepared.fingerprint, of_epochs=epochs, steps=steps)

    def stats(self, *, reset: bool = False, flat: bool = False) -> dict[str, Any]:
        """Return balance, milliseconds by stage and failures of the steps delivered since the loader was made, or since
        the last call with `reset`: docs/stats.md describes every key.

        Args:
            flat: numbers alone, nested keys joined as in "milliseconds/waiting": for TensorBoard and the like.
        """
        found = self._runtime.stats.as_dict(reset=reset)
        return flattened(found) if flat else found

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """Return the listed failures of all ranks, each once, sorted by shard and key: a collective over `group`.

        If torch.distributed is not initialized, return those of this loader.
        """
        return self._runtime.stats.gather_failures(group)

    def close(self) -> None:
        """Stop the workers, or threads, that `persistent_workers` keeps."""
        self._runtime.close()

    def _iterate(self, *, whole_steps: bool) -> LoaderIterator:
        runtime, progress = self._runtime, self._progress
        if self._given.get("dp") is None:
            check_still_alone(runtime.rank)
        self._follow_sampler()
        ends, watcher = self._asked_by_trainers() if _has_trainer() else (False, None)
        loop = runtime.begin(progress)
        if ends or runtime.prepared.spec.plan.evens_tail:
            watcher = AccelerateEnd(lambda: runtime.count(loop.origin), lambda: runtime.num_in_tail(loop.origin))
        check = runtime.context.delivery.team_use.check if runtime.prepared.spec.plan.balance.teams else None
        return LoaderIterator(loop, whole_steps=whole_steps, as_torch=runtime.continues, watcher=watcher, check=check)

    def _asked_by_trainers(self) -> tuple[bool, Any]:
        """Return whether Accelerate must know the last batch of an epoch, and what watches an iteration for Lightning.
        Raises ValueError for trainers that would take steps apart.
        """
        runtime, start = self._runtime, self._progress.start
        position = start.position

        def is_known() -> bool:
            return runtime.prepared.known_count(position) is not None

        ends = check_accumulation(is_known, scales_loss=runtime.scales_loss)
        loop = lightnings_loop()
        if loop is None:
            return ends, None
        if type(loop).__name__ == "_EvaluationLoop":
            if is_known():
                check_validation(loop.trainer, position.epoch, lambda epoch: runtime.count(Position(epoch)))
            return ends, None
        watcher = LightningFit(loop, runtime)
        watcher.check_accumulation()
        if is_known():
            watcher.check_epochs(position, lambda epoch: runtime.count(Position(epoch)))
        else:
            watcher.is_ahead = start.by_trainer and position.step > 0
        return ends, watcher

    def _follow_sampler(self) -> None:
        """Draw from the current sampler: trainers replace the user's by `object.__setattr__`."""
        if steps := self._runtime.sampler_steps:
            steps.follow(self.sampler if self.batch_sampler is None else self.batch_sampler)


def _has_trainer() -> bool:
    """Return whether this process has loaded a package that may iterate a loader in its own way."""
    return any(name in sys.modules for name in ("accelerate", "lightning", "pytorch_lightning", "ray"))


def _calling_line() -> object:
    """Return the instruction from which this function's caller was called: equal for two calls from one instruction."""
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


_DEFAULTS = {name: each.default for name, each in inspect.signature(DataLoader.__init__).parameters.items()}
