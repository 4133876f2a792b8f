"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically, and records what it was made from, so builders may run at the same time, and after a
killed one the next only repeats unfinished work. Cached files are verified before use, damaged ones are built again.

The threads of a build: each measures one shard or several, small ones together, and large ones with idle threads.

shards --chunks--> threads --Builder.costs--> tables
                      |--> measured by another process: checked again, and waited for
                      |--> a read failed: tried again, outside of the thread's turn
                      '--> too little memory: measured again, while no other shard is
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError
from orchdata.loaders.index.builder import Builder
from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.index.index_file import check_function_of, index_path
from orchdata.loaders.index.jobs import Given, Jobs
from orchdata.loaders.index.joined import refuse_repeats
from orchdata.loaders.index.shard_costs import CostTable
from orchdata.loaders.memory import measured_at
from orchdata.loaders.pace import Turns, threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.fields import check_met
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.cache import CacheFolder, remove_leftovers
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience
from orchdata.loaders.watch import here, shards_under_way


def build_index(
    urls: Sequence[str],
    recipe: Recipe,
    *,
    cache: CacheFolder | None = None,
    reading: Reading = PLAIN,
    num_threads: int | None = None,
    jobs: int = 1,
    progress: Callable[[BuildProgress], None] | None = None,
    under_way: Callable[[float, int], None] | None = None,
    force: bool = False,
    share: tuple[int, int] = (0, 1),
    retry_seconds: float = BUILD_SECONDS,
) -> Index:
    """Build or refresh the index of shards under a recipe, and open it.

    Several processes may build the same index together: each shard is measured by one of them, and each process ends
    with the whole index. If a process is killed, another one measures its shards.

    A bad sample or shard becomes a row of the index with an error, never an exception. A failed read or write does not
    make a sample bad: it is retried, with a warning, and ends the build if it keeps failing.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: defines the costs. Its tokenizer is called from several threads.
        cache: stores facts, costs and indexes; default: the folder that the environment names.
        reading: how the shards are read; part of the identity of the index.
        num_threads: most shards at a time (fewer if that is faster); default: one per CPU, at least 4
            for object storage, at most 8.
        jobs: processes that measure shards, each one at a time; 1 for threads of this process alone. The recipe and
            the containers must pickle, and a script that calls this needs `if __name__ == "__main__"`.
        progress: called in this thread after each shard.
        under_way: called in this thread about twice a second, with the number of shards that are done, in which those
            that are being measured count in part, and the number of all.
        share: (number, number of processes): each of the processes that build it begins at another shard.
        force: scan and measure every shard again, and merge again, without the cache.
        retry_seconds: the time for retries over the whole build. A shard that does not exist ends it immediately.

    Raises:
        ValueError: no shards, an unknown suffix, two paths of one file, columns to rename that the data do not have, or
            `jobs` with something that does not pickle, or with `num_threads`.
        ProcessError: a process of `jobs` ended, three times with one shard.
        StorageError: a shard cannot be read, or the cache cannot be written; or none of the files that records name
            below a media_root exists.
        MemoryError: a sample cannot be measured under the memory limit, even alone. Nothing of its shard is stored.
        PackageError: a package that the recipe or a shard needs is missing or broken.
        FunctionError: a function of the recipe is not deterministic, or its id was of another function.
        StaleIndexError: a shard keeps changing while it is read.
    """
    if not urls:
        raise ValueError("no shards to index")
    workers = threads_or_default(num_threads, far=any(map(is_remote, urls)))
    for name, number in (("num_threads", workers), ("jobs", jobs)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if jobs > 1:
        if num_threads is not None:
            raise ValueError(f"num_threads={num_threads} is for jobs=1: each of {jobs} processes has one thread")
        workers = jobs

    # Packages are imported, and the folder and duplicate paths checked, before any shard is read.
    load_for_scanning(recipe)
    cache = cache or CacheFolder()
    fingerprint = recipe.count_fingerprint()
    patience = Patience(retry_seconds, lambda error: warn_of_retries(error, retry_seconds))
    reading = reading.looked_up(urls)
    path = index_path(urls, fingerprint, cache, reading)
    if recipe.record is not None and not force:
        with contextlib.suppress(FileNotFoundError, DamagedIndexError):
            check_function_of(Index(path), recipe)
    builder = patience.keep_trying(lambda: Builder(recipe, fingerprint, cache, reading, force), StorageError)
    paths = [absolute(url) for url in urls]
    refuse_repeats(paths, num_threads=workers)
    if jobs > 1:
        open_builder = functools.partial(Builder, recipe, fingerprint, reading=reading, force=force)
        given = Given(open_builder, cache, recipe, jobs)
        builder.jobs = Jobs(jobs, given, paths, reading.files)

    # Measure the shards, then merge their tables in the given order.
    with closing(builder):
        first = len(paths) * share[0] // share[1]
        measured = in_parallel(builder, paths[first:] + paths[:first], workers, progress, under_way, patience)
        builder.missing_media.check()
        tables = [measured[path] for path in paths]
        if reading.columns:
            check_met(reading.columns, [table.meta.met for table in tables])
        with builder.claims.claim(str(path), go_on=lambda: True):  # another process may be merging the same index
            index = patience.keep_trying(lambda: builder.merged(path, tables), StorageError, FileNotFoundError)
    remove_leftovers(cache)
    return index


Done = list[tuple[str, CostTable, bool]]
"""For each shard: its path, its costs, and whether they were measured now."""

_TICK_SECONDS = 0.5
_CHUNK_SHARDS = 16
"""Shards that a thread takes together if there are very many; it retries those with errors at the end of the chunk."""
_SHARD_WORK = 5
"""Work of measuring a shard besides its samples, in samples; checking one with cached costs is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """A shard is done.

    Attributes:
        url: of the shard.
        measured: whether it was measured now; otherwise its cached costs were still valid.
        samples, bad: numbers of samples in the shard.
        done, total: numbers of shards.
    """

    url: str
    measured: bool
    samples: int
    bad: int
    done: int
    total: int


def warn_of_retries(error: Exception, seconds: float) -> None:
    """Warn that reads are tried again."""
    is_refused = isinstance(error, StorageError) and error.is_refused
    how_long = "some seconds" if is_refused else f"up to {seconds:g} s of waiting in this build"
    warnings.warn(f"{error}; trying again for {how_long}", stacklevel=2)


def in_parallel(
    builder: Builder,
    urls: Sequence[str],
    workers: int,
    progress: Callable[[BuildProgress], None] | None,
    under_way: Callable[[float, int], None] | None,
    patience: Patience,
) -> dict[str, CostTable]:
    """Measure shards in threads, each by one or more, and return their tables by path."""
    # A task per small shard would take a fifth of the time of measuring it.
    length = max(1, min(_CHUNK_SHARDS, len(urls) // (64 * workers)))
    tables: dict[str, CostTable] = {}
    shown = [0.0]
    crew = _Crew(builder, workers, patience)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-index")
    try:
        with measuring(), _cancelled(pool, crew):
            chunks = [urls[start : start + length] for start in range(0, len(urls), length)]
            while chunks:  # shards that other processes are measuring are checked again, and waited for
                futures = [pool.submit(crew.measure, chunk) for chunk in chunks]
                tick = None if under_way is None else functools.partial(_show, under_way, tables, len(urls), shown)
                for future in _completed(futures, tick):
                    for url, table, measured in future.result():
                        tables[url] = table
                        if progress is not None:
                            counts = {"samples": table.totals["samples"], "bad": table.totals["bad"]}
                            done = BuildProgress(
                                url=url, measured=measured, done=len(tables), total=len(urls), **counts
                            )
                            progress(done)
                chunks = [[url] for url in crew.take_others()]
    finally:
        pool.shutdown()  # after an error or Ctrl-C, wait for the shards that are being measured
        crew.close()
    return tables


def _show(
    under_way: Callable[[float, int], None], tables: Mapping[str, CostTable], total: int, shown: list[float]
) -> None:
    """Show progress, never less than before: a shard that was just measured does not count as done at once."""
    # A shard that a child has just measured may still count as under way.
    shown[0] = min(total, max(shown[0], len(tables) + shards_under_way()))
    under_way(shown[0], total)


def _completed(futures: Sequence[Future[Done]], tick: Callable[[], None] | None) -> Iterator[Future[Done]]:
    """Yield futures as they are done, and call `tick` in between. Its work does not grow with those that are not."""
    done: SimpleQueue[Future[Done]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left = len(futures)
    while left:
        try:
            future = done.get(timeout=None if tick is None else _TICK_SECONDS)
        except Empty:
            pass
        else:
            left -= 1
            yield future
        if tick is not None:
            tick()


@contextmanager
def _cancelled(pool: ThreadPoolExecutor, crew: _Crew) -> Iterator[None]:
    """After an error in the block, cancel the shards that have not begun, and all retries."""
    try:
        yield
    except BaseException:
        crew.end()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class _Crew:
    """The threads of a build: how many may work, and which shards are retried."""

    def __init__(self, builder: Builder, workers: int, patience: Patience) -> None:
        self._builder = builder
        self._patience = patience
        self._turns = Turns(workers, paced=builder.jobs is None)
        self._spread = Spread(self._turns, workers)
        self._others: list[str] = []
        self._waits = False

    def take_others(self) -> list[str]:
        """Return the shards that other processes are measuring; from now on these are waited for."""
        others, self._others, self._waits = self._others, [], True
        return others

    def _go_on(self) -> bool:
        return self._waits and not self._turns.ended

    def measure(self, urls: Sequence[str]) -> Done:
        """Return (url, costs, whether they were measured now) of these shards; fewer after `end`."""
        here().ended = lambda: self._turns.ended
        done: list[tuple[str, CostTable, bool]] = []
        failed: list[tuple[str, StorageError | StaleIndexError]] = []
        short: list[str] = []
        with self._turns.turn() as report_work:
            for url in urls:
                if self._turns.ended:
                    return done
                try:
                    costs = self._builder.costs(url, self._go_on, self._spread)
                except (StorageError, StaleIndexError) as error:
                    failed.append((url, error))
                    continue
                except MemoryError:
                    short.append(url)
                    continue
                if costs is None:
                    self._others.append(url)
                else:
                    table, measured = costs
                    done.append((url, table, measured))
                    report_work(_SHARD_WORK + table.size.rows if measured else 1)

        # Retries, outside of this thread's turn; then the shards that need more memory, one at a time.
        for url, first_error in failed:
            retry = functools.partial(self._retry, url, first_error)
            try:
                done.append(
                    (url, *self._patience.keep_trying(retry, StorageError, StaleIndexError, failed=first_error))
                )
            except MemoryError:
                short.append(url)
        done += [(url, *self._alone(url)) for url in short]
        return done

    def _alone(self, url: str) -> tuple[CostTable, bool]:
        """Measure a shard again after a MemoryError, while no other shard is measured."""
        with self._turns.alone():
            gc.collect()
            try:
                costs = None if self._turns.ended else self._builder.costs(url, lambda: not self._turns.ended)
            except MemoryError as error:
                raise measured_at(error, url) from error
        if costs is None:
            raise MemoryError(f"{url}: was not measured to the end: the build ended")
        return costs

    def _retry(self, url: str, error: Exception) -> tuple[CostTable, bool]:
        with self._turns.turn():
            if self._turns.ended:
                raise error
            self._builder.forget(url)
            costs = self._builder.costs(url, lambda: not self._turns.ended, self._spread)
            if costs is None:
                raise error
            return costs

    def end(self) -> None:
        self._patience.end()
        self._turns.end()

    def close(self) -> None:
        """Wait for the threads that helped."""
        self._spread.close()
