"""The user's own columns of a data set: read from each shard once, kept, and joined in the order of the index.

    shard --read_fields--> columns (kept: layer) --join by keys--> one mapped file, a value for each row of the index

Nothing is measured again: the index says what its samples are, and the facts of shards are those of its build.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import pyarrow as pa

from orchdata.loaders.amounts import these
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import MissingIndexError, ShardError, StaleIndexError
from orchdata.loaders.index.facts import load_facts
from orchdata.loaders.index.fields.layer import FOLDER, layer_path, read_layer, write_layer
from orchdata.loaders.index.fields.merged import IndexFields, ShardLayer, fields_path, open_merged, write_merged
from orchdata.loaders.index.fields.reading import ShardFields, read_fields
from orchdata.loaders.index.index import Index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.field_rules import FieldRules
from orchdata.loaders.shards.open import by_identity, open_indexed, rules_of
from orchdata.loaders.shards.own.shard import Container
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.shards.shard import Shard, ShardInfo
from orchdata.loaders.slow import here, shards_under_way
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import RECORD_SUFFIXES, suffix_of
from orchdata.loaders.storage.shared.access import Access, Accesses

_TICK_SECONDS = 0.5
Progress = Callable[[float, int], None]


def open_fields(
    index: Index,
    names: Sequence[str],
    recipe: Recipe,
    *,
    containers: Iterable[Container] = (),
    cache: CacheFolder | None = None,
    may_build: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    files: Files = PLAIN_FILES,
) -> IndexFields:
    """Open the user's own columns of an index; read them from the shards if they are not kept.

    Of several processes one reads them, and the others wait.

    Args:
        index: of the shards under the recipe.
        names: of the columns, in order.
        containers: of the user's, with which the index was built.
        cache: stores them; default: the folder that the environment names.
        may_build: whether to read shards.
        force: read all shards again.
        progress: called about twice a second with the shards that are done, and the number of all.
        files: where the shards are.

    Raises:
        ValueError: values that the index does not keep, columns of several types, or a name that no sample has.
        MissingIndexError: they are not kept, and `may_build` is false.
        StaleIndexError: a shard changed since it was indexed.
        StorageError: a shard cannot be read, or the cache cannot be written, now.
    """
    cache = cache or CacheFolder()
    fields = None if force else open_merged(index, names, cache)
    if fields is not None:
        return fields
    if not may_build:
        raise MissingIndexError(f"the index of {these(len(index.shards), 'shard')} lacks index_fields={tuple(names)}")
    cache.make(FOLDER)
    path = str(fields_path(index, names, cache))
    with closing(Claims(cache.file("locks", FOLDER))) as claims, claims.claim(path, go_on=lambda: True):
        fields = None if force else open_merged(index, names, cache)
        if fields is None:
            reader = _Reader(index, names, recipe, by_identity(containers), cache, force, files)
            layers = _all_layers(reader, progress)
            access = Access.joined(reader.accesses.of(info.url) for info in index.shards)
            write_merged(index, names, layers, cache, access)
            fields = open_merged(index, names, cache)
    if fields is None:
        raise StaleIndexError(str(index.path), "was built again while its index_fields were read: try again")
    return fields


def _all_layers(reader: _Reader, progress: Progress | None) -> list[ShardLayer]:
    total = len(reader.index.shards)
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1, total), thread_name_prefix="orchdata-fields")
    try:
        with measuring():
            futures = [pool.submit(reader.layer, number) for number in range(total)]
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()  # the first error ends it
                if progress is not None:
                    progress(total - len(pending) + shards_under_way(), total)
            return [future.result() for future in futures]
    except BaseException:
        reader.ended.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class _Reader:
    """Reads the columns of shards, or finds them in the cache. Safe from several threads."""

    def __init__(
        self,
        index: Index,
        names: Sequence[str],
        recipe: Recipe,
        containers: Mapping[str, Container],
        cache: CacheFolder,
        force: bool,
        files: Files,
    ) -> None:
        self.index = index
        self.accesses = Accesses()
        self.ended = threading.Event()
        self._names = names
        self._recipe = recipe
        self._containers = containers
        self._cache = cache
        self._force = force
        self._files = files

    def layer(self, number: int) -> ShardLayer:
        """Return keys and columns of a shard."""
        info = self.index.shards[number]
        here().ended = self.ended.is_set
        if self._is_failed(number):
            return None, ShardFields((), {}, ())
        rules = self._rules(info)
        access, limits = self.accesses.of(info.url), self._recipe.limits
        path = layer_path(info, self._names, rules, limits, self._cache)
        with here().at(info.url):
            if not self._force and (kept := read_layer(path, info, access)) is not None:
                return _layer(*kept)
            write_layer(path, info, self._read(info, rules, access), access)
        kept = read_layer(path, info, access)
        if kept is None:
            raise StaleIndexError(info.url, "its columns were removed while they were joined: try again")
        return _layer(*kept)

    def _read(self, info: ShardInfo, rules: FieldRules, access: Access) -> ShardFields:
        limits, root = self._recipe.limits, info.media_root or None
        how: dict[str, Any] = {"record": rules.record, "containers": self._containers, "files": self._files}
        shard: Shard = open_indexed(info.url, info, limits=limits, cache=self._cache, **how)

        def table() -> FactsTable:
            given: dict[str, Any] = {"media_root": root, "rules": rules, "access": access, "files": self._files}
            return load_facts(info.url, lambda: shard, limits=limits, cache=self._cache, **given).table

        with closing(shard):
            try:
                return read_fields(shard, self._names, table)
            except StaleIndexError:
                raise
            except ShardError as error:
                raise ValueError(f"index_fields: {error}") from error

    def _rules(self, info: ShardInfo) -> FieldRules:
        uses_record = info.container or suffix_of(info.url) in RECORD_SUFFIXES
        return rules_of(info, self._containers, self._recipe.record if uses_record else None)

    def _is_failed(self, number: int) -> bool:
        """Return whether a shard cannot be read at all: it has one row, without a key."""
        start, stop = self.index.shard_rows[number : number + 2].tolist()
        return stop == start or (stop == start + 1 and not self.index.key(start))


def _layer(keys: pa.Array, fields: ShardFields) -> ShardLayer:
    return (keys if len(keys) else None), fields
