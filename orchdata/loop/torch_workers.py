"""The batches of torch's data sets, built where torch's own loader reads them: here, or in worker processes.

    BatchStream, of an IterableDataset --in each worker--> Taken(batch, worker, state) --> this process
    Items, of map-style data, by steps --in each worker--> Made(step, batch or error, state) --> this process

Each worker has its own copy. That of an IterableDataset learns its share from `get_worker_info()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from orchdata.building.collate import MapContent, StepInfo, step_info, takes_step
from orchdata.engines.engine import Workers, explain_pickling, seed_process
from orchdata.engines.processes.message import Failed, Sent, packed, unpacked
from orchdata.engines.processes.worker import is_lost_by_torch, sendable
from orchdata.order.steps import exhaust, restore_states, states_of


@dataclass(frozen=True, kw_only=True)
class IterableContent:
    """An IterableDataset, and how a `collate_fn` (default: torch's) makes batches of its samples."""

    dataset: Any
    batch_size: int | None  # None passes samples to collate_fn one by one
    drop_last: bool  # whether the last batch of each copy is dropped if it is smaller
    collate_fn: Callable[..., Any] | None

    @property
    def collate(self) -> Callable[..., Any]:
        """A function that makes a batch of a list of samples, or of one sample."""
        return self.collate_fn or (default_convert if self.batch_size is None else default_collate)

    @cached_property
    def takes_step(self) -> bool:
        """Whether collate_fn has a parameter `step`: it is then called in this process, where steps are counted."""
        return self.collate_fn is not None and takes_step(self.collate_fn)

    def collated(self, samples: list[Any], **options: Any) -> Any:
        """Return the batch of these samples."""
        return self.collate(samples[0] if self.batch_size is None else samples, **options)

    def collated_at(self, samples: list[Any], epoch: int, step: int) -> Any:
        """Return the batch of a step, from a collate_fn that has a parameter `step`."""
        info = step_info(epoch, step, len(samples), 1)
        return self.collated(samples, step=info)

    def open(self, watch: Any) -> NoReturn:
        raise ValueError(f"{self.name_of(0)} has no row: an IterableDataset is iterated")

    def name_of(self, row: int) -> str:
        return f"an item of {type(self.dataset).__name__}"


class Taken(NamedTuple):
    """A batch from a worker."""

    batch: Any  # from collate_fn, or the list of samples if collate_fn is called later
    num_samples: int  # 0 if this is not a batch (see `BatchStream`)
    worker: int = 0
    steps: int = 0  # batches that the worker has taken
    is_last: bool = False  # whether the data set has ended
    state: bytes | None = None  # the data set's own, pickled; None if it has none, or is in this process
    error: Exception | None = None  # in place of the batch, if torch's loader would lose it

    def progress(self, epoch: int) -> dict[str, Any]:
        """Return the state of the worker's data set after this batch."""
        progress = {"epoch": epoch, "steps": self.steps, "ended": self.is_last}
        return progress if self.state is None else progress | unpacked(self.state)


class Batches:
    """The batches of one pass through a data set, in the process that iterates it: `worker`, 0 for the training
    process. With `waits` it begins with a `Taken` without samples.

    It is not a generator, so that after an error the next batch can be taken, as with torch's loader.
    """

    def __init__(self, content: IterableContent, worker: int = 0, *, waits: bool = False) -> None:
        self._content = content
        self._worker = worker
        self._waits = waits
        self._items: Iterator[Any] | None = None
        self._skipped = 0  # batches that are still to be taken and dropped
        self.steps = 0
        self.is_last = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Taken:
        try:
            return self._next()
        except Exception as error:
            if get_worker_info() is None or not is_lost_by_torch(error):
                raise
            return Taken(None, 0, self._worker, error=sendable(error, f"in DataLoader worker process {self._worker}"))

    def _next(self) -> Taken:
        while self._skipped and not self.is_last:
            with suppress(StopIteration):
                samples = self._take()  # what it raises was raised before, for a batch that was not counted
                self._skipped -= 1
                if not self._content.takes_step:  # else the training process has called it
                    self._collated(samples)
        if self._waits:
            self._waits = False
            return Taken(None, 0, self._worker)
        samples = self._take()
        batch = samples if self._content.takes_step else self._collated(samples)
        state = None
        if get_worker_info() is not None and (own := self._own_state()):
            state = packed(own)
        return Taken(batch, len(samples), self._worker, self.steps, self.is_last, state)

    def state(self, epoch: int | None, steps: int = 0) -> dict[str, Any]:
        """Return the data set's current state, after this number of batches was delivered."""
        return {"epoch": epoch, "steps": steps, "ended": self.is_last} | self._own_state()

    def restore(self, state: Mapping[str, Any], epoch: int) -> None:
        """Continue in `epoch` after a state, or start the epoch if the state is the end of the one before."""
        if not has_own_state(state):
            self._skipped = int(state["steps"]) if state.get("epoch") == epoch else 0
            return
        dataset = self._content.dataset
        if (own := _own_epoch(state)) is not None:
            set_epoch(dataset, own)  # Hugging Face's streams pass over a state of another epoch
        restore_states(state, dataset=dataset)
        self.steps, self.is_last = state["steps"], state["ended"]
        if "iterator" in state or not self.is_last:
            restore_states(state, iterator=self._iterator())
        if state["epoch"] not in (None, epoch):
            if not self.is_last:
                exhaust(self._iterator())  # it has yielded its last item, but not yet raised StopIteration
            begin_after(dataset, state, epoch)
            self._items, self.is_last, self.steps = None, False, 0

    def _own_state(self) -> dict[str, Any]:
        dataset, items = self._content.dataset, self._iterator()
        return states_of(iterator=items) if items is dataset else states_of(dataset=dataset, iterator=items)

    def _iterator(self) -> Iterator[Any]:
        if self._items is None:
            self._items = iter(self._content.dataset)
        return self._items

    def _take(self) -> list[Any]:
        """Return the samples of the next batch. Raises StopIteration at the end, and what the data set raises."""
        if self.is_last:
            raise StopIteration
        size, items = self._content.batch_size or 1, self._iterator()
        samples: list[Any] = []
        with suppress(StopIteration):
            while len(samples) < size:
                samples.append(next(items))  # not islice: a data set that is its own iterator may restart at `iter()`
        self.is_last = len(samples) < size
        if not samples or (self.is_last and self._content.drop_last):
            raise StopIteration
        self.steps += 1
        return samples

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return self._content.collated(samples)
        except StopIteration as error:  # it would look like the end of the data set
            raise RuntimeError("collate_fn raised StopIteration") from error


class BatchStream(IterableDataset[Taken]):
    """A data set of batches, which torch's loader iterates in place of the user's data set.

    A pass that resumes inside an epoch must begin with the worker after the one that delivered last, but torch's loader
    begins with the first: the workers up to that one begin with a `Taken` without samples.

    Args:
        states: for each worker, the state that its data set starts with; None for its own.
        epoch: of the first step.
        last: worker that delivered the last step before; -1 for none.
        first: batches of the first pass, if this process has begun it already.
        restored: the state that an earlier pass in this process began with.
    """

    def __init__(
        self,
        content: IterableContent,
        states: Sequence[Mapping[str, Any] | None],
        *,
        epoch: int,
        last: int,
        first: Batches | None = None,
        restored: Mapping[str, Any] | None = None,
    ) -> None:
        self.content = content
        self.first = first
        self._restored = restored
        self._states = states
        self._epoch = epoch
        self._last = last

    def __iter__(self) -> Batches:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        waits = worker <= self._last < num_workers - 1
        batches = self.first or Batches(self.content, worker, waits=waits)
        state = self._states[worker] if self._states else None
        if state is not None:
            batches.restore(state, self._epoch)
        elif self._restored is not None:
            begin_after(self.content.dataset, self._restored, self._epoch)
        # A later pass in this process is another epoch.
        self._states, self._last, self.first, self._restored = (), -1, None, state
        self._epoch += 1
        if info is None:
            self.first = batches  # this process needs its state
        return batches


def begin_after(dataset: Any, state: Mapping[str, Any], epoch: int) -> None:
    """Begin an epoch after one that began with a state: Hugging Face's streams keep to it until their epoch changes."""
    own = _own_epoch(state)
    if has_own_state(state) and (own is None or getattr(dataset, "epoch", own) == own):
        set_epoch(dataset, epoch if own is None else max(epoch, own + 1))


def set_epoch(dataset: Any, epoch: int) -> bool:
    """Set the epoch of a data set that has one, and return whether it has."""
    has_epoch = callable(getattr(dataset, "set_epoch", None))
    if has_epoch:
        dataset.set_epoch(epoch)
    return has_epoch


def has_own_state(state: Mapping[str, Any]) -> bool:
    """Return whether a data set's state contains more than how far it was iterated."""
    return bool(state.keys() - {"epoch", "steps", "ended"})


def _own_epoch(state: Mapping[str, Any]) -> int | None:
    """Return the epoch in the data set's own state, if it has one."""
    own = state.get("dataset")
    epoch = own.get("epoch") if isinstance(own, Mapping) else None
    return epoch if isinstance(epoch, int) else None


class Asked(NamedTuple):
    """A step of map-style data, as torch's loader hands it to a worker."""

    step: int
    items: list[Any]  # indices of this rank's items
    info: StepInfo | None = None  # for a collate_fn that has a parameter `step`


class Made(NamedTuple):
    """A step of map-style data from torch's loader."""

    step: int  # -1 for an answer to no step
    batch: Any = None  # what collate_fn returned, or `Failed`
    worker: int = 0
    state: bytes | None = None  # the data set's own, pickled; None if it has none, or is in this process


class Items(Dataset[Made]):
    """A map-style data set by steps, which torch's loader reads in place of the user's. `states` are those that the
    data set of each worker starts with; None for its own, empty if nothing is restored. With `has_state`, its state
    comes with each step.
    """

    def __init__(self, content: MapContent, states: Sequence[Mapping[str, Any] | None], *, has_state: bool) -> None:
        self.content = content
        self._states = states
        self._has_state = has_state
        self.worker: int | None = None  # not of `get_worker_info`: this process may be a worker of another loader

    def __getitem__(self, asked: Asked | None) -> Made:
        if asked is None:
            return Made(-1)
        if (worker := self.worker) is None:
            return Made(asked.step, self.content.made(asked.items, asked.info))
        try:
            sent = Sent(self.content.made(asked.items, asked.info))
            state = packed(states_of(dataset=self.content.dataset)) if self._has_state else None
            return Made(asked.step, sent, worker, state)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is handed over
            where = f"in DataLoader worker process {worker}"
            return Made(asked.step, Sent(Failed(sendable(error, where))), worker)

    def restore(self, worker: int) -> None:
        """Begin with the state of this worker; 0 is also this process."""
        if self._states:
            restore_states(self._states[worker] or {}, dataset=self.content.dataset)


def torch_loader(
    dataset: BatchStream | Items,
    workers: Workers,
    *,
    base_seed: int,
    in_order: bool,
    pin_memory: bool,
    sampler: Iterable[Asked | None] | None = None,
) -> DataLoader[Any]:
    """Return torch's loader over batches; it starts workers at `iter()`."""
    # torch's own base seed is not used: our loader draws it, or a state has stored it.
    common: dict[str, Any] = {"batch_size": None, "collate_fn": _same, "pin_memory": pin_memory, "sampler": sampler}
    common["generator"] = torch.Generator()
    if not workers.num_workers:
        return DataLoader(dataset, **common)
    return DataLoader(
        dataset,
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor,
        timeout=workers.timeout,
        multiprocessing_context=workers.multiprocessing_context,
        worker_init_fn=partial(_begin_worker, base_seed, workers.worker_init_fn),
        persistent_workers=workers.persistent_workers,
        in_order=in_order,
        **common,
    )


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return `iter(loader)`. Raises TypeError that names a member which cannot be sent to a worker."""
    try:
        return iter(loader)
    except Exception as error:
        if isinstance(loader.dataset, BatchStream | Items):
            explain_pickling(loader.dataset.content, error)
        raise


def _begin_worker(base_seed: int, worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """In a worker: set its seeds, and the data set that `get_worker_info()` returns."""
    info: Any = get_worker_info()
    read = info.dataset
    # The class does not let its attributes be set.
    object.__setattr__(info, "seed", seed_process(base_seed, worker))
    object.__setattr__(info, "dataset", read.content.dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)
    if isinstance(read, Items):
        read.worker = worker
        read.restore(worker)


def _same(batch: Any) -> Any:
    return batch
