"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically, and records what it was made from, so builders may run at the same time, and after a
killed one the next only repeats unfinished work. Cached files are verified before use, damaged ones are built again.

The index of the first samples has the first rows of the full one, to the bit. The shard in which the last of them lies
is measured up to there, and not kept (`ShardInfo.reach`): only tars and files of lines are cut.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import hashlib
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.facts import Probes, is_fresh, load_facts
from orchdata.loaders.index.index import (
    Index,
    check_function_of,
    content_fingerprint,
    index_path,
    open_index,
    stored_description,
)
from orchdata.loaders.index.index_file import merge_tables
from orchdata.loaders.index.jobs import Given, Jobs
from orchdata.loaders.index.kept import KEPT_FORMAT, KeptCounts
from orchdata.loaders.index.table import pack
from orchdata.loaders.memory import measured_at
from orchdata.loaders.pace import Spread, Turns, in_threads, threads_or_default
from orchdata.loaders.recipe import Recipe, digest, load_for_scanning, versions
from orchdata.loaders.shards.children import measuring
from orchdata.loaders.shards.fields import check_met
from orchdata.loaders.shards.lines import JsonLinesShard
from orchdata.loaders.shards.named_media import MissingMedia
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import PLAIN, Facts, Reading, Shard
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder, Claims, remove_leftovers
from orchdata.loaders.storage.files import PLAIN_FILES
from orchdata.loaders.storage.local import status_of
from orchdata.loaders.storage.remote.urls import identity, is_remote
from orchdata.loaders.storage.storage import BUILD_SECONDS, Patience
from orchdata.loaders.watch import here, shards_under_way

_TICK_SECONDS: Final = 0.5
_CHUNK_SHARDS: Final = 16
"""Shards that a thread takes together if there are very many; it retries those with errors at the end of the chunk."""
_SHARD_WORK: Final = 5
"""Work of measuring a shard besides its samples, in samples; checking one with cached costs is 1."""
_SURE: Final = 0.8
"""Shards are measured whole as long as they have at most this part of the samples that are left, by their bytes."""
_LEAST_MORE: Final = 16
_IN_MEMORY_BYTES = 256 << 20
"""Cost tables up to this total size stay in memory until they are merged; the others are read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """A shard is done: measured now, or its cached costs were still valid; `done` of `total` shards, with `samples` in
    it, `bad` of which are bad.
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
    progress: Callable[[BuildProgress], None] | None = None,
    under_way: Callable[[float, int], None] | None = None,
    force: bool = False,
    share: tuple[int, int] = (0, 1),
    retry_seconds: float = BUILD_SECONDS,
    first: int = 0,
) -> Index:
    """Build or refresh the index of shards under a recipe, and open it.

    Several processes may build the same index together: each shard is measured by one of them, and each process ends
    with the whole index. If a process is killed, another one measures its shards. A bad sample or shard becomes a row
    with an error, never an exception. A failed read or write does not make a sample bad: it is retried, with a warning,
    and ends the build if it keeps failing.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: defines the costs. Its tokenizer is called from several threads.
        num_threads: most shards at a time (fewer if that is faster).
        jobs: processes that measure shards, each one at a time; 1 for threads of this process alone. The recipe and
            the containers must pickle, and a script that calls this needs `if __name__ == "__main__"`.
        progress: called in this thread after each shard.
        under_way: called in this thread about twice a second, with the number of shards that are done, in which those
            that are being measured count in part, and the number of all.
        share: (number, number of processes): each of the processes that build it begins at another shard.
        force: scan and measure every shard again, and merge again, without the cache.
        retry_seconds: the time for retries over the whole build. A shard that does not exist ends it immediately.
        first: index only the first rows, at least to this good sample; 0 for all. Processes with one cache folder build
            it one after another, and each uses what another one has just built. Columns to rename may be missing.

    Raises ValueError; ProcessError if a process of `jobs` ended, three times with one shard; StorageError if a shard
    cannot be read, or the cache not be written, or none of the files that records name below a media_root exists;
    MemoryError for a sample that cannot be measured under the memory limit, even alone; PackageError, FunctionError,
    StaleIndexError.
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

    def warn(error: Exception) -> None:
        is_refused = isinstance(error, StorageError) and error.is_refused
        how_long = "some seconds" if is_refused else f"up to {retry_seconds:g} s of waiting in this build"
        warnings.warn(f"{error}; trying again for {how_long}", stacklevel=2)

    # Packages are imported, and the folder and duplicate paths checked, before any shard is read.
    load_for_scanning(recipe)
    cache, patience = cache or CacheFolder(), Patience(retry_seconds, warn)
    fingerprint, reading = recipe.count_fingerprint(), reading.looked_up(urls)
    path = index_path(urls, fingerprint, cache, reading, first=first)

    def stamp() -> tuple[int, int] | None:
        status = status_of(path) if first else None
        return None if status is None else (status.st_ino, status.st_mtime_ns)

    before = stamp()
    if recipe.record is not None and not force:
        with contextlib.suppress(FileNotFoundError, DamagedIndexError):
            check_function_of(Index(path).recipe, recipe)
    builder = patience.keep_trying(lambda: Builder(recipe, fingerprint, cache, reading, force), StorageError)
    paths = [identity(url) for url in urls]
    refuse_repeats(paths, num_threads=workers)
    if jobs > 1:
        open_builder = functools.partial(Builder, recipe, fingerprint, reading=reading, force=force)
        builder.jobs = Jobs(jobs, Given(open_builder, cache, recipe, jobs), paths, reading.files)

    crew = _Crew(builder, workers, patience, progress, under_way)
    with closing(builder), closing(crew.spread), ExitStack() as claimed:
        # Measure the shards.
        if not first:
            begin = len(paths) * share[0] // share[1]
            table_of = crew.measured(paths[begin:] + paths[:begin])
            tables = [table_of[url] for url in paths]
        else:
            claimed.enter_context(builder.claims.claim(str(path), go_on=lambda: True))
            if stamp() != before:
                with contextlib.suppress(DamagedIndexError):  # another process has built it meanwhile
                    if (index := open_index(urls, recipe, cache=cache, reading=reading, first=first)) is not None:
                        return index
            tables = crew.first(paths, first)
            if len(tables) == len(paths) and not tables[-1].shard.reach:  # these are all samples
                path, first = index_path(urls, fingerprint, cache, reading), 0
        builder.missing_media.check()

        # Merge their tables in the given order; another process may be merging the same index.
        if not first:
            check_met(reading.columns, [table.meta.met for table in tables])
            claimed.enter_context(builder.claims.claim(str(path), go_on=lambda: True))
        index = patience.keep_trying(lambda: builder.merged(path, tables), StorageError, FileNotFoundError)
    remove_leftovers(cache)
    return index


def refuse_repeats(urls: Sequence[str], *, num_threads: int) -> None:
    """Raise ValueError for shards that are one file, by a symbolic or hard link: every sample of it would come twice.
    Missing shards are ignored: opening them raises the error.
    """
    parts = [urls[at : at + 16] for at in range(0, len(urls), 16)]  # threads are for slow network file systems
    shares = in_threads(lambda part: [PLAIN_FILES.file_number(url) for url in part], parts, num_threads)
    seen: dict[Hashable, list[str]] = {}
    for url, number in zip(urls, chain.from_iterable(shares), strict=True):
        if number is None:
            continue
        same_number = seen.setdefault(number, [])
        for other in same_number:
            if how := PLAIN_FILES.why_same(other, url):
                raise ValueError(
                    f"{url} and {other} are the same file ({how}), and every sample would come twice: name one of them"
                )
        same_number.append(url)


class _Crew:
    """The threads of a build: how many may work, and which shards are retried."""

    def __init__(
        self,
        builder: Builder,
        workers: int,
        patience: Patience,
        progress: Callable[[BuildProgress], None] | None,
        under_way: Callable[[float, int], None] | None,
    ) -> None:
        self._builder = builder
        self._workers = workers
        self._patience = patience
        self._progress, self._under_way = progress, under_way
        self._turns = Turns(workers, paced=builder.jobs is None)
        self.spread = Spread(self._turns, workers)
        self._others: list[str] = []  # shards that other processes are measuring
        self._waits = False  # for these

    def first(self, paths: Sequence[str], count: int) -> list[CostTable]:
        """Return the tables of the first shards, at least to the `count`-th good sample; the last may be cut there."""
        tables: list[CostTable] = []
        while len(tables) < len(paths) and (left := count - sum(map(_num_good, tables))) > 0:
            # The next shards that are likely to have fewer samples together than are left,
            room = _SURE * left * sum(table.shard.size for table in tables) / max(1, count - left)
            inside: list[str] = []
            for path in paths[len(tables) :] if left < count else ():
                room -= self._builder.files.size_of(path)
                if room < 0:
                    break
                inside.append(path)

            # or part of the next one.
            if not inside:
                inside = [paths[len(tables)]]
                cut = functools.partial(self._builder.cut, inside[0], left)
                if (table := self._patience.keep_trying(cut, StorageError, StaleIndexError)) is not None:
                    return [*tables, table]
            table_of = self.measured(inside)
            tables += [table_of[each] for each in inside]
        return tables

    def measured(self, urls: Sequence[str]) -> dict[str, CostTable]:
        """Measure shards in threads, each by one or more, and return their tables by path."""
        # A task per small shard would take a fifth of the time of measuring it.
        length = max(1, min(_CHUNK_SHARDS, len(urls) // (64 * self._workers)))
        chunks = [urls[start : start + length] for start in range(0, len(urls), length)]
        tables: dict[str, CostTable] = {}
        shown, self._waits = 0.0, False
        # After an error or Ctrl-C, it waits for the shards that are being measured.
        with ThreadPoolExecutor(self._workers, thread_name_prefix="orchdata-index") as pool, measuring():
            try:
                while chunks:  # shards that other processes are measuring are checked again, and waited for
                    results: SimpleQueue[Future[list[tuple[str, CostTable, bool]]]] = SimpleQueue()
                    for chunk in chunks:
                        pool.submit(self._measure, chunk).add_done_callback(results.put)
                    left = len(chunks)
                    while left:
                        future = None
                        with contextlib.suppress(Empty):
                            future = results.get(timeout=_TICK_SECONDS)  # a Ctrl-C may be heard only after a wait
                            left -= 1
                        for url, table, measured in () if future is None else future.result():
                            tables[url] = table
                            if self._progress is not None:
                                counts = {"samples": table.totals["samples"], "bad": table.totals["bad"]}
                                counts |= {"done": len(tables), "total": len(urls)}
                                self._progress(BuildProgress(url=url, measured=measured, **counts))
                        if self._under_way is not None:
                            # A shard that a child has just measured may still count: never show less than before.
                            shown = min(len(urls), max(shown, len(tables) + shards_under_way()))
                            self._under_way(shown, len(urls))
                    chunks = [[url] for url in self._others]
                    self._others, self._waits = [], True
            except BaseException:  # cancel the shards that have not begun, and all retries
                self._patience.end()
                self._turns.end()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return tables

    def _measure(self, urls: Sequence[str]) -> list[tuple[str, CostTable, bool]]:
        """Return (url, costs, whether they were measured now) of these shards; fewer at the end."""
        here().ended = lambda: self._turns.ended
        done: list[tuple[str, CostTable, bool]] = []
        failed: list[tuple[str, StorageError | StaleIndexError]] = []
        short: list[str] = []
        with self._turns.turn() as report_work:
            for url in urls:
                if self._turns.ended:
                    return done
                try:
                    costs = self._builder.costs(url, lambda: self._waits and not self._turns.ended, self.spread)
                except (StorageError, StaleIndexError) as error:
                    failed.append((url, error))
                    continue
                except MemoryError:  # is not held: it refers to texts
                    short.append(url)
                    continue
                if costs is None:
                    self._others.append(url)
                else:
                    done.append((url, *costs))
                    report_work(_SHARD_WORK + costs[0].size.rows if costs[1] else 1)

        # Retries, outside of this thread's turn; then the shards that need more memory, one at a time.
        for url, first in failed:
            again = functools.partial(self._again, url, first, self._turns.turn, self.spread)
            try:
                tried = self._patience.keep_trying(again, StorageError, StaleIndexError, failed=first)
                done.append((url, *tried))
            except MemoryError:
                short.append(url)
        for url in short:
            ended = MemoryError(f"{url}: was not measured to the end: the build ended")
            try:
                done.append((url, *self._again(url, ended, self._turns.alone)))
            except MemoryError as error:
                raise measured_at(error, url) from error
        return done

    def _again(
        self,
        url: str,
        error: Exception,
        turn: Callable[[], AbstractContextManager[object]],
        spread: Spread | None = None,
    ) -> tuple[CostTable, bool]:
        """Measure a shard again after an error, which is raised if the build ends."""
        with turn():
            gc.collect()
            if self._turns.ended:
                raise error
            self._builder.files.forget(url)
            costs = self._builder.costs(url, lambda: not self._turns.ended, spread)
            if costs is None:
                raise error
            return costs


class Builder:
    """Measures the shards of a build, and merges their tables."""

    def __init__(self, recipe: Recipe, fingerprint: str, cache: CacheFolder, reading: Reading, force: bool) -> None:
        self._recipe = recipe
        self._fingerprint = fingerprint
        self._reading = reading
        self.files = reading.files
        self._cache = cache
        self._force = force
        # What is kept of shards besides costs: its folder and suffix, and what it depends on besides the shard.
        sizes = {name: ("sizes", recipe.size_fingerprint(name)) for name in recipe.counted_from_bytes}
        self._counts = {"": ("texts", recipe.text_fingerprint()), **sizes}
        for folder in {"costs", *(folder for folder, _ in self._counts.values())}:
            cache.make(folder)
        self._probes = Probes(recipe, cache, force=force)
        self._lock = threading.Lock()
        self._free_bytes = _IN_MEMORY_BYTES
        self.missing_media = MissingMedia()
        self.claims = Claims(cache.file("locks", "index"))
        self.jobs: Jobs | None = None

    def close(self) -> None:
        if self.jobs is not None:
            self.jobs.close()
        self.claims.close()

    def costs(self, url: str, go_on: Callable[[], bool], spread: Spread | None = None) -> tuple[CostTable, bool] | None:
        """Return the costs of a shard, and whether they were measured now; None if another process measures them, and
        `go_on` says not to keep waiting.
        """
        rules = self._reading.rules(url, self._recipe)
        root = self._reading.root_of(url, rules)
        name = digest([KEPT_FORMAT, versions(), self._fingerprint, url, root, rules.identity(url)])
        path = f"{self._cache.root}/costs/{name}.costs"
        how: dict[str, Any] = {"limits": self._recipe.limits, "cache": self._cache, "media_root": root, "rules": rules}
        how["files"] = self.files
        with ExitStack() as resources, here().at(url):

            @functools.cache
            def opened() -> Shard:
                shard = resources.enter_context(closing(open_shard(url, **how, whole=True)))
                if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                    resources.callback(self.missing_media.add, shard.folder)  # after all its files were looked up
                return shard

            def cached() -> CostTable | None:
                """Return the cached costs if the shard, and the files that it names, have not changed."""
                if self._force:
                    return None
                try:
                    table = CostTable.open(path, url, root, rules)
                    # Without a checksum the shard could not be opened, for a reason that may be temporary. The
                    # modification time counts too: editing text in place may not change size and headers.
                    return table if table.meta.checksum and is_fresh(table.meta, url, opened, self.files) else None
                except (OSError, ValueError):
                    return None  # absent, damaged or of another version

            if (table := cached()) is not None:
                return self._kept_in_memory(table), False
            with self.claims.claim(path, go_on) as ours:
                if not ours:
                    return None
                if (table := cached()) is not None:  # another process has measured it
                    return self._kept_in_memory(table), False
                if self.jobs is not None and not (spread is not None and self.jobs.divides(url)):
                    self.missing_media.add_found(self.jobs.measure(url))
                    try:
                        table = CostTable.open(path, url, root, rules)
                    except (OSError, ValueError) as error:
                        raise StorageError(path, f"was removed or damaged during the build: {error}") from error
                    return self._kept_in_memory(table), True
                facts = load_facts(url, opened, **how, force=self._force)
                costs, meta = self._measured(facts, opened, spread, [url, root, rules.identity(url)]), facts.meta
                del facts  # a large shard's take as much memory as its costs
                return self._kept_in_memory(costs.write(path, url, meta, root, rules)), True

    def cut(self, url: str, left: int) -> CostTable | None:
        """Measure a shard up to its `left`-th good sample; None if it has fewer, or has to be measured whole."""
        most, rules = left, self._reading.rules(url, self._recipe)
        root = self._reading.root_of(url, rules)
        how: dict[str, Any] = {"limits": self._recipe.limits, "cache": self._cache, "media_root": root, "rules": rules}
        try:
            opened = open_shard(url, **how, files=self.files)
            with here().at(url), measuring(), closing(opened) as shard:
                while isinstance(shard, TarShard | JsonLinesShard):
                    first = shard.begin(most)
                    if first.is_whole:
                        return None
                    costs = cost_shard(first.facts, lambda: opened, self._recipe, Probes(self._recipe, None))
                    good = costs.totals["samples"] - costs.totals["bad"]
                    if good >= left:
                        if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                            self.missing_media.add(shard.folder)
                        # A table that is in no file.
                        values, body = costs.values(url, first.facts.meta, root), pack(costs.columns)
                        content = digest([values, first.reach, hashlib.blake2b(body, digest_size=16).hexdigest()])
                        return CostTable.of("", values, content, body, rules, first.reach)
                    most += max(left - good, most // 2, _LEAST_MORE)  # some are bad, or left out
            return None
        except Exception as error:  # noqa: BLE001 - it is measured whole, which records what is wrong with it
            pass_trouble(error)
            return None

    def merged(self, path: Path, tables: Sequence[CostTable]) -> Index:
        """Return the index of these tables: the existing one if it is valid, else a new one."""
        build_id = digest([table.digest for table in tables])
        shards = [table.shard for table in tables]
        content = content_fingerprint(shards, self._fingerprint)
        index = _existing_index(path, [shard.url for shard in shards])
        if index is not None and not self._force and (index.build_id, index.fingerprint) == (build_id, content):
            return index
        self._cache.make("index")
        of_recipe: dict[str, Any] = {"modalities": self._recipe.kinds, "recipe": stored_description(self._recipe)}
        try:
            merge_tables(path, shards, tables, fingerprint=self._fingerprint, build_id=build_id, **of_recipe)
            return Index(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            there = [self._there(table) for table in tables]
            if all(one is other for one, other in zip(there, tables, strict=True)):
                raise
        return self.merged(path, there)

    def _there(self, table: CostTable) -> CostTable:
        """Return the table; measure the shard again if its file was removed."""
        with contextlib.suppress(StorageError):
            table.body()
            return table
        costs = self.costs(table.shard.url, lambda: True)
        assert costs is not None  # because it waits for other processes
        return costs[0]

    def _kept_in_memory(self, table: CostTable) -> CostTable:
        """Return the table, without its columns if all tables together would take too much memory."""
        with self._lock:
            if table.size.num_bytes > self._free_bytes:
                return replace(table, packed=None)
            self._free_bytes -= table.size.num_bytes
            return table

    def _measured(
        self, facts: Facts, opened: Callable[[], Shard], spread: Spread | None, identity: Sequence[Any]
    ) -> ShardCosts:
        """Measure a shard, and keep its counts, in files named by its `identity`."""
        meta, recipe = facts.meta, self._recipe
        paths = {
            name: f"{self._cache.root}/{folder}/{digest([fingerprint, *identity])}.{folder}"
            for name, (folder, fingerprint) in self._counts.items()
        }
        counts = KeptCounts(recipe, facts, paths, force=self._force)

        def shard() -> Shard:
            # Only read the file that was scanned: this process decodes a Parquet file only after a child has done it.
            current = opened()
            if (current.size, current.version) != (meta.size, meta.version):
                raise StaleIndexError(current.url, "was changed while it was indexed")
            return current

        if self.jobs is not None:
            spread = self.jobs.spread(meta.url, len(facts.table))
        try:
            costs = cost_shard(facts, shard, recipe, self._probes, spread, counts)
        except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
            pass_trouble(error)
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(Facts(facts.table.all_failed(reason), meta), shard, recipe, self._probes)
        counts.write()
        return costs


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


def _num_good(table: CostTable) -> int:
    return int(table.totals["samples"] - table.totals["bad"])
