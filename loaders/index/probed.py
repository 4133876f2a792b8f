"""Facts of a shard under a recipe: the modality of each member, and headers of the user's own modalities.

The facts contain the headers of built-in modalities. Those of a user's modality are probed here, and stored in a
separate file per shard and probe, independent of its parameters: another recipe with the same probe reads no member.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index as as_int
from typing import Any, Final, NamedTuple

from orchdata.loaders import versions
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.limits import Limits, scan_limits, still_holds
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT, UNUSED
from orchdata.loaders.modalities.checks import read_header
from orchdata.loaders.modalities.modality import (
    Header,
    Modality,
    counts_from_header,
    inner_field,
    keeps_headers_of,
    outer_of,
    probe_id,
)
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import Facts, FactsTable, Shard
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.remote.urls import identity as identity_of_file
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.versions import FACTS_FORMAT
from orchdata.loaders.watch import here

KIND = b"head"
_BOUND: Final = 1 << 63


class RecipeColumns(NamedTuple):
    """Columns of a facts table under a recipe, one item per row.

    Attributes:
        kinds: codes of the recipe.
        headers: of the modality that a row is read as.
        errors: row -> its error.
    """

    kinds: array[int]
    headers: Iterable[Header]
    errors: dict[int, str]


class Probes:
    """The facts of shards under a recipe; safe to use from several threads.

    Args:
        recipe: with the modalities to probe.
        cache: stores headers; None: they are not kept.
        force: probe again even if the cache has fresh headers.
    """

    def __init__(self, recipe: Recipe, cache: CacheFolder | None, *, force: bool = False) -> None:
        self._recipe = recipe
        self._cache = cache
        self._force = force
        # By kind: the modalities with headers that are not in the facts, or that count from bytes and have no headers.
        self._own = dict(_own(recipe))

    def under_recipe(self, facts: Facts, fields: Sequence[str], shard: Callable[[], Shard]) -> RecipeColumns:
        """Return the columns of a shard's facts. Raises as `cost_shard`.

        Args:
            fields: the names in the facts.
            shard: returns the open shard; called if something has to be probed.
        """
        # The kind of each row under the recipe. An error of a whole sample stays, for any modality.
        table, recipe = facts.table, self._recipe
        known: dict[tuple[str, int], int] = {}
        kinds = array("i")
        for field_kind in zip(fields, table.kind, strict=True):
            kind = known.get(field_kind)
            kinds.append(known.setdefault(field_kind, recipe.kind_of(*field_kind)) if kind is None else kind)
        stored = zip(table.header0, table.header1, strict=True)  # lazily: a list would slow the garbage collector
        errors = table.errors
        if errors:
            structural = {row for row in errors if table.kind[row] == OTHER}
            for row in structural:
                kinds[row] = OTHER

        # Headers of the user's own modalities.
        if self._own:
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
                if rows and counts_from_header(modality):
                    for row, header in zip(rows, self._headers(facts, modality, rows, shard), strict=True):
                        if isinstance(header, str):
                            errors[row] = header
                        elif modality.embedded_in and outer_of(fields[row])[1] and not any(header):
                            kinds[row] = UNUSED  # the member has no part of this modality
                        else:
                            headers[row] = header
            return RecipeColumns(kinds, headers, errors)
        return RecipeColumns(kinds, stored, errors)

    def _headers(
        self, facts: Facts, modality: Modality, rows: Sequence[int], shard: Callable[[], Shard]
    ) -> list[Header | str]:
        """Return the header of each of `rows`, or the reason why there is none."""
        headers: dict[int, Header | str] = {}
        if self._cache is not None:
            path = self._path(self._cache, facts, modality)
            identity = facts.identity()
            if not self._force:
                headers = _cached(path, identity, self._recipe.limits)
        missing = [row for row in rows if row not in headers]
        if missing:
            opened = shard()
            current = here()
            for row in missing:
                current.key = facts.table.key[row]
                headers[row] = _probed(modality, facts, row, opened, self._recipe)
            current.key = None
            if self._cache is not None:
                self._cache.make("facts")
                write_whole(path, _sealed(headers, identity, self._recipe.limits))
        return [headers[row] for row in rows]

    def _path(self, cache: CacheFolder, facts: Facts, modality: Modality) -> str:
        identity = [identity_of_file(facts.meta.url), probe_id(modality)]
        identity.append(str(len(facts.table)))  # `with_inner` may have added rows
        name = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
        return f"{cache.root}/facts/{name}.headers"


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


def _own(recipe: Recipe) -> Iterator[tuple[int, Modality]]:
    """Yield (kind, modality) of the modalities with headers that are not all in the facts."""
    for kind, (name, modality) in enumerate(recipe.modalities.items(), TEXT + 1):
        builtin = BUILTINS.get(name)
        same = builtin is not None and keeps_headers_of(type(modality), builtin) and modality.fields == builtin.fields
        if not same or not counts_from_header(modality) or modality.embedded_in:
            yield kind, modality


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


def _sealed(headers: dict[int, Header | str], identity: Sequence[str], limits: Limits) -> Any:
    values = {
        "meta": identity,
        "rules": versions.rules(),
        "limits": scan_limits(limits),
        "headers": [[row, list(header)] for row, header in headers.items() if not isinstance(header, str)],
        "errors": [[row, header] for row, header in headers.items() if isinstance(header, str)],
    }
    return seal(KIND, FACTS_FORMAT, values, [])[0]


def _cached(path: str, identity: Sequence[str], limits: Limits) -> dict[int, Header | str]:
    """Return the headers stored at `path`, if they are those of the current shard. What was refused under other limits
    is probed again.
    """
    try:
        head, _ = read_sealed(path, KIND, FACTS_FORMAT)
        if (head.values["meta"], head.values["rules"]) != (identity, versions.rules()):
            return {}
        if not still_holds(head.values["limits"], limits, ()):
            return {}
        headers: dict[int, Header | str] = {row: tuple(header) for row, header in head.values["headers"]}
        refused: dict[int, Header | str] = dict(head.values["errors"])
        return headers if head.values["limits"] != scan_limits(limits) else headers | refused
    except (OSError, ValueError):
        return {}  # absent, damaged or of another version: probe again
