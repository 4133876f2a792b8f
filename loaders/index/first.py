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
from orchdata.loaders.index.build import Builder, in_parallel, patient, refuse_repeats
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
from orchdata.loaders.storage.retries import BUILD_SECONDS
from orchdata.loaders.watch import here

_SURE: Final = 0.8
"""Shards are measured whole as long as they have at most this part of the samples that are left, by their bytes."""
_LEAST_MORE: Final = 16


def open_first(urls: Sequence[str], recipe: Recipe, count: int, *, reading: Reading = PLAIN) -> Index | None:
    """Open the index that `build_first_index` made of these shards for `count` samples; None if there is none."""
    try:
        index = Index(index_path(urls, recipe.count_fingerprint(), CacheFolder(), reading, first=count))
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
    reading: Reading = PLAIN,
    num_threads: int | None = None,
    under_way: Callable[[float, int], None] | None = None,
    retry_seconds: float = BUILD_SECONDS,
) -> Index:
    """Build or refresh an index with the first rows of the full one: at least to the `count`-th good sample.

    If that takes all samples, it is the full index. Processes with one cache folder build it one after another, and
    each uses what another one has just built. Arguments and errors are those of `build_index`, but for columns to
    rename that these samples do not have.
    """
    load_for_scanning(recipe)
    cache, fingerprint, reading = CacheFolder(), recipe.count_fingerprint(), reading.looked_up(urls)
    path = index_path(urls, fingerprint, cache, reading, first=count)
    before = _changed(path)
    patience = patient(retry_seconds)
    builder = patience.keep_trying(lambda: Builder(recipe, fingerprint, cache, reading, False), StorageError)
    paths = [absolute(url) for url in urls]
    refuse_repeats(paths, num_threads=8)
    tables: list[CostTable] = []
    with closing(builder), builder.claims.claim(str(path), go_on=lambda: True), measuring():
        if _changed(path) != before:  # another process has built it meanwhile
            with suppress(DamagedIndexError):
                if (index := open_first(urls, recipe, count, reading=reading)) is not None:
                    return index
        while len(tables) < len(paths) and (left := count - sum(map(_num_good, tables))) > 0:
            # The next shards that are likely to have fewer samples together than are left, or part of the next.
            inside = _inside(tables, paths[len(tables) :], left, reading)
            if not inside:
                inside = [paths[len(tables)]]
                cut = partial(_cut, builder, recipe, reading, inside[0], left)
                table = patience.keep_trying(cut, StorageError, StaleIndexError)
                if table is not None:
                    tables.append(table)
                    break
            measured = in_parallel(builder, inside, threads_or_default(num_threads), None, under_way, patience)
            tables += [measured[each] for each in inside]
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


def _inside(tables: Sequence[CostTable], paths: Sequence[str], left: int, reading: Reading) -> list[str]:
    num_bytes, good = sum(table.shard.size for table in tables), sum(map(_num_good, tables))
    inside: list[str] = []
    room = _SURE * left * num_bytes / max(1, good)
    for path in paths if good else ():
        room -= reading.files.size_of(path)
        if room < 0:
            break
        inside.append(path)
    return inside


def _cut(builder: Builder, recipe: Recipe, reading: Reading, url: str, left: int) -> CostTable | None:
    """Measure a shard up to its `left`-th good sample; None if it has fewer, or has to be measured whole."""
    files, most, probes = reading.files, left, Probes(recipe, None)
    rules = reading.rules(url, recipe)
    root = reading.root_of(url, rules)
    try:
        opened = open_shard(url, limits=recipe.limits, cache=CacheFolder(), media_root=root, rules=rules, files=files)
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
