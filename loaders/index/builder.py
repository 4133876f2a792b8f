"""What a build does with one shard, and with the tables of all.

shard --its kept costs are still right; or measured here, by a process of `jobs`, or by another builder--> CostTable
tables --merged--> Index
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from orchdata.loaders import versions
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import DamagedIndexError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.index.facts import is_fresh, load_facts
from orchdata.loaders.index.index import Index, content_fingerprint, digest
from orchdata.loaders.index.index_file import stored_description
from orchdata.loaders.index.jobs import Jobs
from orchdata.loaders.index.joined import RecipeIdentity, merge_tables
from orchdata.loaders.index.kept_counts import CountsFiles, CountsStore, KeptCounts, NewCounts
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.shard_costs import CostTable, ShardCosts, cost_shard
from orchdata.loaders.index.table import body_bytes
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import identity_of
from orchdata.loaders.shards.fields import FieldRules
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.shards.shard import Facts, Shard
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.versions import COSTS_FORMAT
from orchdata.loaders.watch import here

_IN_MEMORY_BYTES = 256 << 20
"""Cost tables up to this total size stay in memory until they are merged; the others are read again."""


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
        self._identity = blake2b(f"{COSTS_FORMAT} {versions.rules()} {fingerprint} ".encode(), digest_size=16)
        self._cache = cache
        self._force = force
        self._folder = cache.make("costs")
        self._counts = CountsStore(cache, recipe)
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

    def forget(self, url: str) -> None:
        """Look at a shard again, which may have changed."""
        self._files.forget(url)

    def costs(self, url: str, go_on: Callable[[], bool], spread: Spread | None = None) -> tuple[CostTable, bool] | None:
        """Return the costs of a shard, and whether they were measured now.

        Args:
            go_on: whether to keep waiting while another process measures them; if not, the result is None.
            spread: idle threads that may help.
        """
        limits, cache = self._recipe.limits, self._cache
        rules = self._reading.rules(url, self._recipe)
        root = self._reading.root_of(url, rules)
        path = self._path(url, root, rules)
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
                return None if self._force else self._cached(path, url, root, rules, opened)

            if (table := cached()) is not None:
                return self._kept_in_memory(table), False
            with self.claims.claim(path, go_on) as ours:
                if not ours:
                    return None
                if (table := cached()) is not None:  # another process has measured it
                    return self._kept_in_memory(table), False
                if self.jobs is not None and not (spread is not None and self.jobs.divides(url)):
                    self.missing_media.add_found(self.jobs.measure(url))
                    table = self._stored(path, url, root)
                    return self._kept_in_memory(named(table, rules)), True
                facts = load_facts(
                    url,
                    opened,
                    limits=limits,
                    cache=cache,
                    media_root=root,
                    rules=rules,
                    force=self._force,
                    files=self._files,
                )
                costs = self._measured(facts, opened, spread, self._counts.files_of(facts, url, root, rules))
                meta = facts.meta
                del facts  # a large shard's take as much memory as its costs
                table = costs.write(path, url, meta, root)
                return self._kept_in_memory(named(table, rules)), True

    def _cached(
        self,
        path: str,
        url: str,
        media_root: str | None,
        rules: FieldRules,
        opened: Callable[[], Shard],
    ) -> CostTable | None:
        """Return the cached costs of a shard if the shard, and the files that it names, have not changed."""
        try:
            table = named(CostTable.open(path, url, self._recipe.kinds, media_root or ""), rules)
            # Without a checksum the shard could not be opened, for a reason that may be temporary. The modification
            # time counts too: editing text in place may not change size and headers.
            return table if table.meta.checksum and is_fresh(table.meta, url, opened, self._files) else None
        except (OSError, ValueError):
            return None  # absent, damaged or of another version

    def _stored(self, path: str, url: str, media_root: str | None) -> CostTable:
        """Return the costs of a shard that a child has just stored. Raises StorageError."""
        try:
            return CostTable.open(path, url, self._recipe.kinds, media_root or "")
        except (OSError, ValueError) as error:
            raise StorageError(path, f"was removed or damaged during the build: {error}") from error

    def merged(self, path: Path, tables: Sequence[CostTable]) -> Index:
        """Return the index of these tables: the existing one if it is valid, else a new one."""
        build_id = digest([table.digest for table in tables])
        content = content_fingerprint([table.shard for table in tables], self._fingerprint)
        index = _existing_index(path, [table.url for table in tables])
        if index is not None and not self._force and (index.build_id, index.fingerprint) == (build_id, content):
            return index
        self._cache.make("index")
        identity = RecipeIdentity(self._fingerprint, self._recipe.kinds, stored_description(self._recipe))
        try:
            merge_tables(path, tables, identity, build_id=build_id)
            return Index(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            there = [self._there(table) for table in tables]
            if all(map(operator.is_, there, tables)):
                raise
        return self.merged(path, there)

    def _there(self, table: CostTable) -> CostTable:
        """Return the table; measure the shard again if its file was removed."""
        with contextlib.suppress(StorageError):
            table.body()
            return table
        costs = self.costs(table.url, lambda: True)
        assert costs is not None  # because it waits for other processes
        return costs[0]

    def _path(self, url: str, media_root: str | None, rules: FieldRules) -> str:
        name = self._identity.copy()
        name.update((url if media_root is None else f"{url}\0{media_root}").encode("utf-8", "surrogateescape"))
        if rules.columns:
            name.update(f"\0columns {json.dumps(rules.columns)}".encode())
        if rules.key:
            name.update(f"\0key {rules.key}".encode())
        if kept := rules.kept_in(url):
            name.update(f"\0{json.dumps(kept)}".encode())
        if rules.container is not None:
            name.update(f"\0container {identity_of(rules.container)}".encode())
        return f"{self._folder}/{name.hexdigest()}.costs"

    def _kept_in_memory(self, table: CostTable) -> CostTable:
        """Return the table, without its columns if all tables together would take too much memory."""
        with self._lock:
            length = body_bytes(table.size)
            if length > self._free_bytes:
                return table.without_body()
            self._free_bytes -= length
            return table

    def _measured(
        self, facts: Facts, opened: Callable[[], Shard], spread: Spread | None, files: CountsFiles
    ) -> ShardCosts:
        """Measure a shard, and keep its counts."""
        meta, recipe = facts.meta, self._recipe
        kept = KeptCounts() if self._force else self._counts.read(files)

        def shard() -> Shard:
            # Only read the file that was scanned: this process decodes a Parquet file only after a child has done it.
            current = opened()
            if (current.size, current.version) != (meta.size, meta.version):
                raise StaleIndexError(current.url, "was changed while it was indexed")
            return current

        if self.jobs is not None:
            spread = self.jobs.spread(meta.url, len(facts.table))
        try:
            new = NewCounts(recipe)
            costs = cost_shard(facts, shard, recipe, self._probes, spread, kept, new)
        except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
            pass_trouble(error)
            reason = f"the shard cannot be measured: {type(error).__name__}: {error}"
            return cost_shard(Facts(facts.table.all_failed(reason), meta), shard, recipe, self._probes)
        self._counts.write(files, new, kept)
        return costs


def named(table: CostTable, rules: FieldRules) -> CostTable:
    """Return the table with the new names of fields, and its container, which its file does not contain."""
    if not rules.columns and not rules.key and rules.container is None:
        return table
    container = "" if rules.container is None else identity_of(rules.container)
    return replace(table, columns=rules.columns, container=container, key=rules.key)


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
