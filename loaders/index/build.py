"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically and says what it was made of, so builders may run at the same time, and one that is
killed costs the next only what it had not finished. What is kept is verified before it is used, and made again
where it is not what was written.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.facts import is_fresh, load_facts
from orchdata.loaders.index.index import Index, absolute, content_fingerprint, digest
from orchdata.loaders.index.kept import index_path, is_outdated
from orchdata.loaders.index.merge import RecipeIdentity, merge_tables
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.repeats import refuse_repeats
from orchdata.loaders.index.shard_costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.table import body_bytes
from orchdata.loaders.memory import measured_at
from orchdata.loaders.pace import Turns
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.facts_table import Facts
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.slow import here, watching
from orchdata.loaders.storage.atomic import TEMPORARY_SUFFIX, remove
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.paths import media_root_of
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience
from orchdata.loaders.storage.shared.access import Access, Accesses, restrict
from orchdata.loaders.storage.shared.files import names_in
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
    media_root: str | None = None,
    num_threads: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    force: bool = False,
    share: tuple[int, int] = (0, 1),
    retry_seconds: float = BUILD_SECONDS,
) -> Index:
    """Make or refresh the index of shards under a recipe, and open it.

    Several processes may build the same at once: what one is at, no other begins, and each ends with all of it. What
    one that is killed was at, another does.

    A bad sample or shard is a row of the index with an error, never an exception. What cannot be read or written now is
    no bad sample: it is tried again, with a warning, and ends the build if it lasts.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: what to measure under. Its tokenizer is called from several threads.
        cache: where facts, costs and indexes are kept; default: the folder that the environment names.
        media_root: folder that the files lie below which records of JSON name; part of what the index is found by.
        num_threads: shards at a time, at most: fewer where fewer are faster; default: one per CPU, at most 8.
        progress: called in this thread after each shard.
        share: (number, how many) of the processes that build it: each begins elsewhere.
        force: scan and measure every shard again, and merge again, whatever is kept.
        retry_seconds: how long trouble is borne, over the whole build. A shard that does not exist ends it at once.

    Raises:
        ValueError: no shards, an unknown suffix, or two paths of one file.
        StorageError: a shard cannot be read, or the cache cannot be written; or none of the files is there that records
            name below a media_root.
        MemoryError: a sample cannot be measured under the limit of memory that there is, also alone. Nothing is kept of
            its shard.
        PackageError: a package that the recipe or a shard needs is missing or broken.
        StaleIndexError: a shard goes on changing while it is read.
    """
    if not urls:
        raise ValueError("no shards to index")
    workers = min(8, os.cpu_count() or 1) if num_threads is None else num_threads
    if workers < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    load_for_scanning(recipe)
    cache = cache or CacheFolder()
    fingerprint = recipe.fingerprint()
    patience = Patience(retry_seconds, lambda error: _warn_of(error, retry_seconds))
    builder = patience.keep_trying(lambda: _Builder(recipe, fingerprint, cache, media_root, force), StorageError)
    path = index_path(urls, fingerprint, cache, media_root)
    if patience.keep_trying(lambda: is_outdated(urls, recipe, cache=cache, media_root=media_root), StorageError):
        warnings.warn("the index of these shards is of an earlier format: it is made again", stacklevel=2)
    paths = [absolute(url) for url in urls]
    refuse_repeats(paths, num_threads=workers)
    first = len(paths) * share[0] // share[1]
    with closing(builder):
        measured = _in_parallel(builder, paths[first:] + paths[:first], workers, progress, patience)
        builder.missing_media.check()
        tables = [measured[path] for path in paths]
        with builder.claims.claim(str(path), go_on=lambda: True):  # another may be merging the same
            index = patience.keep_trying(lambda: builder.merged(path, tables), StorageError)
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
) -> dict[str, CostTable]:
    # Handing over one small shard at a time takes a fifth of the time that measuring it does.
    length = max(1, min(_STRETCH, len(urls) // (64 * workers)))
    tables: dict[str, CostTable] = {}
    crew = _Crew(builder, workers, patience)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-index")
    try:
        with measuring(), watching(), _cancelled(pool, crew):
            stretches = [urls[start : start + length] for start in range(0, len(urls), length)]
            while stretches:  # what other processes were at is looked at again, and waited for
                for future in as_completed([pool.submit(crew.measure, stretch) for stretch in stretches]):
                    for url, table, measured in future.result():
                        tables[url] = table
                        if progress is not None:
                            counts = {"samples": table.totals["samples"], "bad": table.totals["bad"]}
                            done = BuildProgress(
                                url=url, measured=measured, done=len(tables), total=len(urls), **counts
                            )
                            progress(done)
                stretches = [[url] for url in crew.take_others()]
    finally:
        pool.shutdown()  # after an error or Ctrl-C: shards under way end
    return tables


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
        self._others: list[str] = []
        self._waits = False

    def take_others(self) -> list[str]:
        """Shards that other processes were at; they are waited for from now on."""
        others, self._others, self._waits = self._others, [], True
        return others

    def _go_on(self) -> bool:
        return self._waits and not self._turns.ended

    def measure(self, stretch: Sequence[str]) -> list[tuple[str, CostTable, bool]]:
        """(url, costs, whether they were measured now) of these shards; fewer after `end`."""
        done: list[tuple[str, CostTable, bool]] = []
        troubled: list[tuple[str, StorageError | StaleIndexError]] = []
        short: list[str] = []
        with self._turns.turn() as tell:
            for url in stretch:
                if self._turns.ended:
                    return done
                try:
                    found = self._builder.costs(url, self._go_on)
                except (StorageError, StaleIndexError) as trouble:
                    troubled.append((url, trouble))
                    continue
                except MemoryError:
                    short.append(url)
                    continue
                if found is None:
                    self._others.append(url)
                else:
                    table, measured = found
                    done.append((url, table, measured))
                    tell(_SHARD_WORK + table.size.rows if measured else 1)
        for url, error in troubled:  # others have their turn while these wait
            again = functools.partial(self._again, url, error)
            try:
                done.append((url, *self._patience.keep_trying(again, StorageError, StaleIndexError, failed=error)))
            except MemoryError:
                short.append(url)
        done += [(url, *self._alone(url)) for url in short]
        return done

    def _alone(self, url: str) -> tuple[CostTable, bool]:
        """Measure a shard for which there was too little memory, while no other is measured."""
        with self._turns.alone():
            gc.collect()
            try:
                found = None if self._turns.ended else self._builder.costs(url, lambda: not self._turns.ended)
            except MemoryError as error:
                raise measured_at(error, url) from error
        if found is None:
            raise MemoryError(f"{url}: was not measured to the end: the build ended")
        return found

    def _again(self, url: str, error: Exception) -> tuple[CostTable, bool]:
        with self._turns.turn():
            if self._turns.ended:
                raise error
            found = self._builder.costs(url, lambda: not self._turns.ended)
            if found is None:
                raise error
            return found

    def end(self) -> None:
        self._patience.end()
        self._turns.end()


class _Builder:
    """What is the same for all shards of a build."""

    def __init__(
        self, recipe: Recipe, fingerprint: str, cache: CacheFolder, media_root: str | None, force: bool
    ) -> None:
        self._recipe = recipe
        self._fingerprint = fingerprint
        self._media_root = media_root
        self._identity = blake2b(f"{TABLE_FORMAT} {RULES} {fingerprint} ".encode(), digest_size=16)
        self._cache = cache
        self._force = force
        self._folder = cache.make("costs")
        self._accesses = Accesses()
        self._probes = Probes(recipe, cache, force=force, accesses=self._accesses)
        self._lock = threading.Lock()
        self._room = _HELD_BYTES
        self.missing_media = MissingMedia()
        self.claims = Claims(cache.file("locks", "index"))

    def close(self) -> None:
        self.claims.close()

    def costs(self, url: str, go_on: Callable[[], bool]) -> tuple[CostTable, bool] | None:
        """The costs of a shard, and whether they were measured now.

        Args:
            go_on: whether to wait while another process measures them; else None.
        """
        limits, cache, root = self._recipe.limits, self._cache, media_root_of(url, self._media_root)
        path, access = self._path(url, root), self._accesses.of(url)
        with ExitStack() as resources, here().at(url):

            @functools.cache
            def opened() -> Shard:
                shard = open_shard(url, limits=limits, cache=cache, media_root=root)
                resources.enter_context(closing(shard))
                if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                    resources.callback(self.missing_media.add, shard.folder)  # once all has been looked for in it
                return shard

            def kept() -> CostTable | None:
                return None if self._force else self._kept(path, url, root, access, opened)

            if (table := kept()) is not None:
                return self._hold(table), False
            with self.claims.claim(path, go_on) as ours:
                if not ours:
                    return None
                if (table := kept()) is not None:
                    return self._hold(table), False
                facts = load_facts(
                    url, opened, limits=limits, cache=cache, media_root=root, force=self._force, access=access
                )
                return self._hold(self._measured(facts, opened).write(path, url, facts.meta, root, access)), True

    def _kept(
        self, path: str, url: str, media_root: str | None, access: Access, opened: Callable[[], Shard]
    ) -> CostTable | None:
        """The costs kept of a shard, if they are of the shard, and the files that it names, as they are now."""
        restrict(path, access)
        try:
            table = CostTable.open(path, url, self._recipe.kinds, media_root or "", access)
            # Without a checksum the shard could not be opened, for a reason that may pass. The time of change counts
            # too: text edited in place may leave size and headers as they were.
            return table if table.meta.checksum and is_fresh(table.meta, url, opened) else None
        except (OSError, ValueError):
            return None  # absent, damaged or of another version

    def merged(self, path: Path, tables: Sequence[CostTable]) -> Index:
        """The index of these tables, which is made unless it is kept."""
        build_id = digest([table.digest for table in tables])
        content = content_fingerprint([table.shard for table in tables], self._fingerprint)
        access = Access.joined(table.access for table in tables if table.access is not None)
        restrict(path, access)
        kept = _kept_index(path, [table.url for table in tables])
        if kept is not None and not self._force and kept.build_id == build_id and kept.fingerprint == content:
            return kept
        self._cache.make("index")
        identity = RecipeIdentity(self._fingerprint, self._recipe.kinds, self._recipe.describe())
        try:
            merge_tables(path, tables, identity, build_id=build_id, access=access)
            return Index(path)
        except (ValueError, DamagedIndexError):
            sound = [self._sound(table) for table in tables]
            if sound == list(tables):
                raise
            remove(path)
        return self.merged(path, sound)

    def _sound(self, table: CostTable) -> CostTable:
        """The table, measured again where its columns are not what a build writes."""
        if table.is_sound():
            return table
        remove(table.path)
        found = self.costs(table.url, lambda: True)
        assert found is not None  # as it waits for other processes
        return found[0]

    def _path(self, url: str, media_root: str | None) -> str:
        name = self._identity.copy()
        name.update((url if media_root is None else f"{url}\0{media_root}").encode("utf-8", "surrogateescape"))
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
        except Exception as error:  # noqa: BLE001 - whatever a shard makes a reader raise is that shard's failure
            pass_trouble(error)
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(Facts(facts.table.all_failed(reason), meta), shard, self._recipe, self._probes)


def _kept_index(path: Path, urls: Sequence[str]) -> Index | None:
    try:
        index = Index(path)
        index.check_urls(urls)
        return index
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
            for name in names_in(cache.root / kind):
                if name.endswith((TEMPORARY_SUFFIX, NOTE_SUFFIX)):
                    with contextlib.suppress(OSError):
                        _forget_old(cache.root / kind / name)


def _forget_old(path: Path) -> None:
    kept_seconds = _KEEP_NOTES_SECONDS if path.name.endswith(NOTE_SUFFIX) else _KEEP_SECONDS
    if time.time() - path.lstat().st_mtime > kept_seconds:
        path.unlink()
