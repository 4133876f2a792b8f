"""Facts kept: shard -> its facts table, from the sealed file kept for it while that is fresh, else from a new scan."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from orchdata.loaders.cache import CacheFolder
from orchdata.loaders.columns import SCHEMA, FactsMeta, shard_failure, with_meta
from orchdata.loaders.errors import NOT_DATA, ShardError, pass_trouble
from orchdata.loaders.limits import Limits, limits_fingerprint
from orchdata.loaders.paths import suffix_of
from orchdata.loaders.retries import tried
from orchdata.loaders.sealed import read_sealed, seal, write_whole
from orchdata.loaders.shards import open_shard
from orchdata.loaders.versions import FACTS_FORMAT, RULES

KIND = b"fact"
_COMPRESSED_BYTES = 64 << 10
_FEW_ROWS = 8


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
        pass_trouble(error)
        reason = f"cannot be scanned: {type(error).__name__}: {error}"
        return _unopened(url, ShardError(url, reason), limits)
    # Scanning a few members of a plain tar again costs no more than reading their facts, and writing a file far more.
    if table.num_rows > _FEW_ROWS or beside or not url.endswith(".tar"):
        _write(path, table)
    return table


def facts_path(url: str, *, limits: Limits, cache: CacheFolder, beside: bool = False) -> Path:
    """Where the facts of a shard are kept."""
    shard = os.path.abspath(url)
    if beside:
        return Path(shard).with_name(f".{os.path.basename(shard)}.odfacts")
    identity = f"{shard}\0{limits_fingerprint(limits)}".encode("utf-8", "surrogateescape")
    return cache.file("facts", f"{hashlib.blake2b(identity, digest_size=16).hexdigest()}.facts")


def _write(path: str | Path, table: pa.Table) -> None:
    """The table as one Arrow record batch, compressed where it is large; what it belongs to is the head."""
    body = table.combine_chunks().to_batches()[0].serialize()
    values = FactsMeta.of(table.schema).as_dict()
    if body.size > _COMPRESSED_BYTES:
        values["uncompressed_bytes"] = body.size
        body = pa.compress(body, codec="zstd")
    write_whole(path, seal(KIND, FACTS_FORMAT, values, [body])[0])


def _kept(path: str | Path, url: str, limits: Limits) -> pa.Table | None:
    """The facts kept at `path` if they are those of the shard as it is now."""
    try:
        head, body = read_sealed(path, KIND, FACTS_FORMAT)
        values = dict(head.values)
        uncompressed_bytes = values.pop("uncompressed_bytes", None)
        meta = FactsMeta(**values)
        if not is_fresh(meta, url) or (meta.limits, meta.rules) != (limits_fingerprint(limits), RULES):
            return None
        if uncompressed_bytes is not None:
            body = pa.decompress(pa.py_buffer(body), uncompressed_bytes, codec="zstd")
        table = pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)])
    except (OSError, ValueError, TypeError):
        return None  # absent, damaged or of another version: scan again
    return with_meta(table, meta)


def is_fresh(meta: FactsMeta, url: str) -> bool:
    """Whether a shard has the size and the time of change that it had. Raises OSError where it is not there."""
    status = os.stat(url)
    return (meta.size, meta.version) == (status.st_size, str(status.st_mtime_ns))


def _unopened(url: str, error: ShardError, limits: Limits) -> pa.Table:
    """Facts of a shard that is there and cannot be opened or scanned (a damaged .tar.gz): not kept."""
    status = tried(url, "cannot be looked at", lambda: Path(url).stat())
    meta = FactsMeta(
        url=url,
        size=status.st_size,
        version=str(status.st_mtime_ns),
        checksum="",
        limits=limits_fingerprint(limits),
        lost_bytes=max(1, status.st_size),
    )
    return with_meta(shard_failure(error.reason), meta)
