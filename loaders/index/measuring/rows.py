"""Rows of the costs of one shard: the outcome of each sample -> columns of a table of the index."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from orchdata.loaders.compact import Strings
from orchdata.loaders.errors import FieldError
from orchdata.loaders.field_names import VALUE, is_kept_as
from orchdata.loaders.index.measuring.kept_texts import Kept
from orchdata.loaders.index.table import MEMBERS, PARTS, Columns, offsets_of
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.samples.measure import Measured, Sizes
from orchdata.loaders.samples.members import Member, has_keys
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.unread_names import UnreadNames, above, name_of_member

Outcome = Measured | tuple[str, str] | None
"""Of one sample: its counts, the field and reason of its error, or None if the recipe's function leaves it out."""


@dataclass(slots=True)
class ShardSample:
    """One sample of the facts.

    Attributes:
        start: its members are the rows of the facts from here on.
        wanted: indices of the members to read.
        layout: digest of the names and kinds of its members.
        names: digest of their names alone.
        error: of the whole sample.
        kept: what is kept of its text, if that can be used.
        sizes: what is kept of its parts.
    """

    key: str
    start: int
    members: Sequence[Member]
    wanted: Sequence[int] = ()
    layout: str = ""
    names: str = ""
    error: FieldError | None = None
    kept: Kept | None = None
    sizes: Sizes = field(default_factory=dict)


_ROW: Final = ("llm_tokens", "loss_tokens", "text_start", "piece", "cut_tokens", "num_parts", "num_members")


class CostRows:
    """Collects the rows of one shard."""

    def __init__(self, table: FactsTable, recipe: Recipe) -> None:
        self._codes = {name: code for code, name in enumerate(recipe.kinds)}
        self._header_width, self._extent_width = recipe.num_facts, recipe.num_extents
        self._offsets = table.offset
        self._encodings = table.encoding
        self.field_numbers: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()
        self.unread = UnreadNames()
        self._asked = recipe.read_columns
        # Without an object for each row: millions of them would slow the garbage collector.
        self._rows = {name: array("i") for name in _ROW}
        self._appends = [column.append for column in self._rows.values()]
        self._keys = Strings()
        self._errors: dict[int, tuple[str, str]] = {}  # (field, reason): an exception would keep texts in memory
        self._parts = {name: array(np.dtype(dtype).char) for name, dtype in PARTS.items()}
        self._members = {name: array(np.dtype(dtype).char) for name, dtype in MEMBERS.items()}

    def put(self, sample: ShardSample, outcome: Outcome, text: Kept | None = None) -> None:
        """Add the next sample of the shard.

        Args:
            text: what is known of its text, with its unread names.
        """
        if outcome is None:
            self.ignored[LEFT_OUT] += 1
        elif isinstance(outcome, tuple):
            self.add_bad(sample, *outcome)
        else:
            self.add(sample, outcome)
            if text is not None and (text.unread or text.others):
                unread = tuple(self._not_kept(text.unread, sample.members)) if self._asked else text.unread
                self.unread.add(unread, text.others)

    def _not_kept(self, names: tuple[str, ...], members: Sequence[Member]) -> Iterator[str]:
        """Yield the names of what the recipe neither keeps nor counts, and of no key of a kept record."""
        asked: set[str] = set()
        records = [self._is_asked(member.field) for member in members if has_keys(member.field)]
        fields = {name_of_member(member.field) for member in members} if records and all(records) else None
        for name in names:
            if fields is not None and fields.isdisjoint(above(name)):
                continue
            if asked.isdisjoint(above(name)) and ("[" in name or not self._is_asked(name)):
                yield name
            else:
                asked.add(name)

    def _is_asked(self, name: str) -> bool:
        return any(is_kept_as(name, each) for each in self._asked)

    def add(self, sample: ShardSample, measured: Measured) -> None:
        header_width, extent_width = self._header_width, self._extent_width
        used, members = measured.used_members, sample.members
        position_of = {index: position for position, index in enumerate(used)}
        numbers, columns = self.field_numbers, self._members
        for _ in measured.pieces:  # each piece lists all members
            for index in used:
                row = sample.start + index
                name, kind, header, size, _ = members[index]
                columns["field"].append(numbers.setdefault(name, len(numbers)))
                columns["kind"].append(kind)
                columns["encoding"].append(self._encodings[row])
                columns["offset"].append(self._offsets[row])
                columns["size"].append(size)
                columns["header"].extend(header if len(header) == header_width else _filled(header, header_width))
        columns = self._parts
        for name, index, (positions, tokens, rows, extent) in measured.parts:
            columns["modality"].append(self._codes[name])
            columns["member"].append(position_of[index])
            columns["positions"].append(positions)
            columns["tokens"].append(tokens)
            columns["rows"].append(rows)
            columns["extent"].extend(extent if len(extent) == extent_width else _filled(extent, extent_width))
        if len(used) < len(members):
            for index, member in enumerate(members):
                if index not in position_of:
                    self.ignored[member.field] += 1
        for piece, counts in enumerate(measured.pieces):
            self._put(sample.key, *counts, piece, measured.cut_tokens, len(measured.parts), len(used))

    def add_bad(self, sample: ShardSample, name: str, reason: str) -> None:
        for member in sample.members:
            if member.kind == OTHER and member.error is None and not member.field.endswith(VALUE):
                self.ignored[member.field] += 1
        self._errors[len(self._keys)] = (name, reason)
        self._put(sample.key, 0, 0, 0, 0, 0, 0, 0)

    def _put(self, key: str, *values: int) -> None:
        """Add a row; `values` are as `_ROW`."""
        self._keys.append(key)
        for append, value in zip(self._appends, values, strict=True):
            append(value)

    def columns(self) -> Columns:
        """Return all rows as columns. No more can be added after that: they are not copied."""
        arrays: dict[str, Any] = {name: np.asarray(column) for name, column in self._rows.items()}
        arrays |= {"shard": np.zeros(len(self._keys), np.int32)}
        arrays |= {f"{kind}_offsets": offsets_of(arrays.pop(f"num_{kind}s")) for kind in ("part", "member")}
        arrays |= {f"part_{name}": np.asarray(column) for name, column in self._parts.items()}
        arrays |= {f"member_{name}": np.asarray(column) for name, column in self._members.items()}
        arrays["part_extent"] = arrays["part_extent"].reshape(len(self._parts["member"]), self._extent_width)
        arrays["member_header"] = arrays["member_header"].reshape(len(self._members["field"]), self._header_width)

        arrays["bad_row"] = np.array(list(self._errors), np.int64)
        fields, reasons = (Strings([error[part] for error in self._errors.values()]) for part in (0, 1))
        for column_name, strings in (("key", self._keys), ("error_field", fields), ("error_reason", reasons)):
            arrays[f"{column_name}_offsets"], encoded = strings.encoded()
            arrays[f"{column_name}_bytes"] = np.frombuffer(encoded, np.uint8)
        return Columns(**arrays)


def _filled(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Cut to a width, or fill with zeros: headers of the facts may be wider than the recipe needs."""
    return numbers if len(numbers) == width else (*numbers[:width], *(0,) * (width - len(numbers)))
