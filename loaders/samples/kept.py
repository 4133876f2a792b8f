"""The values of kept fields: fields of one sample -> one value for each name of `Recipe.keep`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from orchdata.loaders.recipe import names_of

KeptValue = bytes | str | list[bytes | str] | None

_NUMBER: Final = re.compile(r"^(\d+)\.|\.(\d+)$")


def is_kept_as(field: str, name: str) -> bool:
    """Return whether a field is kept under a name of `Recipe.keep`."""
    return name in names_of(field) or (field.endswith(".gz") and name in names_of(field.removesuffix(".gz")))


def kept_values(names: Iterable[str], fields: Mapping[str, bytes | str]) -> dict[str, KeptValue]:
    """Return name -> value of one sample.

    A field with exactly that name goes before fields that only end in it. Numbered fields ("0.cls", an item of a
    Parquet list), and several fields, are a list. None if the sample has no such field.
    """
    return {name: _value(name, [field for field in fields if is_kept_as(field, name)], fields) for name in names}


def _value(name: str, matches: Sequence[str], fields: Mapping[str, bytes | str]) -> KeptValue:
    for field in matches:
        if _bare(field) == name:
            return fields[field]
    if len(matches) == 1 and not _NUMBER.search(_bare(matches[0])):
        return fields[matches[0]]
    return [fields[field] for field in sorted(matches, key=_number)] or None


def _bare(field: str) -> str:
    return field.lower().removesuffix(".gz")


def _number(field: str) -> tuple[int, str]:
    """Sort key of a field's number; not an int, because it may have thousands of digits."""
    match = _NUMBER.search(_bare(field))
    digits = "" if match is None else (match[1] or match[2]).lstrip("0")
    return (-1, "") if match is None else (len(digits), digits)
