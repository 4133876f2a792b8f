"""Facts of a shard as a recipe sees them: what each member is under it, and headers that only its own modalities know.

The facts hold the headers of the library's modalities. Those of a user's are probed here, and kept in a file of their
own for each shard and probe, whatever its parameters: another recipe with the same probe reads no member again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index as as_int
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError, as_field_error
from orchdata.loaders.limits import limits_fingerprint
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
)
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.facts_table import Facts, FactsTable
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.slow import here
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.storage.shared.access import Accesses, restrict
from orchdata.loaders.storage.shared.values import check_shape
from orchdata.loaders.versions import FACTS_FORMAT, RULES

KIND = b"head"
_BOUND: Final = 1 << 63


class Seen(NamedTuple):
    """Columns of a facts table under a recipe, one item a row.

    Attributes:
        kinds: codes of the recipe.
        headers: of the modality that a row is read as.
        errors: row -> what is wrong with it.
    """

    kinds: list[int]
    headers: Iterable[Header]
    errors: dict[int, str]


class Probes:
    """What shards are under a recipe; safe to use from several threads.

    Args:
        recipe: whose modalities ask.
        cache: where headers are kept.
        force: probe again even where fresh ones are kept.
        accesses: who may read copies of shards; default: found anew.
    """

    def __init__(
        self, recipe: Recipe, cache: CacheFolder, *, force: bool = False, accesses: Accesses | None = None
    ) -> None:
        self._recipe = recipe
        self._cache = cache
        self._force = force
        self._accesses = accesses or Accesses()
        # The modalities whose headers are not in the facts, by kind; and those that count from bytes, and have none.
        self._own = dict(_own(recipe))

    def under_recipe(self, facts: Facts, fields: Sequence[str], shard: Callable[[], Shard]) -> Seen:
        """The columns of a shard's facts. Raises as `cost_shard`.

        Args:
            fields: the names in the facts.
            shard: gives the open shard; called if something has to be probed.
        """
        table, recipe = facts.table, self._recipe
        known: dict[tuple[str, int], int] = {}
        kinds: list[int] = []
        for asked in zip(fields, table.kind, strict=True):
            kind = known.get(asked)
            kinds.append(known.setdefault(asked, recipe.kind_of(*asked)) if kind is None else kind)
        told = zip(table.header0, table.header1, strict=True)  # one at a time: a collector of garbage looks at them all
        errors = table.errors
        if errors:  # what is wrong with a whole sample stays so, whoever reads the field
            structural = {row for row in errors if table.kind[row] == OTHER}
            kinds = [OTHER if row in structural else kind for row, kind in enumerate(kinds)] if structural else kinds
        if self._own:
            headers: list[Header] = list(told)
            errors = dict(errors)
            for kind, modality in self._own.items():
                rows = [
                    row
                    for row, found in enumerate(kinds)
                    if found == kind and not _told_by_facts(modality, table.kind[row])
                ]
                for row in rows:
                    errors.pop(row, None)  # what the facts' own probe made of it
                if rows and counts_from_header(modality):
                    for row, header in zip(rows, self._headers(facts, modality, rows, shard), strict=True):
                        if isinstance(header, str):
                            errors[row] = header
                        elif modality.embedded_in and outer_of(fields[row])[1] and not any(header):
                            kinds[row] = UNUSED  # nothing of it is inside
                        else:
                            headers[row] = header
            return Seen(kinds, headers, errors)
        return Seen(kinds, told, errors)

    def _headers(
        self, facts: Facts, modality: Modality, rows: Sequence[int], shard: Callable[[], Shard]
    ) -> list[Header | str]:
        """Of each of `rows`, its header, or why there is none."""
        path, access = self._path(facts, modality), self._accesses.of(facts.meta.url)
        restrict(path, access)
        kept = {} if self._force else _kept(path, facts, modality.num_facts)
        missing = [row for row in rows if row not in kept]
        if missing:
            opened = shard()
            place = here()
            for row in missing:
                place.key = facts.table.key[row]
                kept[row] = _probed(modality, facts, row, opened, self._recipe)
            place.key = None
            self._cache.make("facts")
            write_whole(path, _sealed(kept, facts), access)
        return [kept[row] for row in rows]

    def _path(self, facts: Facts, modality: Modality) -> str:
        named = [os.path.abspath(facts.meta.url), limits_fingerprint(self._recipe.limits), probe_id(modality)]
        named.append(str(len(facts.table)))  # rows may have been put in for parts inside of members
        name = hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()
        return f"{self._cache.root}/facts/{name}.headers"


def with_inner(facts: Facts, recipe: Recipe) -> Facts:
    """The facts with a row for each part that may be inside of a member of another modality, as sound of a clip: behind
    it, "0.mp4" and "0.mp4 (audio)", with the same bytes. Whether it is there its probe says.
    """
    if not any(modality.embedded_in for modality in recipe.modalities.values()):
        return facts
    given, table = facts.table, FactsTable()
    known: dict[str, tuple[str, ...]] = {}
    columns = (given.sample, given.key, given.field, given.kind, given.offset, given.size, given.encoding)
    headers = zip(given.header0, given.header1, strict=True)
    for row, ((sample, key, field, kind, *place), header) in enumerate(
        zip(zip(*columns, strict=True), headers, strict=True)
    ):
        error = given.errors.get(row)
        offset, size, encoding = place
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
    """The modalities that the facts do not tell all of, by kind."""
    for kind, (name, modality) in enumerate(recipe.modalities.items(), TEXT + 1):
        theirs = BUILTINS.get(name)
        told = theirs is not None and keeps_headers_of(type(modality), theirs) and modality.fields == theirs.fields
        if not told or not counts_from_header(modality) or modality.embedded_in:
            yield kind, modality


def _told_by_facts(modality: Modality, kind: int) -> bool:
    """Whether a member of this kind in the facts has the header there that the modality would find."""
    if kind in (TEXT, OTHER) or not counts_from_header(modality):
        return False
    return keeps_headers_of(type(modality), BUILTINS[KINDS[kind]])


def _probed(modality: Modality, facts: Facts, row: int, shard: Shard, recipe: Recipe) -> Header | str:
    table = facts.table
    offset, size, encoding = table.offset[row], table.size[row], table.encoding[row]
    field, _ = outer_of(table.field[row])

    def read(count: int) -> bytes:
        # A part of a member can only be had where it is stored as it is.
        return bytes(shard.read(offset, count if encoding == RAW else size, encoding, field))

    reason = recipe.limits.size_error(size, is_text=False)
    if reason is not None:
        return reason
    try:
        found = read_header(type(modality), size, read, recipe.limits)
        header = tuple(map(as_int, found))
        if len(header) != modality.num_facts or not all(-_BOUND <= fact < _BOUND for fact in header):
            raise DecodeError(f"probe() gave {found!r}, not num_facts={modality.num_facts} integers of 64 bits")
        return header
    except DecodeError as error:
        return error.at(field).reason
    except MemoryError as error:
        raise measured_at(error, shard.url, table.key[row], field) from error
    except Exception as error:  # noqa: BLE001 - whatever its bytes make a probe raise is that member's failure
        return as_field_error(error, "probed").reason


def _sealed(headers: dict[int, Header | str], facts: Facts) -> Any:
    values = {
        "meta": _identity(facts),
        "headers": [[row, list(held)] for row, held in headers.items() if not isinstance(held, str)],
        "errors": [[row, held] for row, held in headers.items() if isinstance(held, str)],
    }
    return seal(KIND, FACTS_FORMAT, values, [])[0]


def _kept(path: str, facts: Facts, num_facts: int) -> dict[int, Header | str]:
    """Headers kept at `path`, if they are those of the shard as it is now."""
    try:
        head, _ = read_sealed(path, KIND, FACTS_FORMAT)
        row = range(len(facts.table))
        fact = range(-_BOUND, _BOUND)
        check_shape(head.values, {"meta": list, "headers": [(row, (fact,) * num_facts)], "errors": [(row, str)]}, "it")
        if head.values["meta"] != _identity(facts):
            return {}
        found: dict[int, Header | str] = {row: tuple(held) for row, held in head.values["headers"]}
        return found | dict(head.values["errors"])
    except (OSError, ValueError):
        return {}  # absent, damaged or of another version: probe again


def _identity(facts: Facts) -> list[Any]:
    meta = facts.meta
    return [meta.url, meta.size, meta.version, meta.checksum, meta.media, RULES]
