"""Field rules: how the fields of a shard's samples are named, the function that makes their records, its container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orchdata.loaders.functions import UserFunction
from orchdata.loaders.shards.container import Container, identity_of
from orchdata.loaders.shards.fields import ColumnRules
from orchdata.loaders.storage.suffixes import ARROW_SUFFIXES, PARQUET_SUFFIXES, RECORD_SUFFIXES, suffix_of


class FieldRules(NamedTuple):
    """How the samples of a shard are read.

    Attributes:
        columns: (old name, new name) of each renamed field.
        record: the recipe's function, which makes a record of a sample's fields.
        keep: names of `Recipe.keep`.
        container: of the user's, which opens the shard; None: by its suffix.
        key: "last_dot" if the keys of a tar end at the last dot of a file's name; "": at the first.
    """

    columns: tuple[tuple[str, str], ...] = ()
    record: UserFunction | None = None
    keep: tuple[str, ...] = ()
    container: Container | None = None
    key: str = ""

    @property
    def of_columns(self) -> ColumnRules:
        """The rules for tables, in which the function gets all columns."""
        return ColumnRules(self.columns, all=self.record is not None, kept=self.keep)

    def identity(self, url: str) -> list[Any]:
        """Return what the facts of a shard depend on, JSON-safe; empty without rules."""
        parts: list[Any] = [["columns", *map(list, self.columns)]] if self.columns else []
        parts += [["key", self.key]] if self.key else []
        if self.container is not None:
            every = [] if self.record is None else ["every column"]
            return [*parts, ["container", identity_of(self.container), *every]]
        if self.record is not None:
            if suffix_of(url) in RECORD_SUFFIXES:
                parts.append(["record", self.record.id])
            elif suffix_of(url) in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES):
                parts.append(["every column"])
        return parts + self.kept_in(url)

    def kept_in(self, url: str) -> list[Any]:
        """Return the names by which more columns of a shard are read, JSON-safe."""
        if not self.keep or self.container is not None:
            return []
        return [["kept", *self.keep]] if suffix_of(url) in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES) else []


NO_RULES = FieldRules()


def check_met(columns: Sequence[tuple[str, str]], met: Iterable[Mapping[str, int]]) -> None:
    """Raise ValueError if no sample has a field to rename, or samples already have its new name.

    Args:
        columns: (old name, new name).
        met: of each shard, as in FactsMeta.
    """
    names = {name for each in met for name in each}
    old_names = {old for old, _ in columns}
    missing = [old for old, _ in columns if old not in names]
    if missing and all(new in names for old, new in columns if old in missing):
        swapped = {new: old for old, new in columns}
        raise ValueError(
            f"columns maps old name -> new name, and the data have {', '.join(repr(swap) for swap in swapped)}, not "
            f"{', '.join(map(repr, missing))}. The other way round: columns={swapped!r}"
        )
    if missing:
        raise ValueError(f"columns renames {', '.join(map(repr, missing))}, and no sample has a field of this name")
    taken = [(old, new) for old, new in columns if new in names and new not in old_names]
    if taken:
        old, new = taken[0]
        raise ValueError(
            f"columns gives {old!r} the name {new!r}, and the data already have a field of this name: rename that one "
            f"too ({new!r}: 'other_{new}'), or choose another name"
        )
