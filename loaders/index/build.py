"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically and says what it was made of, so builders may run at the same time, and one that is
killed costs the next only what it had not finished. What is kept is verified before it is used, and made again
where it is not what was written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from orchdata.loaders.errors import NOT_DATA, DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.facts import is_fresh, load_facts
from orchdata.loaders.index.index import Index, absolute, content_fingerprint, digest, index_path, is_outdated
from orchdata.loaders.index.merge import RecipeIdentity, merge_tables
from orchdata.loaders.index.pace import Turns
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.repeats import refuse_repeats
from orchdata.loaders.index.shard_costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.table import body_bytes
from orchdata.loaders.modalities.builtin import load_decoders
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.atomic import TEMPORARY_SUFFIX
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience
from orchdata.loaders.storage.verified import NOTE_SUFFIX
from orchdata.loaders.versions import RULES, TABLE_FORMAT

_KEEP_SECONDS = 24 * 3600
_KEEP_NOTES_SECONDS = 30 * _KEEP_SECONDS
_STRETCH = 16
"""Shards that a thread takes at a time, where there are very many; those in trouble are tried again at its end."""
_SHARD_WORK = 5
"""What a shard costs beside its samples, in samples; to look at one whose costs are kept is 1."""
_HELD_BYTES = 256 << 20
"""Tables of costs up to this much in all are held until they are merged; others are read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """One more shard is done.

    Attributes:
        url: of the shard.
        measured: whether it was measured now; else its kept costs were still right.
        samples, bad: in the shard.
        done, total: shards so far, and all.
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
    num_threads: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    force: bool = False,
    retry_seconds: float = BUILD_SECONDS,
) -> Index:
    """Make or refresh the index of shards under a recipe, and open it.

    A bad sample or shard is a row of the index with an error, never an exception. What cannot be read or written now is
    no bad sample: it is tried again, with a warning, and ends the build if it lasts.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: what to measure under. Its tokenizer is called from several threads.
        cache: where facts, costs and indexes are kept; default: the folder that the environment names.
        num_threads: shards at a time, at most: fewer where fewer are faster; default: one per CPU, at most 8.
        progress: called in this thread after each shard.
        force: scan and measure every shard again, and merge again, whatever is kept.
        retry_seconds: how long trouble is borne, over the whole build. A shard that does not exist ends it at once.

    Raises:
        ValueError: no shards, an unknown suffix, or two paths of one file.
        StorageError: a shard cannot be read, or the cache cannot be written.
        StaleIndexError: a shard goes on changing while it is read.
    """
    if not urls:
        raise ValueError("no shards to index")
    workers = min(8, os.cpu_count() or 1) if num_threads is None else num_threads
    if workers < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    cache = cache or CacheFolder()
    fingerprint = recipe.fingerprint()
    patience = Patience(retry_seconds, lambda error: _warn_of(error, retry_seconds))
    builder = patience.keep_trying(lambda: _Builder(recipe, fingerprint, cache, force), StorageError)
    path = index_path(urls, fingerprint, cache)
    if patience.keep_trying(lambda: is_outdated(urls, recipe, cache=cache), StorageError):
        warnings.warn("the index of these shards is of an earlier format: it is made again", stacklevel=2)
    paths = [absolute(url) for url in urls]
    load_decoders()
    refuse_repeats(paths, num_threads=workers)
    tables = _in_parallel(builder, paths, workers, progress, patience)

    build_id = digest([table.digest for table in tables])
    shards = [table.shard for table in tables]

    def merged() -> Index:
        kept = _kept_index(path)
        known = kept is not None and kept.build_id == build_id
        if kept is not None and known and not force and kept.fingerprint == content_fingerprint(shards, fingerprint):
            return kept
        cache.make("index")
        merge_tables(path, tables, RecipeIdentity(fingerprint, recipe.kinds, recipe.describe()), build_id=build_id)
        return Index(path)

    index = patience.keep_trying(merged, StorageError)
    _forget_left(cache)
    return index


def _warn_of(error: Exception, seconds: float) -> None:
    warnings.warn(f"{error}; trying again for up to {seconds:g} s of waiting in this build", stacklevel=2)


def _in_parallel(
    builder: _Builder,
    urls: Sequence[str],
    workers: int,
    progress: Callable[[BuildProgress], None] | None,
    patience: Patience,
) -> list[CostTable]:
    # Handing over one small shard at a time takes a fifth of the time that measuring it does.
    length = max(1, min(_STRETCH, len(urls) // (64 * workers)))
    tables: dict[str, CostTable] = {}
    crew = _Crew(builder, workers, patience)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-index")
    try:
        with measuring(), _cancelled(pool, crew):
            for future in as_completed(
                [pool.submit(crew.measure, urls[start : start + length]) for start in range(0, len(urls), length)]
            ):
                for url, table, measured in future.result():
                    tables[url] = table
                    if progress is not None:
                        counts = {"samples": table.totals["samples"], "bad": table.totals["bad"]}
                        progress(BuildProgress(url=url, measured=measured, done=len(tables), total=len(urls), **counts))
    finally:
        pool.shutdown()  # after an error or Ctrl-C: shards under way end
    return [tables[url] for url in urls]


@contextmanager
def _cancelled(pool: ThreadPoolExecutor, crew: _Crew) -> Iterator[None]:
    """After an error in the block what has not begun never does, and what waits to be tried again is not."""
    try:
        yield
    except BaseException:
        crew.end()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class _Crew:
    """The threads of a build: who may be at work, and what is tried again."""

    def __init__(self, builder: _Builder, workers: int, patience: Patience) -> None:
        self._builder = builder
        self._patience = patience
        self._turns = Turns(workers)

    def measure(self, stretch: Sequence[str]) -> list[tuple[str, CostTable, bool]]:
        """(url, costs, whether they were measured now) of these shards; fewer after `end`."""
        done: list[tuple[str, CostTable, bool]] = []
        troubled: list[tuple[str, StorageError | StaleIndexError]] = []
        with self._turns.turn() as tell:
            for url in stretch:
                if self._turns.ended:
                    return done
                try:
                    table, measured = self._builder.costs(url)
                except (StorageError, StaleIndexError) as trouble:
                    troubled.append((url, trouble))
                else:
                    done.append((url, table, measured))
                    tell(_SHARD_WORK + table.size.samples if measured else 1)
        for url, error in troubled:  # others have their turn while these wait
            again = functools.partial(self._again, url, error)
            done.append((url, *self._patience.keep_trying(again, StorageError, StaleIndexError, failed=error)))
        return done

    def _again(self, url: str, error: Exception) -> tuple[CostTable, bool]:
        with self._turns.turn():
            if self._turns.ended:
                raise error
            return self._builder.costs(url)

    def end(self) -> None:
        self._patience.end()
        self._turns.end()


class _Builder:
    """What is the same for all shards of a build."""

    def __init__(self, recipe: Recipe, fingerprint: str, cache: CacheFolder, force: bool) -> None:
        self._recipe = recipe
        self._identity = blake2b(f"{TABLE_FORMAT} {RULES} {fingerprint} ".encode(), digest_size=16)
        self._cache = cache
        self._force = force
        self._folder = cache.make("costs")
        self._probes = Probes(recipe, cache, force=force)
        self._lock = threading.Lock()
        self._room = _HELD_BYTES

    def costs(self, url: str) -> tuple[CostTable, bool]:
        """The costs of a shard, and whether they were measured now."""
        path = self._path(url)
        if not self._force and (kept := _kept_costs(path, url)) is not None:
            return self._hold(kept), False
        limits, cache = self._recipe.limits, self._cache
        with ExitStack() as resources:

            @functools.cache
            def opened() -> Shard:
                return resources.enter_context(closing(open_shard(url, limits=limits, cache=cache)))

            facts = load_facts(url, opened, limits=limits, cache=cache, force=self._force)
            return self._hold(self._measured(facts, opened).write(path, url, facts.meta)), True

    def _path(self, url: str) -> str:
        name = self._identity.copy()
        name.update(url.encode("utf-8", "surrogateescape"))
        return f"{self._folder}/{name.hexdigest()}.costs"

    def _hold(self, table: CostTable) -> CostTable:
        """The table, held in memory while there is room."""
        with self._lock:
            length = body_bytes(table.size)
            if length > self._room:
                return table.let_go()
            self._room -= length
            return table

    def _measured(self, facts: Facts, opened: Callable[[], Shard]) -> ShardCosts:
        meta = facts.meta

        def shard() -> Shard:
            # What is read is what was scanned: a Parquet file is decoded here only after a child has decoded it.
            found = opened()
            if (found.size, found.version) != (meta.size, meta.version):
                raise StaleIndexError(found.url, "was changed while it was indexed")
            return found

        try:
            return cost_shard(facts, shard, self._recipe, self._probes)
        except NOT_DATA:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a shard makes a reader raise is that shard's failure
            pass_trouble(error)
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(Facts(facts.table.all_failed(reason), meta), shard, self._recipe, self._probes)


def _kept_costs(path: str, url: str) -> CostTable | None:
    """The costs kept of a shard, if they are of the shard as it is now."""
    try:
        table = CostTable.open(path, url)
        # Without a checksum the shard could not be opened, for a reason that may pass. The time of change counts too:
        # text edited in place may leave size and headers as they were.
        return table if table.meta.checksum and is_fresh(table.meta, url) else None
    except (OSError, ValueError):
        return None  # absent, damaged or of another version


def _kept_index(path: Path) -> Index | None:
    try:
        return Index(path)
    except FileNotFoundError:
        return None
    except DamagedIndexError as error:
        warnings.warn(f"the index {path} is damaged: {error.reason}; it is made again", RuntimeWarning, stacklevel=3)
        return None


def _forget_left(cache: CacheFolder) -> None:
    """Remove what killed builders left a day ago, and notes of verified files a month old: of machines long gone.

    Best effort: what is another user's stays.
    """
    for kind in ("facts", "costs", "index", "shards"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(cache.root / kind):
                if entry.name.endswith((TEMPORARY_SUFFIX, NOTE_SUFFIX)):
                    with contextlib.suppress(OSError):
                        _forget_old(entry)


def _forget_old(entry: os.DirEntry[str]) -> None:
    kept_seconds = _KEEP_NOTES_SECONDS if entry.name.endswith(NOTE_SUFFIX) else _KEEP_SECONDS
    if time.time() - entry.stat().st_mtime > kept_seconds:
        os.unlink(entry.path)
