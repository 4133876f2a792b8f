"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically under a name that tells its content, so builders may run at the same time, and one
that is killed costs the next only what it had not finished.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from orchdata.loaders.cache import CacheFolder
from orchdata.loaders.columns import FactsMeta, all_failed
from orchdata.loaders.costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.errors import NOT_DATA, StaleIndexError, StorageError
from orchdata.loaders.facts import load_facts
from orchdata.loaders.index import Index, ShardInfo, absolute, content_fingerprint, digest, index_path
from orchdata.loaders.merge import TEMPORARY_SUFFIX, RecipeIdentity, merge_tables
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.retries import BUILD_SECONDS, Patience
from orchdata.loaders.shards import Shard, open_shard
from orchdata.loaders.table import FORMAT

_KEEP_SECONDS = 24 * 3600


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
        num_threads: shards at a time; default: one per CPU, at most 8.
        progress: called in this thread after each shard.
        force: scan and measure everything again.
        retry_seconds: how long trouble is borne, over the whole build. A shard that does not exist ends it at once.

    Raises:
        ValueError: no shards, or an unknown suffix.
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
    builder = _Builder(recipe, fingerprint, cache, force)
    patience = Patience(retry_seconds, lambda error: _warn_of(error, retry_seconds))
    tables = _in_parallel(builder, [absolute(url) for url in urls], workers, progress, patience)

    path = index_path(urls, fingerprint, cache)
    build_id = digest([table.path.name for table in tables])

    def merge() -> None:
        if not _is_made_of(path, tables, fingerprint, build_id):
            merge_tables(path, tables, RecipeIdentity(fingerprint, recipe.describe()), build_id=build_id)

    patience.keep_trying(merge, StorageError)
    _forget_older(path, tables)
    return Index(path)


def _warn_of(error: Exception, seconds: float) -> None:
    warnings.warn(f"{error}; trying again for up to {seconds:g} s of waiting in this build", stacklevel=2)


def _in_parallel(
    builder: _Builder,
    urls: Sequence[str],
    workers: int,
    progress: Callable[[BuildProgress], None] | None,
    patience: Patience,
) -> list[CostTable]:
    def costs(url: str) -> tuple[CostTable, bool]:
        return patience.keep_trying(lambda: builder.costs(url), StorageError, StaleIndexError)

    tables: dict[str, CostTable] = {}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-index")
    try:
        futures: dict[Future[tuple[CostTable, bool]], str] = {pool.submit(costs, url): url for url in urls}
        for future in as_completed(futures):
            url = futures[future]
            tables[url], measured = future.result()
            if progress is not None:
                totals = tables[url].totals
                counts = {"samples": totals["samples"], "bad": totals["bad"], "done": len(tables), "total": len(urls)}
                progress(BuildProgress(url=url, measured=measured, **counts))
    finally:
        patience.end()
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C: shards under way end, no other begins
    return [tables[url] for url in urls]


@dataclass(frozen=True, slots=True)
class _Builder:
    """What is the same for all shards of a build."""

    recipe: Recipe
    fingerprint: str
    cache: CacheFolder
    force: bool

    def costs(self, url: str) -> tuple[CostTable, bool]:
        """The costs of a shard, and whether they were measured now."""
        limits = self.recipe.limits
        facts = load_facts(url, limits=limits, cache=self.cache, force=self.force)
        meta = FactsMeta.of(facts.schema)
        shard = ShardInfo(url, meta.size, meta.checksum, meta.version, meta.lost_samples, meta.lost_bytes)
        # The version (time of change) too: text edited in place may leave size and headers as they were.
        content = [FORMAT, meta.checksum, meta.version]
        known = bool(meta.checksum)  # without one the shard could not be opened, for a reason that may pass
        if not known:
            content.append(facts.column("error")[0].as_py())
        path = self.cache.file("costs", f"{digest([url, self.fingerprint])}-{digest(content)}.arrow")
        if known and not self.force:
            try:
                return CostTable.open(path, shard), False
            except (FileNotFoundError, ValueError):
                pass
        self._measured(facts, shard).write(path)
        return CostTable.open(path, shard), True

    def _measured(self, facts: pa.Table, info: ShardInfo) -> ShardCosts:
        def shard() -> Shard:
            opened = open_shard(info.url, limits=self.recipe.limits, cache=self.cache)
            if (opened.size, opened.version) != (info.size, info.version):
                opened.close()
                raise StaleIndexError(info.url, "was changed while it was indexed")
            return opened

        try:
            return cost_shard(facts, shard, self.recipe)
        except NOT_DATA:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a shard makes a reader raise is that shard's failure
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(all_failed(facts, reason), shard, self.recipe)


def _is_made_of(path: Path, tables: Sequence[CostTable], recipe: str, build_id: str) -> bool:
    try:
        index = Index(path)
    except (FileNotFoundError, ValueError):
        return False
    shards = [table.shard for table in tables]
    return index.build_id == build_id and index.fingerprint == content_fingerprint(shards, recipe)


def _forget_older(index: Path, tables: Sequence[CostTable]) -> None:
    """Remove, a day after they were written, costs of earlier versions of these shards, and what killed builders left.

    By then no concurrent builder can be using them.
    """
    current = {table.path.name for table in tables}
    owners = {name.partition("-")[0] for name in current}
    for entry in (*tables[0].path.parent.iterdir(), *index.parent.iterdir()):
        older = entry.name.partition("-")[0] in owners and entry.name not in current
        if older or entry.suffix == TEMPORARY_SUFFIX:
            try:
                if time.time() - entry.stat().st_mtime > _KEEP_SECONDS:
                    entry.unlink()
            except OSError:
                pass  # another builder was faster, or it is another user's
