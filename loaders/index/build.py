"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically, and records what it was made from, so builders may run at the same time, and after a
killed one the next only repeats unfinished work. Cached files are verified before use, damaged ones are built again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.facts import is_fresh, load_facts
from orchdata.loaders.index.index import Index, absolute, content_fingerprint, digest
from orchdata.loaders.index.jobs.jobs import Jobs, Processes
from orchdata.loaders.index.jobs.work import Given, Measured
from orchdata.loaders.index.locations import (
    check_function_of,
    index_path,
    is_outdated,
    stored_description,
)
from orchdata.loaders.index.measuring.kept_counts import CountsFiles, CountsStore, KeptCounts
from orchdata.loaders.index.merge import RecipeIdentity, merge_tables
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.published.parts import Parts
from orchdata.loaders.index.repeats import refuse_repeats
from orchdata.loaders.index.shard_costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.table import marked_bytes
from orchdata.loaders.kept.builds import building
from orchdata.loaders.kept.prune import keep_within, remove_leftovers
from orchdata.loaders.memory import measured_at
from orchdata.loaders.pace import Turns, threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.field_rules import FieldRules, check_met
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.own.shard import identity_of
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.slow import here, shards_under_way, watching
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.atomic import remove, write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience
from orchdata.loaders.storage.shared.access import Access, Accesses, restrict
from orchdata.loaders.versions import COSTS_FORMAT, rules_digest

Done = list[tuple[str, CostTable, bool]]
"""For each shard: its path, its costs, and whether they were measured now."""

_TICK_SECONDS = 0.5
_CHUNK_SHARDS = 16
"""Shards that a thread takes together if there are very many; it retries those with errors at the end of the chunk."""
_SHARD_WORK = 5
"""Work of measuring a shard besides its samples, in samples; checking one with cached costs is 1."""
_IN_MEMORY_BYTES = 256 << 20
"""Cost tables up to this total size stay in memory until they are merged; the others are read again."""


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


def build_index(
    urls: Sequence[str],
    recipe: Recipe,
    *,
    cache: CacheFolder | None = None,
    reading: Reading = PLAIN,
    num_threads: int | None = None,
    jobs: int = 1,
    processes: Processes | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    under_way: Callable[[float, int], None] | None = None,
    force: bool = False,
    share: tuple[int, int] = (0, 1),
    parts: Parts | None = None,
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
        processes: where the processes of `jobs` run, also one alone; default: children of this process.
        progress: called in this thread after each shard.
        under_way: called in this thread about twice a second, with the number of shards that are done, in which those
            that are being measured count in part, and the number of all.
        share: (number, number of processes): each of the processes that build it begins at another shard.
        parts: what builders with other cache folders have measured.
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
        PublishedMeanwhile: another builder has published the index, with `parts`.
    """
    if not urls:
        raise ValueError("no shards to index")
    workers = threads_or_default(num_threads, far=any(map(is_remote, urls)))
    if workers < 1 or jobs < 1:
        raise ValueError(f"num_threads and jobs must be at least 1, got {num_threads} and {jobs}")
    apart = jobs > 1 or processes is not None
    if apart:
        if num_threads is not None:
            raise ValueError(f"num_threads={num_threads} is for jobs=1: each of {jobs} processes has one thread")
        workers = jobs

    # Packages are imported, and the folder, old formats and duplicate paths checked, before any shard is read.
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
    if patience.keep_trying(lambda: is_outdated(urls, recipe, cache=cache, reading=reading), StorageError):
        warnings.warn("the index of these shards has an earlier format: it is built again", stacklevel=2)
    paths = [absolute(url) for url in urls]
    refuse_repeats(paths, num_threads=workers)
    if apart:
        open_builder = functools.partial(Builder, recipe, fingerprint, reading=reading, force=force)
        given = Given(open_builder, cache, recipe, jobs)
        builder.jobs = Jobs(jobs, given, paths, reading.files, processes)

    # Measure the shards, then merge their tables in the given order.
    builder.parts = parts
    with closing(builder), building(cache) as build:
        order = _begun_at(paths, share, apart=parts is not None)
        measured = in_parallel(builder, order, workers, progress, under_way, patience)
        builder.missing_media.check()
        tables = [measured[path] for path in paths]
        if reading.columns:
            check_met(reading.columns, [table.meta.met for table in tables])
        with builder.claims.claim(str(path), go_on=lambda: True):  # another process may be merging the same index
            index = patience.keep_trying(lambda: builder.merged(path, tables), StorageError, FileNotFoundError)
        keep_within(cache, build, [table.path for table in tables])
    remove_leftovers(cache)
    return index


def _begun_at(paths: list[str], share: tuple[int, int], *, apart: bool) -> list[str]:
    """Return the shards in the order in which one of several processes takes them: its own first.

    Args:
        apart: whether the processes cannot see which shard another one is at. Then the others' are taken from the end,
            where these are last.
    """
    number, processes = share
    bounds = [len(paths) * each // processes for each in range(processes + 1)]
    if not apart:
        return paths[bounds[number] :] + paths[: bounds[number]]
    order = paths[bounds[number] : bounds[number + 1]]
    for other in (*range(number + 1, processes), *range(number)):
        order += reversed(paths[bounds[other] : bounds[other + 1]])
    return order


def warn_of_retries(error: Exception, seconds: float) -> None:
    """Warn that reads are tried again."""
    warnings.warn(f"{error}; trying again for up to {seconds:g} s of waiting in this build", stacklevel=2)


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
        with measuring(), watching(), _cancelled(pool, crew):
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


class Builder:
    """Measures the shards of a build, and merges their tables."""

    def __init__(
        self,
        recipe: Recipe,
        fingerprint: str,
        cache: CacheFolder,
        reading: Reading,
        force: bool,
    ) -> None:
        self._recipe = recipe
        self._fingerprint = fingerprint
        self._reading = reading
        self._files = reading.files
        self._identity = blake2b(f"{COSTS_FORMAT} {rules_digest()} {fingerprint} ".encode(), digest_size=16)
        self._cache = cache
        self._force = force
        self._folder = cache.make("costs")
        self._counts = CountsStore(cache, recipe)
        self._accesses = Accesses()
        self._probes = Probes(recipe, cache, force=force, accesses=self._accesses)
        self._lock = threading.Lock()
        self._free_bytes = _IN_MEMORY_BYTES
        self.missing_media = MissingMedia()
        self.claims = Claims(cache.file("locks", "index"))
        self.jobs: Jobs | None = None
        self.parts: Parts | None = None

    def close(self) -> None:
        if self.jobs is not None:
            self.jobs.close()
        self.claims.close()

    def forget(self, url: str) -> None:
        """Look at a shard again, which may have changed."""
        self._files.forget(url)

    def access_of(self, url: str) -> Access:
        """Return the most that permissions of what is known of a shard may allow."""
        return self._accesses.of(url)

    def costs(self, url: str, go_on: Callable[[], bool], spread: Spread | None = None) -> tuple[CostTable, bool] | None:
        """Return the costs of a shard, and whether they were measured now.

        Args:
            go_on: whether to keep waiting while another process measures them; if not, the result is None.
            spread: idle threads that may help.
        """
        limits, cache = self._recipe.limits, self._cache
        rules = self._reading.rules(url, self._recipe)
        root = self._reading.root_of(url, rules)
        path, access = self._path(url, root, rules), self._accesses.of(url)
        with ExitStack() as resources, here().at(url):

            @functools.cache
            def opened() -> Shard:
                how: dict[str, Any] = {"files": self._files, "whole": True}
                shard = open_shard(url, limits=limits, cache=cache, media_root=root, rules=rules, **how)
                resources.enter_context(closing(shard))
                if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                    resources.callback(self.missing_media.add, shard.folder)  # after all its files were looked up
                return shard

            def cached() -> CostTable | None:
                return None if self._force else self._cached(path, url, root, rules, access, opened)

            if (table := cached()) is not None:
                return self._kept_in_memory(table), False
            with self.claims.claim(path, go_on) as ours:
                if not ours:
                    return None
                if (table := cached()) is not None:  # another process has measured it
                    return self._kept_in_memory(table), False
                if self.parts is not None and self.parts.take(path) and (table := cached()) is not None:
                    return self._kept_in_memory(table), False
                if self.jobs is not None and not (spread is not None and self.jobs.divides(url)):
                    self._take(self.jobs.measure(url), access)
                    table = self._stored(path, url, root, access)
                    self._give(table)
                    return self._kept_in_memory(named(table, rules)), True
                facts = load_facts(
                    url,
                    opened,
                    limits=limits,
                    cache=cache,
                    media_root=root,
                    rules=rules,
                    force=self._force,
                    access=access,
                    files=self._files,
                )
                costs = self._measured(facts, opened, spread, self._counts.files_of(facts, url, root, rules), access)
                table = costs.write(path, url, facts.meta, root, access)
                self._give(table)
                return self._kept_in_memory(named(table, rules)), True

    def _take(self, measured: Measured, access: Access) -> None:
        """Keep what another process has measured."""
        self.missing_media.add_found(measured.found)
        for name, data in measured.files.items():
            self._cache.make(Path(name).parts[0])
            write_whole(self._cache.root / name, data, access)

    def _give(self, table: CostTable) -> None:
        if self.parts is not None and table.meta.checksum:  # without one it is not taken, see `_cached`
            self.parts.give(table.path)

    def _cached(
        self,
        path: str,
        url: str,
        media_root: str | None,
        rules: FieldRules,
        access: Access,
        opened: Callable[[], Shard],
    ) -> CostTable | None:
        """Return the cached costs of a shard if the shard, and the files that it names, have not changed."""
        restrict(path, access)
        try:
            table = named(CostTable.open(path, url, self._recipe.kinds, media_root or "", access), rules)
            # Without a checksum the shard could not be opened, for a reason that may be temporary. The modification
            # time counts too: editing text in place may not change size and headers.
            return table if table.meta.checksum and is_fresh(table.meta, url, opened, self._files) else None
        except (OSError, ValueError):
            return None  # absent, damaged or of another version

    def _stored(self, path: str, url: str, media_root: str | None, access: Access) -> CostTable:
        """Return the costs of a shard that a child has just stored. Raises StorageError."""
        try:
            return CostTable.open(path, url, self._recipe.kinds, media_root or "", access)
        except (OSError, ValueError) as error:
            raise StorageError(path, f"was removed or damaged during the build: {error}") from error

    def merged(self, path: Path, tables: Sequence[CostTable]) -> Index:
        """Return the index of these tables: the existing one if it is valid, else a new one."""
        build_id = digest([table.digest for table in tables])
        content = content_fingerprint([table.shard for table in tables], self._fingerprint)
        access = Access.joined(table.access for table in tables if table.access is not None)
        restrict(path, access)
        index = _existing_index(path, [table.url for table in tables])
        if index is not None and not self._force and (index.build_id, index.fingerprint) == (build_id, content):
            return index
        self._cache.make("index")
        identity = RecipeIdentity(self._fingerprint, self._recipe.kinds, stored_description(self._recipe))
        try:
            merge_tables(path, tables, identity, build_id=build_id, access=access)
            return Index(path)
        except (ValueError, DamagedIndexError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno != errno.ENOENT:
                raise
            sound = [self._sound(table) for table in tables]
            if all(map(operator.is_, sound, tables)):
                raise
            if not isinstance(error, StorageError):
                remove(path)
        return self.merged(path, sound)

    def _sound(self, table: CostTable) -> CostTable:
        """Return the table; measure the shard again if its columns have impossible values, or were removed."""
        with contextlib.suppress(StorageError):
            if table.is_sound():
                return table
        remove(table.path)
        costs = self.costs(table.url, lambda: True)
        assert costs is not None  # because it waits for other processes
        return costs[0]

    def _path(self, url: str, media_root: str | None, rules: FieldRules) -> str:
        name = self._identity.copy()
        name.update((url if media_root is None else f"{url}\0{media_root}").encode("utf-8", "surrogateescape"))
        if rules.columns:
            name.update(f"\0columns {json.dumps(rules.columns)}".encode())
        if kept := rules.kept_in(url):
            name.update(f"\0{json.dumps(kept)}".encode())
        if rules.container is not None:
            name.update(f"\0container {identity_of(rules.container)}".encode())
        return f"{self._folder}/{name.hexdigest()}.costs"

    def _kept_in_memory(self, table: CostTable) -> CostTable:
        """Return the table, without its columns if all tables together would take too much memory."""
        with self._lock:
            length = marked_bytes(table.size)
            if length > self._free_bytes:
                return table.without_body()
            self._free_bytes -= length
            return table

    def _measured(
        self, facts: Facts, opened: Callable[[], Shard], spread: Spread | None, files: CountsFiles, access: Access
    ) -> ShardCosts:
        """Measure a shard, and keep its counts."""
        meta, recipe = facts.meta, self._recipe
        kept = KeptCounts() if self._force else self._counts.read(files, access)

        def shard() -> Shard:
            # Only read the file that was scanned: this process decodes a Parquet file only after a child has done it.
            current = opened()
            if (current.size, current.version) != (meta.size, meta.version):
                raise StaleIndexError(current.url, "was changed while it was indexed")
            return current

        if self.jobs is not None:
            spread = self.jobs.spread(meta.url, len(facts.table))
        try:
            costs = cost_shard(facts, shard, recipe, self._probes, spread, kept)
        except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
            pass_trouble(error)
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(Facts(facts.table.all_failed(reason), meta), shard, recipe, self._probes)
        self._counts.write(files, costs.new, kept, access)
        return costs


def named(table: CostTable, rules: FieldRules) -> CostTable:
    """Return the table with the new names of fields, and its container, which its file does not contain."""
    if not rules.columns and rules.container is None:
        return table
    container = "" if rules.container is None else identity_of(rules.container)
    return replace(table, columns=rules.columns, container=container)


def _existing_index(path: Path, urls: Sequence[str]) -> Index | None:
    try:
        index = Index(path)
        index.check_urls(urls)
        return index
    except FileNotFoundError:
        return None
    except DamagedIndexError as error:
        warnings.warn(f"the index {path} is damaged: {error.reason}; it is built again", RuntimeWarning, stacklevel=3)
        return None
