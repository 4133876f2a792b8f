"""The index of the first samples of shards, for `dataset.take(N)`: other samples are not looked at.

    shards, in order --those that lie inside--> measured as for the full index, and kept for it
                     --the one in which the N-th good sample lies--> measured up to there, and not kept
    their tables --merged--> an index under a name of its own, which has N in it

The rows are the first rows of the full index, to the bit. `ShardInfo.reach` says which shard was cut: only
tars and files of lines are, others are measured whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.build import Builder, in_parallel, refuse_repeats, warn_of_retries
from orchdata.loaders.index.costs import CostTable, cost_shard
from orchdata.loaders.index.facts import Probes
from orchdata.loaders.index.index import Index, absolute, digest
from orchdata.loaders.index.index_file import check_function_of, index_path
from orchdata.loaders.index.table import pack
from orchdata.loaders.pace import threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.fields import check_met
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.retries import BUILD_SECONDS, Patience
from orchdata.loaders.watch import here

_SURE: Final = 0.8
"""Shards are measured whole as long as they have at most this part of the samples that are left, by their bytes."""
_LEAST_MORE: Final = 16


def open_first(
    urls: Sequence[str],
    recipe: Recipe,
    count: int,
    *,
    cache: CacheFolder | None = None,
    reading: Reading = PLAIN,
) -> Index | None:
    """Open the index that `build_first_index` made of these shards for `count` samples; None if there is none.

    Raises as `open_index`.
    """
    try:
        index = Index(index_path(urls, recipe.count_fingerprint(), cache or CacheFolder(), reading, first=count))
    except FileNotFoundError:
        return None
    index.check_urls([absolute(url) for url in urls[: len(index.shards)]])
    check_function_of(index, recipe)
    return index


def build_first_index(
    urls: Sequence[str],
    recipe: Recipe,
    count: int,
    *,
    cache: CacheFolder | None = None,
    reading: Reading = PLAIN,
    num_threads: int | None = None,
    under_way: Callable[[float, int], None] | None = None,
    retry_seconds: float = BUILD_SECONDS,
) -> Index:
    """Build or refresh an index with the first rows of the full one: at least to the `count`-th good sample.

    If that takes all samples, it is the full index. Processes with one cache folder build it one after another, and
    each uses what another one has just built.

    Args:
        urls: paths of the shards, expanded, in order; at least one.
        recipe: defines the costs.
        count: number of good samples, at least 1.
        cache, reading, num_threads, under_way, retry_seconds: as of `build_index`.

    Raises as `build_index`, but not for columns to rename that these samples do not have.
    """
    load_for_scanning(recipe)
    cache = cache or CacheFolder()
    fingerprint = recipe.count_fingerprint()
    reading = reading.looked_up(urls)
    path = index_path(urls, fingerprint, cache, reading, first=count)
    before = _changed(path)
    patience = Patience(retry_seconds, lambda error: warn_of_retries(error, retry_seconds))
    builder = patience.keep_trying(lambda: Builder(recipe, fingerprint, cache, reading, False), StorageError)
    paths = [absolute(url) for url in urls]
    refuse_repeats(paths, num_threads=8)
    with closing(builder), builder.claims.claim(str(path), go_on=lambda: True):
        if _changed(path) != before:  # another process has built it meanwhile
            with suppress(DamagedIndexError):
                if (index := open_first(urls, recipe, count, cache=cache, reading=reading)) is not None:
                    return index
        workers = threads_or_default(num_threads)

        def whole(inside: Sequence[str]) -> dict[str, CostTable]:
            return in_parallel(builder, inside, workers, None, under_way, patience)

        def cut(url: str, left: int) -> CostTable | None:
            call = partial(_cut, builder, recipe, reading, cache, url, left)
            return patience.keep_trying(call, StorageError, StaleIndexError)

        with measuring():
            tables = _first_tables(paths, count, whole, cut, reading.files)
        builder.missing_media.check()
        if len(tables) == len(paths) and not tables[-1].shard.reach:  # these are all samples
            check_met(reading.columns, [table.meta.met for table in tables])
            path = index_path(urls, fingerprint, cache, reading)
        return patience.keep_trying(lambda: builder.merged(path, tables), StorageError, FileNotFoundError)


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _first_tables(
    paths: Sequence[str],
    count: int,
    whole: Callable[[Sequence[str]], dict[str, CostTable]],
    cut: Callable[[str, int], CostTable | None],
    files: Files,
) -> list[CostTable]:
    """Return tables of the first shards that have `count` good samples together, or of all; the last may be cut.

    Args:
        whole: measures shards.
        cut: measures a shard up to its n-th good sample; None if it has fewer, or has to be measured whole.
    """
    tables: list[CostTable] = []
    while len(tables) < len(paths) and (left := count - sum(map(_num_good, tables))) > 0:
        # The next shards that are likely to have fewer samples together than are left.
        num_bytes, good = sum(table.shard.size for table in tables), sum(map(_num_good, tables))
        inside: list[str] = []
        room = _SURE * left * num_bytes / max(1, good)
        for path in paths[len(tables) :] if good else ():
            room -= files.size_of(path)
            if room < 0:
                break
            inside.append(path)
        if not inside:
            inside = [paths[len(tables)]]
            if (table := cut(inside[0], left)) is not None:
                return [*tables, table]
        measured = whole(inside)
        tables += [measured[path] for path in inside]
    return tables


def _cut(
    builder: Builder, recipe: Recipe, reading: Reading, cache: CacheFolder, url: str, left: int
) -> CostTable | None:
    """Measure a shard up to its `left`-th good sample; None if it has fewer, or has to be measured whole."""
    files, most, probes = reading.files, left, Probes(recipe, None)
    rules = reading.rules(url, recipe)
    root = reading.root_of(url, rules)
    try:
        opened = open_shard(url, limits=recipe.limits, cache=cache, media_root=root, rules=rules, files=files)
        with here().at(url), closing(opened) as shard:
            while isinstance(shard, TarShard | JsonLinesShard):
                first = shard.begin(most)
                if first.is_whole:
                    return None
                costs = cost_shard(first.facts, lambda: opened, recipe, probes)
                good = costs.totals["samples"] - costs.totals["bad"]
                if good >= left:
                    if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                        builder.missing_media.add(shard.folder)
                    # A table that is in no file.
                    values, body = costs.values(url, first.facts.meta, root), pack(costs.columns)
                    content = digest([values, first.reach, hashlib.blake2b(body, digest_size=16).hexdigest()])
                    return CostTable.of("", values, content, body, rules, first.reach)
                most += max(left - good, most // 2, _LEAST_MORE)  # some are bad, or left out
        return None
    except Exception as error:  # noqa: BLE001 - it is measured whole, which records what is wrong with it
        pass_trouble(error)
        return None


def _num_good(table: CostTable) -> int:
    return int(table.totals["samples"] - table.totals["bad"])
