"""Runtime: the running parts of a loader, apart from its position; and its description, which all ranks must share.

Arguments --data set--> PreparedDataset --> Runtime --(an iteration)--> Stream

The description is JSON that is equal on every rank. Plans are integer arithmetic with stable sorts, so it has our
version but not those of numpy or numba. It contains no default repr, because its memory address differs between ranks.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

import orchdata
from orchdata.balancers.costs.model import CostModel
from orchdata.batch.batch import ModelInputs
from orchdata.building.collate import MapContent
from orchdata.building.step import Builder
from orchdata.dataset.arguments import Arguments, PreparedDataset
from orchdata.dataset.map_style import prepare_iterable, prepare_map_style
from orchdata.dataset.prepared import check_allowed, restore, state_of
from orchdata.delivery.policy import FailureBudget, Stats
from orchdata.engines.engine import WorkerSeeds, can_pin
from orchdata.engines.processes.engine import start_server
from orchdata.engines.warm import Warming
from orchdata.finalizers import Ending, wait_for_finalizers
from orchdata.loop.loop import EpochLoop, Position, Progress, Stream, place_of
from orchdata.loop.planned import Delivery, LoopContext, PlannedSource
from orchdata.loop.state import State
from orchdata.loop.torch_stream import IterableSource, MapSource
from orchdata.loop.torch_workers import IterableContent, set_epoch, torch_loader
from orchdata.notices import warn_once, warn_user
from orchdata.order.sampler import SamplerSteps
from orchdata.order.steps import OrderedSteps, StreamSteps, begin_of, is_stateful
from orchdata.planning.balance import layout_of
from orchdata.ranks.agreement import DATA, Agreement
from orchdata.ranks.parallel import DataParallel


class Runtime:
    """The running parts of a loader.

    Attributes:
        prepared: the data set.
        stores_rank_state: states may store things of this rank alone: a torch data set on one rank.
        continues: it is also read by torch's loader: an iteration continues after a step that failed.
    """

    def __init__(self, arguments: Arguments, agreement: Agreement) -> None:
        rank = self.rank = arguments.rank
        self.stores_rank_state = rank.size == 1 and not arguments.in_shards
        self.continues = self.stores_rank_state and arguments.by_torch
        self._draws_seeds = not arguments.in_shards
        self.raises = arguments.on_error.action == "raise"
        self.keep_dataset_state = not arguments.num_workers or arguments.persistent_workers

        # The workers of an engine of the user's may be on other machines.
        cores = len(os.sched_getaffinity(0))
        if arguments.engine is None and arguments.num_workers > cores:
            warn_user(
                f"This DataLoader will create {arguments.num_workers} worker processes on {cores} cores: excessive "
                "worker creation might get DataLoader running slow or even freeze; lower num_workers"
            )
        # Start what takes a while. A loader that is sent to a new process (mp.spawn) starts the server later.
        if arguments.context is not None and not getattr(multiprocessing.current_process(), "_inheriting", False):
            start_server(arguments.context, arguments.dataset.orchdata_preloads if arguments.in_shards else ())
        self._warming = Warming(arguments.families)

        # Prepare the data set; ranks that would plan different steps raise an error.
        def build() -> tuple[PreparedDataset, Builder | None]:
            if arguments.in_shards:
                prepared: PreparedDataset = arguments.dataset.prepare(arguments)
            elif arguments.is_iterable:
                return prepare_iterable(arguments), None
            else:
                prepared = prepare_map_style(arguments)
            return prepared, prepared.spec.open()

        prepared, builder = agreement.make(build, lambda built: describe_loader(arguments, built[0]))
        self.prepared, spec = prepared, prepared.spec

        # Create the parts that run once a step is requested.
        keeps_workers = arguments.persistent_workers and bool(arguments.num_workers)
        self.seeds = WorkerSeeds(arguments.generator, persistent=keeps_workers)
        reads = None if builder is None else builder.reads
        self.stats = Stats(reads)
        workers = arguments.workers(reads_far=spec.reads_far)
        opened = prepared.filler
        self._filler = opened and opened(spec, rank, arguments.cache, reads, forks=workers.forks)
        if self._filler is not None:
            Ending(self, self._filler.stop)
        budget = FailureBudget(arguments.on_error, self.stats, prepared.num_indexed + prepared.num_lost, rank.size)
        inputs = arguments.collate_fn if isinstance(arguments.collate_fn, ModelInputs) else None
        unnamed = prepared.of_processor if inputs is None and spec.layout is not None else ()
        delivery = Delivery(spec, rank, budget, arguments.timeout, inputs, unnamed)
        self.context = LoopContext(spec, builder, prepared.steps, rank, agreement, delivery)

        # Torch's own loader reads the data, or an engine builds planned steps.
        content, counts = spec.content, self.stats.torch
        in_order = arguments.in_order or not arguments.by_torch or rank.size > 1
        if in_order and not arguments.in_order and arguments.num_workers:
            why = "steps are planned over ranks, or are of shards, and a state of them is a position"
            warn_once("in_order=False", f"in_order=False has no effect: batches stay in order, because {why}")
        pin_memory = arguments.pin_memory and can_pin()
        opens = partial(torch_loader, workers=workers, in_order=in_order, pin_memory=pin_memory)
        self._source: IterableSource | MapSource | PlannedSource
        if isinstance(content, IterableContent):
            self._source = IterableSource(content, workers, counts, opens)
        elif isinstance(content, MapContent) and arguments.by_torch:
            has_state = self.stores_rank_state and is_stateful(content.dataset)
            self._source = MapSource(content, workers, counts, has_state, in_order or not workers.num_workers, opens)
        else:
            self._source = PlannedSource(workers, self._warming, pin_memory=pin_memory)
        budget.start(prepared.failures, lost=prepared.num_lost)
        if prepared.known_count(Position(0)) == 0:  # a training would end at once
            size = ", ".join(f"{name}={value}" for name, value in prepared.spec.plan.batches.describe().items())
            drop_last = arguments.drop_last
            way_out = ": make the batch smaller, or leave out drop_last" if prepared.num_samples and drop_last else ""
            chosen = f"no sample is chosen by {prepared.none_chosen}"
            rows = f"{prepared.num_samples} usable rows of {prepared.num_indexed} samples, {size} over all ranks, "
            why = chosen if prepared.none_chosen else f"{rows}drop_last={drop_last}{way_out}"
            warn_user(f"the loader has no steps: {why}")

    @property
    def has_microbatches(self) -> bool:
        """Whether a step may have several microbatches."""
        plan = self.prepared.spec.plan
        return bool(plan.balance.caps) or plan.accumulate > 1

    @property
    def accumulate(self) -> int:
        """Microbatches that every step has; 1 if it has as many as caps need."""
        return self.prepared.spec.plan.accumulate

    @property
    def scales_loss(self) -> bool:
        """Whether batches carry a `loss_scale` that covers the whole optimizer step."""
        return self.has_microbatches or self.prepared.spec.layout is not None

    def begin(self, progress: Progress) -> EpochLoop:
        """Begin an iteration at the loader's position. Raises ValueError if the data set chooses no sample."""
        if chosen_by := self.prepared.none_chosen:
            raise ValueError(
                f"no sample is chosen by {chosen_by}, so there is no step to iterate: choose other bounds, or iterate "
                "only if len(dataset) is not 0"
            )
        keeps, first = self.keep_dataset_state, self.prepared.on_first_step
        loop = EpochLoop(progress, self._open_stream, keeps, self.stores_rank_state, first)
        # The base seed of the workers. An iteration that continues from a state may use the state's.
        if self.stores_rank_state:
            origin = loop.origin
            # Workers without a state must not repeat for later steps the draws of the first ones.
            again = origin.is_drawn and (not origin.step or origin.workers or self.prepared.is_iterable)
            known = origin.base_seed if again else None
            loop.base_seed = self.seeds.draw() if known is None else self.seeds.follow(known)
            progress.seed(loop.base_seed)
        elif self._draws_seeds:
            loop.base_seed = self.seeds.draw()
        return loop

    @property
    def sampler_steps(self) -> SamplerSteps | None:
        """Steps of the loader's sampler as it is now, if they are: the user may have changed or replaced it."""
        steps = self.prepared.steps
        return steps if self.stores_rank_state and isinstance(steps, SamplerSteps) else None

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, if it has epochs: workers that are kept have copies of it."""
        if set_epoch(getattr(self.prepared.spec.content, "dataset", None), epoch):
            self.close()

    def count(self, position: Position) -> int:
        """Return the optimizer steps of its epoch, for the user. Raises TypeError if they are known only at its end."""
        steps = self.prepared.steps
        num_steps = steps.count(position.epoch, position.draw)
        if isinstance(steps, StreamSteps):
            steps.asked_length = num_steps
        return num_steps

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the loader's state: see `DataLoader.state_dict`."""
        position = progress.position
        if self.stores_rank_state:
            position = progress.promised(self.seeds.draw, self.prepared.steps.draw)
            if not position.workers:
                position = replace(position, workers=self._source.state_before())
        return state_of(self.prepared, position).to_json()

    def even_tail(self) -> None:
        """From now on, the last step of an epoch of map-style data has as many samples on each rank, with repeats."""
        spec = self.prepared.spec
        if not isinstance(spec.content, MapContent) or self.rank.size == 1:
            return
        if spec.content.batched:
            plan = replace(spec.plan, evens_tail=True)
            self.install(replace(self.prepared, spec=replace(spec, plan=plan)))
        elif self.prepared.num_samples % self.rank.size:
            warn_once(
                "gathering with batch_size=None",
                "the last step of an epoch repeats a sample on some ranks, and with batch_size=None "
                "accelerator.gather_for_metrics cannot leave the repeats out: give batch_size=1",
            )

    def num_in_tail(self, position: Position) -> int:
        """Return the samples of the last step of its epoch, without repeats; -1 if ranks may have other numbers."""
        plan, epoch = self.prepared.spec.plan, position.epoch
        if not plan.evens_tail:
            return -1
        begin = begin_of(position.draw) if isinstance(self.prepared.steps, OrderedSteps) else None
        start, stop = plan.batches.bounds(plan.last_step(epoch, begin), plan.order.length(epoch), epoch, begin)
        return stop - start

    def load_state(self, state: dict[str, Any], allow: Sequence[str], num_workers: int) -> Position:
        """Return the position of a state, after the order that it stores was installed."""
        check_allowed(allow)
        prepared, position = restore(self.prepared, State.from_json(state), allow, num_workers)
        if prepared is not self.prepared:
            self.install(prepared)
        if self.stores_rank_state:
            self.close()  # persistent workers are at a later position
        return position

    def install(self, prepared: PreparedDataset) -> None:
        """Continue with another order of the same data set."""
        self.close()  # persistent workers would continue with the former order
        self.prepared = prepared
        spec, builder = prepared.spec, self.context.builder
        assert builder is not None
        if self._filler is not None:
            self._filler.order = spec.plan.order
        self.context.delivery.spec = spec
        builder = builder.planned_by(spec.plan)
        self.context = replace(self.context, spec=spec, builder=builder, steps=prepared.steps)

    def close(self) -> None:
        """Stop persistent workers or threads, and what fills the cache."""
        self._source.close()
        if self._filler is not None:
            self._filler.stop()
        wait_for_finalizers()

    def _open_stream(self, loop: EpochLoop) -> Stream:
        """Open the steps of one iteration: from torch's own loader, or from an engine."""
        wait_for_finalizers()  # what an iteration before has left
        stream = self._source.stream(self.context, loop)
        if self._filler is not None and not self.context.delivery.receives:
            self._filler.begin(place_of(stream, self.prepared.known_count(loop.origin)))
        return stream


_MAX_DEPTH = 8
_SAMPLED = 64  # about as many items of a list are compared: they may be large


def describe_loader(arguments: Arguments, prepared: PreparedDataset) -> dict[str, Any]:
    """Return what plans and data of the loader depend on, JSON-safe."""
    costs = prepared.spec.plan.costs
    peers = arguments.dp if isinstance(arguments.dp, DataParallel) else DataParallel(None)
    blank = arguments.on_error.blank_names
    described: dict[str, Any] = {
        "orchdata": orchdata.__version__,
        **prepared.fingerprint,
        "num_ranks": arguments.rank.size,
        "ranks_per_node": prepared.spec.plan.ranks_per_node,
        "num_steps": prepared.spec.plan.num_steps,
        "index": None if (index := getattr(costs, "index", None)) is None else index.totals,
        DATA: None if arguments.in_shards else _dataset(arguments.dataset),
        "balance": arguments.balance,
        "accumulate": arguments.accumulate,
        "cost": arguments.cost.describe() if isinstance(arguments.cost, CostModel) else None,
        "drop_last": arguments.drop_last,
        "on_error": arguments.on_error.action,
        "blank": _digest_of(blank, len(blank)),
        "collate_fn": layout_of(arguments.collate_fn) or arguments.collate_fn,
        "inputs": arguments.collate_fn.describe() if isinstance(arguments.collate_fn, ModelInputs) else None,
        **{name: getattr(peers, name) for name in ("replicate", "encoder_dims", "averaged", "gradients")},
        "check_plan_every": arguments.rank.check_plan_every,
    }
    plain: dict[str, Any] = stable(described)
    return plain


def stable(value: Any, depth: int = 0) -> Any:
    """Return JSON of any value, equal in every process: dtype and shape of an array, the name of what is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, np.generic):
        return value.item() if isinstance(value, np.number | np.bool_) else str(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, bytes | bytearray):
        return _digest(bytes(value))
    if depth >= _MAX_DEPTH:
        return name_of(value)
    if isinstance(value, Mapping):
        return {str(key): stable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((stable(item, depth + 1) for item in value), key=json.dumps)
    if isinstance(value, list | tuple | range):
        return [stable(item, depth + 1) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": name_of(value)} | {
            field.name: stable(getattr(value, field.name), depth + 1) for field in fields(value)
        }
    return name_of(value)


def name_of(value: Any) -> str:
    """Return the name of a function or class; of any other value that of its type."""
    if isinstance(value, Enum):
        return f"{name_of(type(value))}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    while not hasattr(value, "__qualname__") and hasattr(value, "func"):  # functools.partial
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None)
    # The name of the program in a rank that multiprocessing has started from another rank.
    return f"{'__main__' if module == '__mp_main__' else module}.{named.__qualname__}"


def _dataset(dataset: Any, depth: int = 0) -> dict[str, Any]:
    """Return the class of map-style data, and what it says of its samples: a fingerprint, or digests of indices and of
    a list's items. The number of samples is in the fingerprint of the loader.
    """
    described: dict[str, Any] = {"type": name_of(dataset)}
    fingerprint, indices = (getattr(dataset, name, None) for name in ("_fingerprint", "indices"))
    if isinstance(fingerprint, str):  # Hugging Face's
        return described | {"fingerprint": fingerprint}
    if isinstance(dataset, list | tuple | range):
        return described | {"items": _digest_of(dataset[:: 1 + len(dataset) // _SAMPLED], len(dataset))}
    if isinstance(indices, list | tuple | range | np.ndarray | torch.Tensor):
        described["indices"] = _digest_of(indices, len(indices))
    if depth < _MAX_DEPTH and isinstance(dataset, Subset):
        described["of"] = _dataset(dataset.dataset, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(dataset, ConcatDataset):
        described["of"] = {str(number): _dataset(part, depth + 1) for number, part in enumerate(dataset.datasets)}
    return described


def _digest_of(items: Any, length: int) -> str:
    plain = items.tolist() if hasattr(items, "tolist") else list(items)
    numbers = plain if all(type(item) is int for item in plain) else stable(plain)
    return f"{length} of them, {_digest(json.dumps(numbers).encode())}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
