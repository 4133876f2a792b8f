"""Shards -> index, in parallel and incrementally: only what changed since the last build is read.

    shard --load_facts (kept)--> facts --cost_shard (kept)--> costs --merge_tables--> one file

Every layer is written atomically, and records what it was made from, so builders may run at the same time, and after a
killed one the next only repeats unfinished work. Cached files are verified before use, damaged ones are built again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import closing

from orchdata.loaders.errors import DamagedIndexError, StorageError
from orchdata.loaders.index.building.builder import Builder
from orchdata.loaders.index.building.crew import BuildProgress, in_parallel, warn_of_retries
from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.index.jobs.jobs import Jobs
from orchdata.loaders.index.jobs.work import Given
from orchdata.loaders.index.locations import check_function_of, index_path
from orchdata.loaders.index.repeats import refuse_repeats
from orchdata.loaders.kept import remove_leftovers
from orchdata.loaders.pace import threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.field_rules import check_met
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import is_remote
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience


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
