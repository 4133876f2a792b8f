"""Facts of a shard: from its file in the cache if that is fresh, else from a new scan; and under a recipe.

The facts contain the headers of built-in modalities. Those of a user's modality are probed here, and kept in a file per
shard and probe, independent of its parameters: another recipe with the same probe reads no member.
"""

from __future__ import annotations

import errno
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import index as as_int
from typing import Final

import pyarrow as pa

from orchdata.loaders.errors import DecodeError, ShardError, StaleIndexError, StorageError, as_field_error, pass_trouble
from orchdata.loaders.index.kept import keep, kept
from orchdata.loaders.limits import Limits, scan_limits, still_holds
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT, UNUSED
from orchdata.loaders.modalities.modality import (
    Header,
    Modality,
    counts_from_header,
    inner_field,
    keeps_headers_of,
    outer_of,
    probe_id,
    read_header,
)
from orchdata.loaders.recipe import Recipe, versions
from orchdata.loaders.shards.fields import NO_RULES, RAW, FieldRules
from orchdata.loaders.shards.lines import JsonLinesShard
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsMeta, FactsTable, Shard, shard_failure
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import suffix_of
from orchdata.loaders.storage.remote.urls import identity as identity_of
from orchdata.loaders.watch import here

KIND: Final = b"fact"
_HEADERS: Final = b"head"
_FEW_ROWS: Final = 8
_BOUND: Final = 1 << 63


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
    """Return the facts of a shard, which `opened` opens if it has to be scanned; with `force`, always. Facts that were
    scanned under other limits are fresh if these would give the same.

    Raises ValueError for an unknown suffix; StorageError if the file cannot be read, or the facts not be stored, now;
    StaleIndexError if it changes while it is read. Damage to the file is in the facts.
    """
    if rules.container is None:
        suffix_of(url)
    path = facts_path(url, cache=cache, media_root=media_root, rules=rules)
    if not force and (found := _kept(path, url, limits, opened, files)) is not None:
        return found
    try:
        facts = opened().facts()
    except StaleIndexError:
        raise
    except ShardError as error:
        return _unopened(url, error.reason, files)
    except Exception as error:  # noqa: BLE001 - an exception while reading a shard fails that shard
        pass_trouble(error)
        return _unopened(url, f"cannot be scanned: {type(error).__name__}: {error}", files)
    # Scanning a few members of a plain tar again is as fast as reading stored facts; writing a file is much slower.
    if len(facts.table) > _FEW_ROWS or not url.endswith(".tar") or rules.container is not None:
        batches = facts.table.arrow().to_batches()
        if len(batches) == 1:  # 2 GiB of strings do not fit in one batch: another recipe scans the shard again
            cache.make("facts")
            values = {"meta": facts.meta.as_dict(), "limits": scan_limits(limits), "rules": versions()}
            keep(path, KIND, values, batches.pop().serialize())
            pa.default_memory_pool().release_unused()  # a multiple of the facts
    return facts


def facts_path(url: str, *, cache: CacheFolder, media_root: str | None = None, rules: FieldRules = NO_RULES) -> str:
    """Return the path of the stored facts of a shard."""
    names = [identity_of(url), *([] if media_root is None else [media_root])]
    names += [json.dumps(parts)] if (parts := rules.identity(url)) else []
    identity = "\0".join(names).encode("utf-8", "surrogateescape")
    return f"{cache.root}/facts/{hashlib.blake2b(identity, digest_size=16).hexdigest()}.facts"


def _kept(path: str, url: str, limits: Limits, opened: Callable[[], Shard], files: Files) -> Facts | None:
    """Return the facts stored at `path`, or None if they are not those of the current shard."""
    if (found := kept(path, KIND)) is None:
        return None
    values, body = found
    try:
        meta = FactsMeta(**values["meta"])
        if values["rules"] != versions() or not is_fresh(meta, url, opened, files):
            return None
        batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
        table = FactsTable.of_arrow(pa.Table.from_batches([batch]))
        return Facts(table, meta) if still_holds(values["limits"], limits, table.errors.values()) else None
    except (OSError, ValueError, EOFError, pa.ArrowException):
        return None


def is_fresh(meta: FactsMeta, url: str, opened: Callable[[], Shard], files: Files = PLAIN_FILES) -> bool:
    """Return whether a shard, and the files that it names, still have the same sizes and modification times."""
    if files.version(url) != (meta.size, meta.version):
        return False
    if not meta.media:
        return True
    shard = opened()
    return isinstance(shard, JsonLinesShard) and shard.media_state() == meta.media


def _unopened(url: str, reason: str, files: Files) -> Facts:
    """Build the facts of a shard that cannot be opened or scanned (a damaged .tar.gz); they are not stored."""
    version = files.version(url)
    if version is None:
        raise StorageError(url, "cannot be looked at: it was removed", errno.ENOENT)
    size, lost_bytes = version.size, max(1, version.size)
    meta = FactsMeta(url=url, size=size, version=version.version, checksum="", lost_bytes=lost_bytes)
    return Facts(shard_failure(reason), meta)


class Probes:
    """The facts of shards under a recipe; safe to use from several threads. Headers are kept in `cache`, if it is
    given.
    """

    def __init__(self, recipe: Recipe, cache: CacheFolder | None, *, force: bool = False) -> None:
        self._recipe = recipe
        self._cache = cache
        self._force = force
        # By kind: the modalities with headers that are not in the facts, or that count from bytes and have no headers.
        self._own: dict[int, Modality] = {}
        for kind, (name, modality) in enumerate(recipe.modalities.items(), TEXT + 1):
            builtin = BUILTINS.get(name)
            same = (
                builtin is not None and keeps_headers_of(type(modality), builtin) and modality.fields == builtin.fields
            )
            if not same or not counts_from_header(modality) or modality.embedded_in:
                self._own[kind] = modality

    def under_recipe(
        self, facts: Facts, shard: Callable[[], Shard]
    ) -> tuple[array[int], Iterable[Header], dict[int, str]]:
        """Return for each row of a shard's facts its kind, and the header of the modality that it is read as; and the
        errors by row. Raises as `cost_shard`.
        """
        # The kind of each row under the recipe. An error of a whole sample stays, for any modality.
        table, recipe, fields = facts.table, self._recipe, facts.table.field
        known: dict[tuple[str, int], int] = {}
        kinds = array("i")
        for field_kind in zip(fields, table.kind, strict=True):
            kind = known.get(field_kind)
            kinds.append(known.setdefault(field_kind, recipe.kind_of(*field_kind)) if kind is None else kind)
        stored = zip(table.header0, table.header1, strict=True)  # lazily: a list would slow the garbage collector
        errors = table.errors
        for row in errors:
            if table.kind[row] == OTHER:
                kinds[row] = OTHER
        if not self._own:
            return kinds, stored, errors

        # Headers of the user's own modalities.
        headers: list[Header] = list(stored)
        errors = dict(errors)
        for kind, modality in self._own.items():
            rows = [
                row
                for row, row_kind in enumerate(kinds)
                if row_kind == kind and not _is_in_facts(modality, table.kind[row])
            ]
            for row in rows:
                errors.pop(row, None)  # the error of the built-in probe
            if not rows or not counts_from_header(modality):
                continue
            probed = self._headers(facts, modality, rows, shard)
            for row in rows:
                header = probed[row]
                if isinstance(header, str):
                    errors[row] = header
                elif modality.embedded_in and outer_of(fields[row])[1] and not any(header):
                    kinds[row] = UNUSED  # the member has no part of this modality
                else:
                    headers[row] = header
        return kinds, headers, errors

    def _headers(
        self, facts: Facts, modality: Modality, rows: Sequence[int], shard: Callable[[], Shard]
    ) -> dict[int, Header | str]:
        """Return the header of each of `rows`, or the reason why there is none."""
        # Those that are kept, if they are of this shard; what was refused under other limits is probed again.
        headers: dict[int, Header | str] = {}
        cache, limits, now = self._cache, scan_limits(self._recipe.limits), [facts.identity(), versions()]
        # `with_inner` may have added rows
        identity = json.dumps([identity_of(facts.meta.url), probe_id(modality), str(len(facts.table))])
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        path = "" if cache is None else f"{cache.root}/facts/{name}.headers"
        found = None if cache is None or self._force else kept(path, _HEADERS)
        if found is not None and found[0]["of"] == now and still_holds(found[0]["limits"], self._recipe.limits, ()):
            headers = {row: tuple(header) for row, header in found[0]["headers"]}
            headers |= dict(found[0]["errors"]) if found[0]["limits"] == limits else {}

        missing = [row for row in rows if row not in headers]
        if missing:
            opened, current = shard(), here()
            for row in missing:
                current.key = facts.table.key[row]
                headers[row] = _probed(modality, facts, row, opened, self._recipe)
            current.key = None
            if cache is not None:
                cache.make("facts")
                good = [[row, header] for row, header in headers.items() if not isinstance(header, str)]
                refused = [[row, header] for row, header in headers.items() if isinstance(header, str)]
                keep(path, _HEADERS, {"of": now, "limits": limits, "headers": good, "errors": refused})
        return headers


def with_inner(facts: Facts, recipe: Recipe) -> Facts:
    """Add a row for each part that may be inside a member of another modality, such as the sound of a clip: "0.mp4" is
    followed by "0.mp4 (audio)", with the same bytes. Its probe finds out whether the part exists.
    """
    if not any(modality.embedded_in for modality in recipe.modalities.values()):
        return facts
    given, table = facts.table, FactsTable()
    known: dict[str, tuple[str, ...]] = {}
    columns = (given.sample, given.key, given.field, given.kind, given.offset, given.size, given.encoding)
    headers = zip(given.header0, given.header1, strict=True)
    for row, ((sample, key, field, kind, offset, size, encoding), header) in enumerate(
        zip(zip(*columns, strict=True), headers, strict=True)
    ):
        error = given.errors.get(row)
        table.append(
            sample, key, field, kind=kind, offset=offset, size=size, encoding=encoding, header=header, error=error
        )
        inside = known.get(field)
        if inside is None:
            inside = known[field] = recipe.embedded_modalities(field)
        for name in inside if error is None else ():
            table.append(sample, key, inner_field(field, name), offset=offset, size=size, encoding=encoding)
    return facts._replace(table=table)


def _is_in_facts(modality: Modality, kind: int) -> bool:
    """Return whether the facts of a member of this kind have the header that the modality's probe would find."""
    if kind in (TEXT, OTHER) or not counts_from_header(modality):
        return False
    return keeps_headers_of(type(modality), BUILTINS[KINDS[kind]])


def _probed(modality: Modality, facts: Facts, row: int, shard: Shard, recipe: Recipe) -> Header | str:
    table = facts.table
    offset, size, encoding = table.offset[row], table.size[row], table.encoding[row]
    field, _ = outer_of(table.field[row])

    def read(count: int) -> bytes:
        # The first bytes can only be read alone if the member is stored unencoded.
        return bytes(shard.read(offset, count if encoding == RAW else size, encoding, field))

    reason = recipe.limits.size_error(size, is_text=False)
    if reason is not None:
        return reason
    try:
        result = read_header(type(modality), size, read, recipe.limits)
        header = tuple(map(as_int, result))
        if len(header) != modality.num_facts or not all(-_BOUND <= fact < _BOUND for fact in header):
            raise DecodeError(f"probe() returned {result!r}, not num_facts={modality.num_facts} integers of 64 bits")
        return header
    except DecodeError as error:
        return error.at(field).reason
    except MemoryError as error:
        raise measured_at(error, shard.url, table.key[row], field) from error
    except Exception as error:  # noqa: BLE001 - an exception of a probe fails that member
        return as_field_error(error, "probed").reason
