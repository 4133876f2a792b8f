"""Cached facts: shard -> its facts, from its sealed file in the cache if that is fresh, else from a new scan."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from orchdata.loaders import versions
from orchdata.loaders.errors import ShardError, StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.limits import Limits, scan_limits, still_holds
from orchdata.loaders.shards.fields import NO_RULES, FieldRules
from orchdata.loaders.shards.jsonl.shard import JsonLinesShard
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsMeta, FactsTable, Shard, shard_failure
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import suffix_of
from orchdata.loaders.storage.remote.urls import identity as identity_of
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.versions import FACTS_FORMAT

KIND = b"fact"
_COMPRESSED_BYTES = 64 << 10
_FEW_ROWS = 8


def load_facts(
    url: str,
    opened: Callable[[], Shard],
    *,
    limits: Limits,
    cache: CacheFolder,
    media_root: str | None = None,
    rules: FieldRules = NO_RULES,
    force: bool = False,
    files: Files = PLAIN_FILES,
) -> Facts:
    """Return the facts of a shard.

    Args:
        url: path of the shard.
        opened: opens the shard; called if it has to be scanned.
        limits: applied while scanning. Facts that were scanned under others are not fresh, unless these would give the
            same.
        cache: stores the facts.
        media_root: folder of the files that its records name.
        rules: names of its fields, and the function that makes records.
        force: scan even if the cache has fresh facts.
        files: where the shard is.

    Raises:
        ValueError: unknown suffix.
        StorageError: the file cannot be read, or the facts cannot be stored, now. Damage to the file is in the facts.
        StaleIndexError: it changes while it is read.
    """
    if rules.container is None:
        suffix_of(url)
    path = facts_path(url, cache=cache, media_root=media_root, rules=rules)
    if not force and (kept := _kept(path, url, limits, opened, files)) is not None:
        return kept
    try:
        facts = opened().facts()
    except StaleIndexError:
        raise
    except ShardError as error:
        return _unopened(url, error, files)
    except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
        pass_trouble(error)
        reason = f"cannot be scanned: {type(error).__name__}: {error}"
        return _unopened(url, ShardError(url, reason), files)
    # Scanning a few members of a plain tar again is as fast as reading stored facts; writing a file is much slower.
    if len(facts.table) > _FEW_ROWS or not url.endswith(".tar") or rules.container is not None:
        cache.make("facts")
        _keep(path, facts, limits)
    return facts


def facts_path(url: str, *, cache: CacheFolder, media_root: str | None = None, rules: FieldRules = NO_RULES) -> str:
    """Return the path of the stored facts of a shard."""
    names = [identity_of(url), *([] if media_root is None else [media_root])]
    names += [json.dumps(parts)] if (parts := rules.identity(url)) else []
    identity = "\0".join(names).encode("utf-8", "surrogateescape")
    return f"{cache.root}/facts/{hashlib.blake2b(identity, digest_size=16).hexdigest()}.facts"


def _keep(path: str, facts: Facts, limits: Limits) -> None:
    """Store the table as one Arrow record batch, compressed if it is large; the head has the metadata."""
    batches = facts.table.arrow().to_batches()
    if len(batches) != 1:  # 2 GiB of strings do not fit in one batch: another recipe scans the shard again
        return
    body = batches[0].serialize()
    values: dict[str, Any] = {
        "meta": facts.meta.as_dict(),
        "limits": scan_limits(limits),
        "rules": versions.rules(),
    }
    if body.size > _COMPRESSED_BYTES:
        values["uncompressed_bytes"] = body.size
        body = pa.compress(body, codec="zstd")
        del batches
        pa.default_memory_pool().release_unused()  # a multiple of the facts
    write_whole(path, seal(KIND, FACTS_FORMAT, values, [body])[0])


def _kept(path: str, url: str, limits: Limits, opened: Callable[[], Shard], files: Files) -> Facts | None:
    """Return the facts stored at `path`, or None if they are not those of the current shard."""
    try:
        head, body = read_sealed(path, KIND, FACTS_FORMAT)
        values = dict(head.values)
        uncompressed_bytes = values.pop("uncompressed_bytes", None)
        meta = FactsMeta(**values["meta"])
        if values["rules"] != versions.rules() or not is_fresh(meta, url, opened, files):
            return None
        if uncompressed_bytes is not None:
            body = pa.decompress(pa.py_buffer(body), uncompressed_bytes, codec="zstd")
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
        table = FactsTable.of_arrow(pa.Table.from_batches([batch]))
        return Facts(table, meta) if still_holds(values["limits"], limits, table.errors.values()) else None
    except (OSError, ValueError, EOFError, pa.ArrowException):
        return None  # absent, damaged or of another version: scan again


def is_fresh(meta: FactsMeta, url: str, opened: Callable[[], Shard], files: Files = PLAIN_FILES) -> bool:
    """Return whether a shard, and the files that it names, still have the same sizes and modification times.

    Raises StorageError if that cannot be known now.
    """
    if files.version(url) != (meta.size, meta.version):
        return False
    if not meta.media:
        return True
    shard = opened()
    return isinstance(shard, JsonLinesShard) and shard.media_state() == meta.media


def _unopened(url: str, error: ShardError, files: Files) -> Facts:
    """Build the facts of a shard that cannot be opened or scanned (a damaged .tar.gz); they are not stored."""
    version = files.version(url)
    if version is None:
        raise StorageError(url, "cannot be looked at: it was removed", errno.ENOENT)
    meta = FactsMeta(
        url=url,
        size=version.size,
        version=version.version,
        checksum="",
        lost_bytes=max(1, version.size),
    )
    return Facts(shard_failure(error.reason), meta)
