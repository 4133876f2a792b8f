"""The index of the first samples of shards, for `dataset.take(N)`: other samples are not looked at.

    shards, in order --those that lie inside--> measured as for the full index, and kept for it
                     --the one in which the N-th good sample lies--> measured up to there, and not kept
    their tables --merged--> an index under a name of its own, which has N in it

The rows are the first rows of the full index, to the bit. `ShardInfo.reach` says which shard was cut: only
tars and files of lines are, others are measured whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.build import in_parallel, warn_of_retries
from orchdata.loaders.index.builder import Builder, named
from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.index.index_file import check_function_of, index_path
from orchdata.loaders.index.joined import refuse_repeats
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.shard_costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.table import pack
from orchdata.loaders.pace import threads_or_default
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.fields import check_met
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.reading import PLAIN, Reading
from orchdata.loaders.shards.shard import Beginning, Shard
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.cache import CacheFolder
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
        first = _First(builder, recipe, reading, cache, workers, under_way, patience)
        tables = first.tables(paths, count)
        builder.missing_media.check()
        if len(tables) == len(paths) and not tables[-1].reach:  # these are all samples
            check_met(reading.columns, [table.meta.met for table in tables])
            path = index_path(urls, fingerprint, cache, reading)
        return patience.keep_trying(lambda: builder.merged(path, tables), StorageError, FileNotFoundError)


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class _First:
    """Measures the first samples of shards."""

    def __init__(
        self,
        builder: Builder,
        recipe: Recipe,
        reading: Reading,
        cache: CacheFolder,
        workers: int,
        under_way: Callable[[float, int], None] | None,
        patience: Patience,
    ) -> None:
        self._builder = builder
        self._recipe = recipe
        self._reading = reading
        self._cache = cache
        self._workers = workers
        self._under_way = under_way
        self._patience = patience
        self._probes = Probes(recipe, None)

    def tables(self, paths: Sequence[str], count: int) -> list[CostTable]:
        """Return tables of the first shards that have `count` good samples together, or of all; the last may be cut."""
        tables: list[CostTable] = []
        with measuring():
            while len(tables) < len(paths):
                left = count - sum(map(_num_good, tables))
                if left <= 0:
                    break
                inside = self._inside(tables, paths[len(tables) :], left)
                if not inside:
                    url = paths[len(tables)]
                    cut = self._patience.keep_trying(partial(self._cut, url, left), StorageError, StaleIndexError)
                    if cut is not None:
                        return [*tables, cut]
                    inside = [url]
                tables += self._whole(inside)
        return tables

    def _inside(self, tables: Sequence[CostTable], paths: Sequence[str], left: int) -> list[str]:
        """Return the next shards that are likely to have fewer samples together than are left."""
        num_bytes, good = sum(table.meta.size for table in tables), sum(map(_num_good, tables))
        if not good:
            return []
        inside: list[str] = []
        room = _SURE * left * num_bytes / good
        for path in paths:
            room -= self._reading.files.size_of(path)
            if room < 0:
                break
            inside.append(path)
        return inside

    def _whole(self, paths: Sequence[str]) -> list[CostTable]:
        measured = in_parallel(self._builder, paths, self._workers, None, self._under_way, self._patience)
        return [measured[path] for path in paths]

    def _cut(self, url: str, left: int) -> CostTable | None:
        """Measure a shard up to its `left`-th good sample; None if it has fewer, or has to be measured whole."""
        recipe, files, most = self._recipe, self._reading.files, left
        rules = self._reading.rules(url, recipe)
        root = self._reading.root_of(url, rules)
        try:
            opened = open_shard(url, limits=recipe.limits, cache=self._cache, media_root=root, rules=rules, files=files)
            with here().at(url), closing(opened) as shard:
                while isinstance(shard, TarShard | JsonLinesShard):
                    first = shard.begin(most)
                    if first.is_whole:
                        return None
                    costs = cost_shard(first.facts, partial(_same, shard), recipe, self._probes)
                    good = costs.totals["samples"] - costs.totals["bad"]
                    if good >= left:
                        if isinstance(shard, JsonLinesShard) and shard.folder is not None:
                            self._builder.missing_media.add(shard.folder)
                        table = _table_of(url, costs, first, root)
                        return named(table, rules)
                    most += max(left - good, most // 2, _LEAST_MORE)  # some are bad, or left out
            return None
        except Exception as error:  # noqa: BLE001 - it is measured whole, which records what is wrong with it
            pass_trouble(error)
            return None


def _same(shard: Shard) -> Shard:
    return shard


def _num_good(table: CostTable) -> int:
    return int(table.totals["samples"] - table.totals["bad"])


def _table_of(url: str, costs: ShardCosts, first: Beginning, media_root: str | None) -> CostTable:
    """Return costs as a table that is in no file."""
    values = costs.values(url, first.facts.meta, media_root)
    body = pack(costs.columns)
    content = hashlib.blake2b(json.dumps([values, first.reach], sort_keys=True).encode(), digest_size=16)
    content.update(body)
    return replace(CostTable.of("", values, content.hexdigest(), body, costs.kinds), reach=first.reach)
