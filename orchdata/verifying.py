"""Verify: read and decode every sample of an index once, as a loader does -> the samples that would fail.

    index --steps of one sample--> worker processes --failures--> Verification --write_quarantine--> a list

A sample is built with a loader's builder, in a loader's worker processes, so that it fails here for the same reasons. A
sample that ends, hangs or fills its process is identified as in a loader: it is loaded alone, in two more processes.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from orchdata.building.pages import IndexedShards, ShardContent, sample_bytes
from orchdata.building.step import Assembled, BuildSpec, BuiltStep, Memory, Share, Task
from orchdata.dataset.indexed import IndexCosts
from orchdata.engines.engine import Workers, passed_on
from orchdata.engines.on_ray import RayEngine
from orchdata.engines.processes.engine import ProcessEngine
from orchdata.engines.supervisor import WorkerEngine
from orchdata.engines.warm import Warming, kernel_families
from orchdata.loaders.child_process import lower_limit, taken_bytes
from orchdata.loaders.errors import DataError, StaleIndexError, as_field_error
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import Wanted
from orchdata.loaders.recipe import Recipe, load_required
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import by_identity, open_shard, rules_of
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.watch import Watch
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance, Packed
from orchdata.planning.plan import PlanSpec

_ROWS_AT_ONCE = 64
_QUEUED = 2
FREE_BYTES = 2 << 30
"""Memory that a sample may take in addition to twice its size by the index."""
_LIMIT = f"{FREE_BYTES} bytes of memory and twice what the index says it takes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The samples of a data set that a loader could not use."""

    num_samples: int  # good ones
    failures: tuple[DataError, ...]  # in the order of the data set; those of a whole shard have no key
    num_indexed_bad: int  # failures that the index had before anything was decoded


def verify(
    index: Index,
    recipe: Recipe,
    *,
    jobs: int | None = None,
    timeout: float = 120.0,
    engine: RayEngine | None = None,
    containers: Sequence[Container] = (),
    files: Files = PLAIN_FILES,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Read and decode every sample, in `jobs` processes of limited memory, `timeout` seconds at most each; by default
    one per CPU, on this machine. Shards are compared with their checksums in the index. `progress` gets (done, all).

    Raises ValueError; TypeError, which names the member of the recipe that does not pickle; StaleIndexError for a shard
    that is not the one that was indexed; StorageError, PackageError.
    """
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if jobs < 1 or not timeout > 0:
        raise ValueError(f"jobs must be at least 1 and timeout above 0, got {jobs} and {timeout}")
    load_required(recipe)
    shards = IndexedShards(
        index=index, build_id=index.build_id, recipes=(recipe,), containers=by_identity(containers), files=files
    )
    bad = index.bad_rows()
    failed: dict[int, DataError] = {row: index.failure(row) for row in bad.tolist()}
    num_usable = index.num_samples - len(bad)
    if num_usable:
        for done, (row, failures) in enumerate(_checked(shards, min(jobs, num_usable), timeout, engine), 1):
            if failures:
                failed[row] = failures[0]
            if progress is not None:
                progress(done, num_usable)
    return Verification(
        num_samples=index.num_samples - len(failed),
        failures=tuple(failed[row] for row in sorted(failed)),
        num_indexed_bad=len(bad),
    )


def _checked(
    shards: IndexedShards, jobs: int, timeout: float, elsewhere: RayEngine | None
) -> Iterator[tuple[int, list[DataError]]]:
    """Yield each usable sample, by its first row, and its failures, as processes finish it."""
    index, balance = shards.index, Balance(scope="none")
    Warming(kernel_families(balance, 1, phases=index.modalities, padded=False)).wait()
    plan = PlanSpec(
        costs=IndexCosts(index),
        order=Order(index.num_rows, shuffle=None, seed=0, excluded=index.bad_rows()),
        batches=GlobalBatches(size=1),
        balance=balance,
        num_ranks=1,
    )
    workers = Workers(
        num_workers=jobs,
        prefetch_factor=_QUEUED,
        worker_init_fn=begin_checking,
        worker_memory=FREE_BYTES if elsewhere is None else None,  # a check limits its own memory, too
        timeout=timeout,
        multiprocessing_context=None if elsewhere else multiprocessing.get_context("forkserver"),
        name_of=shards.name_of,
    )
    spec = BuildSpec(plan=plan, rank=0, content=CheckedContent(plan=plan, shards=shards))
    with ExitStack() as opened:
        engine: WorkerEngine = ProcessEngine(spec, workers) if elsewhere is None else elsewhere.open(spec, workers)
        opened.enter_context(closing(engine))
        stretches = opened.enter_context(closing(_stretches(shards, jobs)))
        for row, built in _built(engine, jobs, stretches):
            # With a loader's message, except for the limit, which is this module's.
            failures = [
                DataError(each.shard, each.key, each.field, each.reason.replace("worker_memory", _LIMIT))
                for each in built.failures
            ]
            yield row, failures


def _stretches(shards: IndexedShards, jobs: int) -> Generator[NDArray[np.int64], None, None]:
    """Yield first rows of usable samples, some of one shard at a time, after a comparison of the shard's checksum."""
    index = shards.index
    rows = np.setdiff1d(index.sample_rows(), index.bad_rows())
    bounds = np.searchsorted(rows, index.shard_rows).tolist()
    used = [number for number in range(len(index.shards)) if bounds[number] < bounds[number + 1]]
    with ThreadPoolExecutor(jobs) as pool:
        compared = pool.map(partial(compare_shard, shards), used)
        with closing(compared):  # type: ignore[type-var]  # a generator, which cancels the rest
            for number, _ in zip(used, compared, strict=True):
                for start in range(bounds[number], bounds[number + 1], _ROWS_AT_ONCE):
                    yield rows[start : min(start + _ROWS_AT_ONCE, bounds[number + 1])]


def compare_shard(shards: IndexedShards, number: int) -> None:
    """Compare a shard with its checksum in the index. Raises StaleIndexError, StorageError."""
    info, how = shards.index.shards[number], {"limits": shards.recipe.limits, "files": shards.files, "whole": True}
    with closing(
        open_shard(info.url, cache=CacheFolder(), rules=rules_of(info, shards.containers), **how)  # type: ignore[arg-type]
    ) as shard:
        if shard.checksum() != info.checksum:
            raise StaleIndexError(
                info.url, "has another checksum than when it was indexed: run `orchdata index --again`"
            )


def _built(engine: WorkerEngine, jobs: int, stretches: Iterator[NDArray[np.int64]]) -> Iterator[tuple[int, BuiltStep]]:
    """Yield each row's step. A process has a stretch for itself, so that it reads a shard from front to back."""

    def take_rows() -> Iterator[int]:
        for stretch in stretches:
            yield from stretch.tolist()

    rows = [take_rows() for _ in range(jobs)]
    queues: list[deque[Future[BuiltStep]]] = [deque() for _ in range(jobs)]
    under_way: dict[Future[BuiltStep], tuple[int, int]] = {}

    def feed(worker: int) -> None:
        queue = queues[worker]
        for row in islice(rows[worker], _QUEUED - len(queue)):
            queue.append(engine.submit(StepTask(0, row, np.array([row])), worker))
            under_way[queue[-1]] = row, worker
        if queue:
            engine.expect(queue[0])  # the worker's current sample: its time begins

    for worker in range(jobs):
        feed(worker)
    while under_way:
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            row, worker = under_way.pop(future)
            queues[worker].remove(future)
            feed(worker)
            yield row, future.result()


@dataclass(frozen=True, kw_only=True)
class CheckedContent:
    """Steps of one sample each, given by its first row, with all its modalities and pieces decoded: failures, and no
    batch. `plan` is of one rank.
    """

    plan: PlanSpec
    shards: IndexedShards

    def open(self, watch: Watch) -> Checker:
        """Open it in a process that does nothing else, and has one thread."""
        return Checker(self, watch)

    def name_of(self, row: int) -> str:
        return self.shards.name_of(row)


class Checker:
    """An assembler that builds each sample's step with the builder of a loader."""

    def __init__(self, content: CheckedContent, watch: Watch) -> None:
        shards = self._shards = content.shards
        packed = ShardContent(shards=shards, layout=Packed(), encoders=shards.index.modalities[1:])
        self._builder = BuildSpec(plan=content.plan, rank=0, content=packed).open(watch=watch)
        self.reads = self._builder.reads
        self._base_bytes = taken_bytes()

    def begin(self, share: Share) -> _Check:
        return _Check(self, int(share.rows[0]))

    def read_ahead(self, wanted: Iterable[Wanted]) -> None:
        """The builder of a step does this."""

    def load_alone(self, row: int) -> None:
        self.check(row)

    def check(self, row: int) -> list[DataError]:
        """Return the failures of a loader's step with only this sample. Raises as `pass_trouble`."""
        index = self._shards.index
        rows = np.array(index.rows_of_sample(row))
        num_bytes = sum(sample_bytes(index, self._shards.recipe, each) for each in rows.tolist())
        lower_limit(resource.RLIMIT_DATA, self._base_bytes + FREE_BYTES + 2 * num_bytes)
        try:
            failures = self._builder.build(StepTask(0, row, rows)).failures
        except DataError as failure:
            return [failure]
        except BaseException as error:  # noqa: BLE001 - anything else that would end a loader's step
            return [as_field_error(passed_on(error), "built").at(index.shard_of(row).url, index.key(row))]
        return failures[:1]


class _Check:
    """A sample's step under construction."""

    num_bytes = 0

    def __init__(self, checker: Checker, row: int) -> None:
        self._checker = checker
        self._row = row
        self._failures: list[DataError] = []

    def wanted(self) -> Sequence[Wanted]:
        return ()

    def fill(self, memory: Memory) -> Sequence[Task]:
        return [self._run]

    def finish(self) -> Assembled:
        return Assembled(None, self._failures)

    def _run(self) -> None:
        self._failures = self._checker.check(self._row)


def begin_checking(_number: int) -> None:
    """Set up a process that checks samples, before anything else."""
    os.dup2(2, 1)  # prints of a user's tokenizer are not part of our output
    lower_limit(resource.RLIMIT_CORE, 0)
