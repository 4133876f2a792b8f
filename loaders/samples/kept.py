"""The values of kept fields: fields and records of one sample -> one value for each name of `Recipe.keep`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from orchdata.loaders.field_names import NUMBER, bare_name, is_kept_as, number_of

KeptValue: TypeAlias = Any
"""Bytes of a member, or the value of a column or key: a string, number, boolean, list or dict, or None."""


def kept_values(
    names: Iterable[str], fields: Mapping[str, KeptValue], records: Sequence[Mapping[str, Any]] = ()
) -> dict[str, KeptValue]:
    """Return name -> value of one sample.

    A field with exactly that name goes before fields that only end in it. Numbered fields ("0.cls", an item of a
    Parquet list), and several fields, are a list. Without such a field it is the value under that key of the first
    record that has it. None if the sample has neither.

    Args:
        fields: of the sample, by name.
        records: its JSON records.
    """
    return {
        name: _value(name, [field for field in fields if is_kept_as(field, name)], fields, records) for name in names
    }


def key_of(name: str, record: Mapping[str, Any]) -> str | None:
    """Return the key of a record with this name, which has no upper-case letters, or None."""
    return name if name in record else next((key for key in record if key.lower() == name), None)


def _value(
    name: str, matches: Sequence[str], fields: Mapping[str, KeptValue], records: Sequence[Mapping[str, Any]]
) -> KeptValue:
    if not matches:
        found = (record[key] for record in records if (key := key_of(name, record)) is not None)
        return next(found, None)
    for field in matches:
        if bare_name(field).lower() == name:
            return fields[field]
    if len(matches) == 1 and not NUMBER.search(bare_name(matches[0])):
        return fields[matches[0]]
    return [fields[field] for field in sorted(matches, key=lambda field: number_of(bare_name(field)))]
