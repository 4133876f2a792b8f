"""Facts kept: shard -> its facts table, from the file kept for it while that is fresh, else from a new scan."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from orchdata.loaders.cache import CacheFolder, write_atomically
from orchdata.loaders.columns import FORMAT_VERSION, SCHEMA, FactsMeta, shard_failure, with_meta
from orchdata.loaders.errors import NOT_DATA, ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.paths import suffix_of
from orchdata.loaders.retries import tried
from orchdata.loaders.shards import open_shard
from orchdata.loaders.tar import limits_fingerprint


def load_facts(url: str, *, limits: Limits, cache: CacheFolder, force: bool = False, beside: bool = False) -> pa.Table:
    """The facts of a shard (see `columns` for the table), with `FactsMeta` in its schema.

    Args:
        url: path of the shard.
        limits: held while scanning; facts found under other limits are not fresh.
        cache: where they are kept.
        force: scan even where fresh facts are kept.
        beside: keep them in a hidden file beside the shard, for everyone who reads it.

    Raises:
        ValueError: unknown suffix.
        StorageError: the file cannot be read, or the facts cannot be kept, now. Damage to the file is in the facts.
        StaleIndexError: it changes while it is read.
    """
    suffix_of(url)
    path = facts_path(url, limits=limits, cache=cache, beside=beside)
    if not force and (kept := _kept(path, url, limits)) is not None:
        return kept
    try:
        with closing(open_shard(url, limits=limits, cache=cache)) as shard:
            table = shard.facts()
    except NOT_DATA:
        raise
    except ShardError as error:
        return _unopened(url, error, limits)
    except Exception as error:  # noqa: BLE001 - whatever a shard makes a reader raise is that shard's failure
        reason = f"cannot be scanned: {type(error).__name__}: {error}"
        return _unopened(url, ShardError(url, reason), limits)

    def write(file: IO[bytes]) -> None:
        pq.write_table(table, file, compression="zstd")

    write_atomically(path, write)
    return table


def facts_path(url: str, *, limits: Limits, cache: CacheFolder, beside: bool = False) -> Path:
    """Where the facts of a shard are kept."""
    shard = Path(url).absolute()
    if beside:
        return shard.with_name(f".{shard.name}.odfacts.parquet")
    identity = f"{shard}\0{limits_fingerprint(limits)}".encode("utf-8", "surrogateescape")
    return cache.file("facts", f"{hashlib.blake2b(identity, digest_size=16).hexdigest()}.parquet")


def _kept(path: Path, url: str, limits: Limits) -> pa.Table | None:
    """The facts kept at `path` if they are those of the shard as it is now."""
    try:
        status = Path(url).stat()
        meta = FactsMeta.of(pq.read_schema(path))
        fresh = (
            meta.format == FORMAT_VERSION
            and meta.size == status.st_size
            and meta.version == str(status.st_mtime_ns)
            and meta.limits == limits_fingerprint(limits)
        )
        if not fresh:
            return None
        table = pq.read_table(path, memory_map=False)
        if table.schema.remove_metadata() != SCHEMA:
            return None
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return None  # absent, damaged or of another version: scan again
    return table


def _unopened(url: str, error: ShardError, limits: Limits) -> pa.Table:
    """Facts of a shard that is there and cannot be opened or scanned (a damaged .tar.gz): not kept."""
    status = tried(url, "cannot be looked at", lambda: Path(url).stat())
    meta = FactsMeta(
        url=url,
        size=status.st_size,
        version=str(status.st_mtime_ns),
        checksum="",
        limits=limits_fingerprint(limits),
        lost_bytes=status.st_size,
    )
    return with_meta(shard_failure(error.reason), meta)
