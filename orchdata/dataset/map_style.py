"""Data sets of torch's, prepared: map-style items, balanced by one integer each, and IterableDatasets.

Costs of items: rows -> cost(dataset[row]), kept in the cache folder under a name.

name --> file of the cache folder --some items are tried again--> costs, if they are the same; else all are measured
rows --chunks--> a worker of torch's own loader, or this process --costs, or why an item cannot be loaded--> in order

Nothing identifies a map-style data set and a function safely, so without a name of the user's nothing is kept for
another run. Of several processes with one cache folder, one measures, and the others wait for its file. The ranks of a
job agree on a name of their own if none is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import operator
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from orchdata.building.collate import MapContent, map_loader
from orchdata.dataset.arguments import Arguments, PreparedDataset, is_sharded
from orchdata.delivery.policy import Unusable, refuse_above_budget
from orchdata.engines.engine import Workers, described, pickles
from orchdata.loaders.errors import NOT_DATA, DataError, FunctionError
from orchdata.loaders.functions import line_in, source_digest
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import names_in, write_whole
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loop.torch_workers import IterableContent
from orchdata.notices import progress_bar, warn_once, warn_user
from orchdata.order.order import Order, Shuffle
from orchdata.order.sampler import AllRanksSampler, SamplerOrder, SamplerSteps, Source, TorchSampler
from orchdata.order.steps import GlobalBatches, OrderedSteps, Steps, StreamSteps
from orchdata.planning.parts import ArrayCosts, EqualCosts
from orchdata.ranks.first_comer import done_by_first
from orchdata.ranks.parallel import Rank

Ints = NDArray[np.int64]
KIND: Final = b"item"
FORMAT: Final = 1
_CHECKED: Final = 8
"""Items whose costs are compared when they are read."""
_JOB_PREFIX: Final = "job-"
"""Of files that only the ranks of one job read."""
_KEEP_SECONDS: Final = 24 * 3600
_made_in_job: Counter[str] = Counter()


def prepare_map_style(arguments: Arguments) -> PreparedDataset:
    """Prepare `dataset[i]` for i below `len(dataset)`, balanced by `cost`. Raises as DataLoader documents."""
    dataset, sampler, batch_sampler = arguments.dataset, arguments.sampler, arguments.batch_sampler
    rank, batched = arguments.rank, arguments.batched
    _check(arguments)
    num_indexed = len(dataset) if hasattr(dataset, "__len__") else 0
    values, failures = _map_costs(arguments)
    refuse_above_budget([Unusable(failures, 0, num_indexed)], arguments.on_error)
    usable: Ints | None = None
    if failures and sampler is None and batch_sampler is None:
        usable = np.delete(np.arange(num_indexed), [int(failure.key) for failure in failures])
    batches = arguments.batches
    # Torch's generator, or `generator`, shuffles where there is no seed.
    is_plain = arguments.seed is None and not isinstance(arguments.shuffle, Shuffle)
    is_drawn = is_plain and (rank.size == 1 or arguments.reaches_all)
    order: Order | SamplerOrder
    steps: Steps
    if sampler is None and batch_sampler is None and arguments.shuffled is not None and not is_drawn:
        # A seeded order, as of shards.
        excluded = None if usable is None else np.setdiff1d(np.arange(num_indexed), usable)
        order = Order(num_indexed, shuffle=arguments.shuffled, seed=arguments.order_seed, excluded=excluded)
        check = partial(_check_size, dataset, num_indexed)
        steps = OrderedSteps(batches=batches, order=order, check=check)
    else:
        # A sampler: the user's, or the one that torch's loader would create.
        if sampler is None and batch_sampler is None:
            data = dataset if usable is None else range(len(usable))
            shuffled = arguments.shuffled is not None
            sampler = RandomSampler(data, generator=arguments.generator) if shuffled else SequentialSampler(data)
        chosen = sampler if batch_sampler is None else batch_sampler
        is_single = rank.size == 1
        if is_single and batch_sampler is None and batched:
            batch_sampler = BatchSampler(sampler, batches.size, batches.drop_last)
        elif is_single and batch_sampler is not None:
            sampler = SequentialSampler(dataset)
        source, size = _source(sampler, batch_sampler, dataset, rank)
        if size:
            batches = GlobalBatches(size=size * rank.size, drop_last=batch_sampler.drop_last)
            sampler = batch_sampler.sampler
        steps = SamplerSteps(
            source,
            batched=batch_sampler is not None and not size,
            batches=batches,
            usable=usable,
            integers=values is not None or not is_single,
            as_drawn=is_single and arguments.by_torch,
        )
        order = SamplerOrder.of(chosen if is_single else source.sampler, chosen if is_single else source)
    content = MapContent(
        dataset=dataset,
        num_rows=num_indexed,
        collate_fn=cast("Any", arguments.collate_fn),
        batched=batched,
        skip_errors=arguments.on_error.action == "skip",
    )
    costs = EqualCosts() if values is None else ArrayCosts(values)
    if arguments.dp is None and arguments.sampler is None and arguments.batch_sampler is None:
        _warn_shared(dataset, rank)
    return PreparedDataset(
        collate_fn=default_collate if batched else default_convert,
        spec=arguments.build_spec(costs, order, batches, content),
        fingerprint={
            "dataset": {
                "type": type(dataset).__name__,
                "num_samples": num_indexed,
                "costs": None if values is None else hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest(),
            },
            "order": order.describe(),
            **batches.describe(),
        },
        failures=failures,
        num_indexed=num_indexed,
        torch_steps=steps,
        sampler=sampler,
        batch_sampler=batch_sampler,
    )


def prepare_iterable(arguments: Arguments) -> PreparedDataset:
    """Prepare an IterableDataset, on one rank."""
    dataset, batches, batched = arguments.dataset, arguments.batches, arguments.batched
    name = type(dataset).__name__
    content = IterableContent(
        dataset=dataset,
        batch_size=batches.size if batched else None,
        drop_last=batches.drop_last,
        collate_fn=cast("Any", arguments.collate_fn),
    )
    order = SamplerOrder(sampler=name, num_samples=sys.maxsize)
    return PreparedDataset(
        collate_fn=default_collate if batched else default_convert,
        spec=arguments.build_spec(EqualCosts(), order, batches, content),
        fingerprint={"dataset": {"type": name}, **batches.describe()},
        failures=[],
        num_indexed=0,
        torch_steps=StreamSteps(length=partial(len, dataset), batches=batches),
    )


def _warn_shared(dataset: Any, rank: Rank) -> None:
    """Warn once, on rank 0, that a map-style data set is split over ranks although `dp` was not passed."""
    if rank.size == 1 or rank.rank:
        return
    size, ranks, split = len(dataset), rank.size, ""
    if isinstance(dataset, Subset):
        whole = len(cast("Any", dataset.dataset))
        if abs(size * ranks - whole) < ranks:
            split = f" (this Subset has {size} of {whole} samples, and seems to be)"
    warn_once(
        "samples are shared",
        f"the {size} samples of {type(dataset).__name__} are shared over {ranks} ranks: each gets about 1 in {ranks}. "
        "For an evaluation that every rank, or only one, does in full, and for data that are already split by rank"
        f"{split}, pass dp=(0, 1); to share them without this warning, dp=torch.distributed.group.WORLD",
    )


def _check(arguments: Arguments) -> None:
    """Raise TypeError for what is no map-style data set, and for torch's wrappers of a ShardDataset: nothing would be
    balanced, or read by shards.
    """
    dataset = arguments.dataset
    parts = [dataset.dataset] if isinstance(dataset, Subset) else getattr(dataset, "datasets", ())
    if isinstance(dataset, Subset | ConcatDataset) and any(map(is_sharded, parts)):
        way_out = (
            "dataset[:1000], dataset.take(1000), dataset.select(numbers) or dataset.split('train', 0.9)"
            if isinstance(dataset, Subset)
            else "od.ShardDataset([*paths, *other_paths]), or od.Mixture for shares of each"
        )
        raise TypeError(
            f"a {type(dataset).__name__} of a ShardDataset would be map-style data, decoded one by one and without "
            f"token costs: use {way_out}"
        )
    if isinstance(dataset, (str, bytes, PathLike)):
        raise TypeError(f"DataLoader takes a data set, got the path {dataset!r}: use od.ShardDataset({dataset!r})")
    if isinstance(dataset, type):
        raise TypeError(f"DataLoader takes a data set, got the class {dataset.__name__}: create one")
    # No length is needed if only the user's sampler knows the items.
    samplers = (arguments.sampler, arguments.batch_sampler)
    chosen = arguments.rank.size == 1 and arguments.cost is None and samplers != (None, None)
    has_items = hasattr(dataset, "__getitem__") or (arguments.batched and hasattr(dataset, "__getitems__"))
    if not has_items or not (chosen or hasattr(dataset, "__len__")):
        raise TypeError(
            f"DataLoader takes a ShardDataset, a map-style data set with __getitem__ and __len__, or a torch "
            f"IterableDataset, got {type(dataset).__name__}; od.post_balance balances batches of another loader, such "
            "as one over an iterable"
        )


def _check_size(dataset: Any, num_samples: int) -> None:
    if len(dataset) != num_samples:
        raise ValueError(
            f"{type(dataset).__name__} had {num_samples} samples when this loader was created and has {len(dataset)} "
            "now: create another loader"
        )


def _source(sampler: Any, batch_sampler: Any, dataset: Any, rank: Rank) -> tuple[Source, int]:
    """Return what draws the samples of all ranks, and the samples per rank and step of a batch sampler, else 0."""
    if rank.size == 1:
        return TorchSampler(sampler if batch_sampler is None else batch_sampler), 0
    size = 0
    if type(batch_sampler) is BatchSampler:
        sampler, size = batch_sampler.sampler, batch_sampler.batch_size
    elif (
        batch_sampler is None and type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset
    ):
        return TorchSampler(sampler), 0
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise ValueError(
            "sampler and batch_sampler choose samples for one rank, and this loader shares them over "
            f"{rank.size}: they would be sharded twice; use shuffle= and seed="
        )
    matching = {
        "num_replicas": (sampler.num_replicas, rank.size),
        "rank": (sampler.rank, rank.rank),
        "dataset": (sampler.dataset, dataset),
    }
    for name, (theirs, ours) in matching.items():
        if theirs is not ours and (name == "dataset" or theirs != ours):
            other = "another data set" if name == "dataset" else f"{name}={theirs}, and this loader's is {ours}"
            raise ValueError(
                f"the DistributedSampler has {other}: create it with this loader's ranks and data, or leave it out: "
                "the loader splits samples over ranks itself (shuffle=, seed=, drop_last=)"
            )
    return AllRanksSampler(sampler), size


def _map_costs(arguments: Arguments) -> tuple[Ints | None, list[DataError]]:
    """Return one integer per sample, None if all are equal. A callable is called once for each loaded sample."""
    dataset, cost, rank = arguments.dataset, arguments.cost, arguments.rank
    if callable(cost):
        items = ItemCosts(dataset, cost, arguments.on_error.action == "skip")
        with progress_bar("costs of items") as bar:
            progress = bar if rank.rank == 0 else None
            return costs_of_items(items, arguments.cost_id, arguments.workers(), progress, is_shared=rank.size > 1)
    if cost is None:
        return None, []
    num_samples = len(dataset)
    values = np.asarray(cost) if num_samples else np.zeros(0, np.int64)
    if values.shape != (num_samples,):
        raise ValueError(f"cost must be one integer per sample, {num_samples} of them; got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"costs are integers, got {values.dtype}; scale and round them")
    if num_samples and int(values.min()) < 0:
        raise ValueError(f"costs are at least 0, sample {int(values.argmin())} has {int(values.min())}")
    return values.astype(np.int64), []


def costs_of_items(
    items: ItemCosts,
    cost_id: str | None,
    workers: Workers,
    progress: Callable[[float, int], None] | None = None,
    *,
    is_shared: bool = False,
) -> tuple[Ints, list[DataError]]:
    """Return the cost of each item, 0 for those that cannot be loaded, and their failures. Raises as `measured`.

    Args:
        cost_id: names the data set's content and the function; None: nothing is kept for another run.
        is_shared: whether other ranks of this job make a loader of the same data set.
    """
    name, prefix = cost_id, ""
    if name is None and is_shared and (name := _name_in_job(items)) is not None:
        prefix = _JOB_PREFIX
    if name is None:
        costs, failures = items.measured(np.arange(len(items.dataset)), workers, progress)
    else:
        costs, failures = _kept(items, name, prefix, workers, progress)
    return np.maximum(costs, 0), failures


def _name_in_job(items: ItemCosts) -> str | None:
    """Return a new name that all ranks of this job have for these costs; None without a process group.

    Their order distinguishes loaders that look alike. It may differ between ranks: items are compared as always.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    alike = _digest([*_identity(items, "").values(), source_digest(items.cost)])
    _made_in_job[alike] += 1
    return str(done_by_first(f"item costs/{alike}/{_made_in_job[alike]}", lambda: secrets.token_hex(16)))


def _kept(
    items: ItemCosts, cost_id: str, prefix: str, workers: Workers, progress: Callable[[float, int], None] | None
) -> tuple[Ints, list[DataError]]:
    cache = CacheFolder()
    identity = _identity(items, cost_id)
    name = prefix + _digest(list(identity.values()))
    path = cache.file("item_costs", f"{name}.costs")
    function = source_digest(items.cost)
    with cache.lock("item_costs", name):
        costs = _read(path, identity, len(items.dataset))
        if costs is not None and (problem := _problem(items, *costs, function)):
            warn_user(f"costs that were kept as {cost_id!r} (cost_id) are measured again: {problem}")
            costs = None
        values = np.full(len(items.dataset), FAILED, np.int64) if costs is None else costs[0]
        # Items that could not be loaded are tried again: it may have had to do with the machine.
        left = np.flatnonzero(values == FAILED)
        values[left], failures = items.measured(left, workers, progress)
        if costs is None or (len(left) and len(failures) < len(left)):
            head = {"identity": identity, "function": function}
            write_whole(path, seal(KIND, FORMAT, head, [np.ascontiguousarray(values, "<i8").tobytes()])[0])
            if prefix:
                _remove_old(path.parent)
    return values, failures


def _remove_old(folder: Path) -> None:
    """Remove day-old files of jobs, which no other run reads. Best effort."""
    with contextlib.suppress(OSError):
        for name in names_in(folder):
            if name.startswith(_JOB_PREFIX) and time.time() - (folder / name).lstat().st_mtime > _KEEP_SECONDS:
                (folder / name).unlink()


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _identity(items: ItemCosts, cost_id: str) -> dict[str, str]:
    """Return what the file is named by."""
    dataset = items.dataset
    fingerprint = getattr(dataset, "_fingerprint", None)  # of a `datasets.Dataset`
    return {
        "cost_id": cost_id,
        "type": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "length": str(len(dataset)),
        "fingerprint": fingerprint if isinstance(fingerprint, str) else "",
    }


def _read(path: Path, identity: dict[str, str], count: int) -> tuple[Ints, str] | None:
    """Return the costs of a file, and the digest of the function that made them; None if there is none, or no whole
    one.
    """
    with contextlib.suppress(OSError, ValueError):
        head, body = read_sealed(path, KIND, FORMAT)
        function: Any = head.values.get("function")
        if head.values.get("identity") == identity and isinstance(function, str) and len(body) == 8 * count:
            costs = np.frombuffer(body, "<i8").astype(np.int64)
            return (costs, function) if not count or int(costs.min()) >= FAILED else None
    return None


def _problem(items: ItemCosts, costs: Ints, made_by: str, function: str) -> str | None:
    """Return why costs that were kept are not those of these items, or None."""
    if made_by != function:
        return "the source text of the function is another one"
    usable = np.flatnonzero(costs != FAILED)
    chosen = np.random.default_rng(len(costs)).permutation(usable)[:_CHECKED]
    for row in np.sort(chosen).tolist():
        now = items.of(row)
        if now != costs[row]:
            then = int(costs[row])
            return (
                f"item {row} had the cost {then}, and now "
                + (f"has {now}" if isinstance(now, int) else f"none ({now if isinstance(now, str) else now[3]})")
                + ". Give changed data, or another function, another cost_id"
            )
    return None


FAILED: Final = -1
"""The cost of an item that cannot be loaded."""
_CHUNK: Final = 32
"""Items between two signs of progress, and of one message of a worker."""
_MOST: Final = 2**63 - 1


@dataclass(frozen=True, eq=False)
class ItemCosts:
    """The costs of a data set's items, by a function.

    Attributes:
        dataset: with `__getitem__` and `__len__`.
        cost: item -> integer of at least 0.
        skip_errors: whether items that cannot be loaded are failures; otherwise their errors are raised.
    """

    dataset: Any
    cost: Callable[[Any], int]
    skip_errors: bool

    def measured(
        self, rows: Ints, workers: Workers, progress: Callable[[float, int], None] | None = None
    ) -> tuple[Ints, list[DataError]]:
        """Return the cost of each row, FAILED for those that cannot be loaded, and their failures.

        Args:
            rows: of the data set, (n,).
            workers: load the items.
            progress: called with the number of rows that are done, and of all.

        Raises:
            FunctionError: the function fails, or returns no integer of at least 0; names the item.
            Exception: of the data set, if errors are not skipped.
        """
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        costs: list[int] = []
        failures: list[DataError] = []
        with closing(self._outcomes(chunks, workers)) as found:
            for outcomes in found:
                for outcome in outcomes:
                    if isinstance(outcome, str):
                        raise FunctionError(outcome)
                    if isinstance(outcome, tuple):
                        failures.append(DataError(*outcome))
                    costs.append(FAILED if isinstance(outcome, tuple) else outcome)
                if progress is not None:
                    progress(len(costs), len(rows))
        return np.array(costs, np.int64), failures

    def _outcomes(self, chunks: list[Ints], workers: Workers) -> Generator[list[_Outcome]]:
        source = _Chunks(self, chunks)
        # Those of an engine may be on other machines: then processes of this one load the items.
        count = (
            workers.num_workers if workers.engine is None else min(workers.num_workers, len(os.sched_getaffinity(0)))
        )
        if len(chunks) < 2 or not count or not self._can_be_sent(workers.multiprocessing_context):
            yield from map(source.__getitem__, range(len(chunks)))
            return
        iterator = iter(
            DataLoader(
                source,
                batch_size=None,
                num_workers=min(count, len(chunks)),
                collate_fn=_same,
                multiprocessing_context=workers.multiprocessing_context,
                worker_init_fn=workers.worker_init_fn,
                timeout=workers.timeout,
                generator=torch.Generator(),  # torch's global one stays as it is: epochs draw from it
            )
        )
        try:
            yield from iterator
        finally:  # an error that is kept would keep the workers
            cast("Any", iterator)._shutdown_workers()

    def _can_be_sent(self, context: BaseContext | None) -> bool:
        """Return whether workers can get the function; warn once if not."""
        if (context or multiprocessing).get_start_method() == "fork" or pickles(self.cost):
            return True
        warn_once(
            "a cost that does not pickle",
            f"cost= is {described(self.cost)}, which cannot be sent to another process: the items are loaded in this "
            "one. Define it at the top level of a module",
        )
        return False

    def of(self, row: int) -> _Outcome:
        """Return the cost of one item; the arguments of the DataError of an item that cannot be loaded; or the text of
        the FunctionError if its cost cannot be used: as values, so that a worker does not wrap them.
        """
        load = map_loader(self.dataset, skip_errors=self.skip_errors)
        try:
            item = load(row)
        except DataError as failure:
            if not self.skip_errors:
                raise
            return failure.shard, failure.key, failure.field, failure.reason
        name = getattr(self.cost, "__qualname__", type(self.cost).__name__)
        where = f"cost: {name} of item {row} of {type(self.dataset).__name__}"
        try:
            value = self.cost(item)
        except NOT_DATA:
            raise
        except Exception as error:  # noqa: BLE001 - raised again with the item
            return f"{where} raised {_described(error, self.cost)}"
        try:
            cost = -1 if isinstance(value, bool | np.bool_) else operator.index(value)
        except TypeError:  # floats, tensors of floats, anything else
            return f"{where} returned {value!r:.80}: costs are integers; scale and round them"
        if not 0 <= cost <= _MOST:
            return f"{where} returned {value!r:.80}: costs are integers from 0 to 2**63 - 1"
        return cost


_Outcome = int | tuple[str, str, str, str] | str


class _Chunks(torch.utils.data.Dataset[Any]):
    """The outcomes of chunks of rows, as items of a data set."""

    def __init__(self, costs: ItemCosts, chunks: list[Ints]) -> None:
        self._costs = costs
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> list[_Outcome]:
        return [self._costs.of(row) for row in self._chunks[number].tolist()]


def _described(error: Exception, function: Any) -> str:
    line = line_in(error, function)
    return f"{type(error).__name__}: {error}{'' if line is None else f' (line {line})'}"


def _same(outcomes: list[_Outcome]) -> list[_Outcome]:
    return outcomes
