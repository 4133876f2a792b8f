"""The columns of an index, and what they add up to: the body of a sealed file, its layout given by nine numbers.

    columns of a row --offsets--> its parts, its members, its key (flat columns over all rows)

A row is a sample, or one piece of a split sample; pieces follow each other.

The body does not contain positions of its columns, so no value can make a reader leave it; offsets into other columns
are checked when they are used. `index.views` makes arrays of a body; `TableWriter` writes one of any size, table by
table, in bounded memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.local import Buffer, write_at
from orchdata.loaders.unread_names import sum_unread

_I1, _I4, _I8 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
ROWS: Final = ("llm_tokens", "loss_tokens", "piece", "cut_tokens", "text_start")
PARTS: Final[dict[str, np.dtype[Any]]] = {
    "modality": _I1,
    **dict.fromkeys(("member", "positions", "tokens", "rows", "extent"), _I4),
}
MEMBERS: Final[dict[str, np.dtype[Any]]] = {
    "field": _I4,
    "kind": _I1,
    "encoding": _I1,
    "offset": _I8,
    "size": _I8,
    "header": _I8,
}
WIDTHS: Final = {"part_extent": "extent_width", "member_header": "header_width"}
"""Columns of fixed-width lists, each the last of its kind, and the field of TableSize with their width."""

STRINGS: Final = {"key": "rows", "error_field": "bad", "error_reason": "bad"}
"""String columns, stored as offsets and bytes, and the field of TableSize with their number of strings."""

# Column -> its dtype, the field of TableSize with its length, and the number of additional values.
LAYOUT: Final[dict[str, tuple[np.dtype[Any], str, int]]] = {
    **dict.fromkeys(("shard", *ROWS), (_I4, "rows", 0)),
    "part_offsets": (_I8, "rows", 1),
    **{f"part_{name}": (dtype, "parts", 0) for name, dtype in PARTS.items()},
    "member_offsets": (_I8, "rows", 1),
    **{f"member_{name}": (dtype, "members", 0) for name, dtype in MEMBERS.items()},
    "bad_row": (_I8, "bad", 0),
}
for _name, _of in STRINGS.items():
    LAYOUT[f"{_name}_offsets"] = (_I8, _of, 1)
    LAYOUT[f"{_name}_bytes"] = (_I1, f"{_name}_bytes", 0)

# Offsets -> the column of the counted elements.
OFFSETS: Final = {
    "part_offsets": "part_modality",
    "member_offsets": "member_field",
    **{f"{name}_offsets": f"{name}_bytes" for name in STRINGS},
}
TABLE_FORMAT = 1
"""Version of the layout: after an increase, an index of an older one is made again."""
_ALIGNMENT = 8
MOST_BYTES = 1 << 60
"""Larger than any file."""
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSize:
    """Lengths of all columns: n rows, p parts, m members, bad samples, and UTF-8 bytes of each string column; and the
    widths of the list columns, which depend on the recipe.
    """

    rows: int
    parts: int
    members: int
    bad: int
    key_bytes: int
    error_field_bytes: int
    error_reason_bytes: int
    extent_width: int
    header_width: int

    @staticmethod
    def sum(sizes: Sequence[TableSize]) -> TableSize:
        """Return the size of all tables together; their widths are the same."""
        total = {name: sum(getattr(size, name) for size in sizes) for name in TableSize.__slots__}
        return TableSize(**total | {name: getattr(sizes[0], name) for name in WIDTHS.values()})

    @lru_cache(maxsize=1024)  # noqa: B019 - many small shards have the same size
    def places(self) -> dict[str, slice]:
        """Return the bytes of each column in the body, and those of all."""
        places: dict[str, slice] = {}
        end = 0
        for name, (dtype, of, more) in LAYOUT.items():
            width = getattr(self, WIDTHS[name]) if name in WIDTHS else 1
            places[name] = slice(end, end + (getattr(self, of) + more) * width * dtype.itemsize)
            end = places[name].stop + -places[name].stop % _ALIGNMENT
        return {**places, "": slice(0, end)}

    @property
    def num_bytes(self) -> int:
        return int(self.places()[""].stop)


@dataclass(slots=True, eq=False)
class Columns:
    """All columns as arrays: of n rows, p parts, m members. One-dimensional but for part_extent and member_header."""

    shard: NDArray[np.int32]  # of each row
    llm_tokens: NDArray[np.int32]  # merged media tokens plus text
    loss_tokens: NDArray[np.int32]  # labels other than -100
    piece: NDArray[np.int32]  # number of the piece in its sample, from 0; 0 if the sample is not split
    cut_tokens: NDArray[np.int32]  # LLM tokens that its sample lost by truncation
    # Start of the text of a piece, encoded by `overflow.packed`; below 0 if it cannot be tokenized without the rest of
    # its sample; 0 if the sample is not split.
    text_start: NDArray[np.int32]
    part_offsets: NDArray[np.int64]  # (n + 1,); the parts of row i are [part_offsets[i], part_offsets[i + 1])
    part_modality: NDArray[np.uint8]  # a code; text has no parts
    part_member: NDArray[np.int32]  # index of the sample's member
    part_positions: NDArray[np.int32]  # positions entering the encoder
    part_tokens: NDArray[np.int32]  # merged tokens
    part_rows: NDArray[np.int32]  # rows of its arrays
    part_extent: NDArray[np.int32]  # (p, E), `PartSize.extent`, filled with zeros
    member_offsets: NDArray[np.int64]  # (n + 1,), for the members that the sample uses
    member_field: NDArray[np.int32]  # index into `fields`
    member_kind: NDArray[np.uint8]  # code of a modality, or a code for a member of none
    member_encoding: NDArray[np.uint8]  # as in the facts
    member_offset: NDArray[np.int64]  # where its bytes are
    member_size: NDArray[np.int64]
    member_header: NDArray[np.int64]  # (m, H), result of the modality's probe, filled with zeros
    bad_row: NDArray[np.int64]  # ascending
    # Strings are offsets and bytes (UTF-8); errors are those of the bad rows.
    key_offsets: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    error_field_offsets: NDArray[np.int64]
    error_field_bytes: NDArray[np.uint8]
    error_reason_offsets: NDArray[np.int64]
    error_reason_bytes: NDArray[np.uint8]

    @property
    def size(self) -> TableSize:
        counts = {of: len(getattr(self, name)) - more for name, (_, of, more) in LAYOUT.items()}
        return TableSize(**counts, **{width: getattr(self, name).shape[1] for name, width in WIDTHS.items()})


def pack(columns: Columns) -> bytes:
    """Return the body of a table that fits in memory."""
    pieces: list[Buffer] = []
    for name, (dtype, _, _) in LAYOUT.items():
        values = np.ascontiguousarray(getattr(columns, name), dtype)
        pieces.append(values.data)
        if padding := -values.nbytes % _ALIGNMENT:
            pieces.append(bytes(padding))
    return b"".join(pieces)


class TableWriter:
    """Writes the body of one table of `size`, at `start` of a file, piece by piece, in order.

    With pwrite: a full disk raises an error, and no signal kills the process.
    """

    def __init__(self, fd: int, start: int, size: TableSize) -> None:
        self._fd = fd
        self._at = {name: start + place.start for name, place in size.places().items()}
        self._waiting: list[tuple[memoryview, TableSize, int, Sequence[int]]] = []
        self._waiting_bytes = 0
        self._done = dict.fromkeys(("rows", *OFFSETS.values()), 0)
        os.ftruncate(fd, start + size.num_bytes)
        for name in OFFSETS:
            self._write(name, np.zeros(1, np.int64))

    def append(self, body: Buffer, size: TableSize, shard: int, field_numbers: Sequence[int]) -> None:
        """Append a packed table, with `shard` as the number of its first shard, and `field_numbers` of its fields."""
        view = memoryview(body)
        self._waiting.append((view, size, shard, field_numbers))
        self._waiting_bytes += view.nbytes
        if self._waiting_bytes > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the waiting tables; call it at the end."""
        if not self._waiting:
            return
        bodies, sizes, shards, numbers = zip(*self._waiting, strict=True)
        rows = self._shift("rows", [size.rows for size in sizes])
        for name, (dtype, of, more) in LAYOUT.items():
            counts = [getattr(size, of) for size in sizes]
            # Join the column of all tables.
            places = [size.places()[name] for size in sizes]  # of offsets without the first, which is 0
            pieces = [
                body[place.start + more * dtype.itemsize : place.stop]
                for body, place in zip(bodies, places, strict=True)
            ]
            joined: NDArray[Any] = np.frombuffer(b"".join(pieces), dtype)

            # Shift its values to the numbers of the whole.
            if name == "member_field":
                bases = np.cumsum([0, *map(len, numbers[:-1])])
                joined = np.array([*chain(*numbers)], dtype)[joined + np.repeat(bases, counts)]
            elif name == "shard":
                joined = joined + np.repeat(np.array(shards, dtype), counts)
            elif name == "bad_row":
                joined = joined + np.repeat(rows, counts)
            elif name in OFFSETS:
                lengths = [getattr(size, LAYOUT[OFFSETS[name]][1]) for size in sizes]
                joined = joined + np.repeat(self._shift(OFFSETS[name], lengths), counts)
            self._write(name, joined)
        self._waiting, self._waiting_bytes = [], 0

    def _shift(self, column: str, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Return the position in the whole column where each table begins."""
        ends = self._done[column] + np.cumsum(lengths, dtype=np.int64)
        self._done[column] = int(ends[-1])
        return ends - np.array(lengths, np.int64)

    def _write(self, name: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, LAYOUT[name][0]).data
        write_at(self._fd, data, self._at[name])
        self._at[name] += data.nbytes


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return running sums from 0: the start of each of `lengths`, and the end, int64 (len(lengths) + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:], dtype=np.int64)
    return offsets


Totals = dict[str, Any]

_NAMED_BY_DATA = "ignored_fields"
UNREAD = "unread"
"""Name of the counts of what is not read: see `unread_names.UnreadNames`."""


def summarize(
    columns: Columns,
    modalities: Sequence[str],
    ignored_fields: Mapping[str, int],
    unread: Mapping[str, Any],
) -> Totals:
    """Count the samples of a table.

    Every number is a sum, but those called `max_...`. A split sample counts once, for any number of pieces.
    `modalities` are their names by code, text first; `ignored_fields` says how many members of a field the recipe does
    not use; `unread` is as `UnreadNames.totals`.

    Returns:
        samples (bad ones included), bad, bytes and members (of the usable samples), llm_tokens, loss_tokens,
        without_loss (usable samples without a token that carries loss), max_llm_tokens (of a row), overflow (see
        `overflow_of`), ignored_fields (under `records.LEFT_OUT`: samples that `Recipe.record` leaves out), and for each
        modality: samples that have it, parts, positions, tokens, max_positions. Text has no positions or parts; its
        tokens are those that no encoder fills.
    """
    starts = offsets_of(columns.part_tokens)[columns.part_offsets]
    text_tokens = columns.llm_tokens - (starts[1:] - starts[:-1])
    is_first = columns.piece == 0
    loss_tokens, member_size = columns.loss_tokens, columns.member_size
    if not is_first.all():
        loss_tokens = np.add.reduceat(loss_tokens, np.flatnonzero(is_first), dtype=np.int64)
        member_size = member_size[np.repeat(is_first, np.diff(columns.member_offsets))]
    with_text = int(np.count_nonzero(text_tokens[is_first]))
    by_modality: Totals = {"text": {"samples": with_text, "tokens": _sum(text_tokens)}}
    for code, name in enumerate(modalities[1:], 1):
        parts = (columns.part_modality == code).nonzero()[0]
        rows = np.searchsorted(columns.part_offsets, parts, side="right")
        positions = columns.part_positions[parts]
        by_modality[name] = {
            "samples": int(np.count_nonzero(np.diff(rows, prepend=0))),  # of row r that is r + 1
            "parts": parts.size,
            "positions": _sum(positions),
            "tokens": _sum(columns.part_tokens[parts]),
            "max_positions": int(np.maximum.reduce(positions, initial=0)),
        }
    return {
        "samples": loss_tokens.size,
        "bad": columns.bad_row.size,
        "bytes": _sum(member_size),
        "members": member_size.size,
        "llm_tokens": _sum(columns.llm_tokens),
        "loss_tokens": _sum(columns.loss_tokens),
        "without_loss": int(np.count_nonzero((loss_tokens == 0) & (columns.llm_tokens[is_first] > 0))),
        "max_llm_tokens": int(np.maximum.reduce(columns.llm_tokens, initial=0)),
        "overflow": overflow_of(columns.piece, columns.cut_tokens),
        "ignored_fields": dict(ignored_fields),
        "modalities": by_modality,
        UNREAD: dict(unread),
    }


def overflow_of(piece: NDArray[np.int32], cut_tokens: NDArray[np.int32]) -> dict[str, int]:
    """Count the samples that `TextPreprocessor.overflow` changed: truncated, and the LLM tokens that they lost; split,
    and the rows that they have.
    """
    continued = piece > 0
    split = int(np.count_nonzero(continued[1:] & ~continued[:-1]))
    return {
        "truncated": int(np.count_nonzero(cut_tokens)),
        "cut_tokens": _sum(cut_tokens),
        "split": split,
        "pieces": split + int(np.count_nonzero(continued)),
    }


def _sum(values: NDArray[Any]) -> int:
    return int(np.add.reduce(values, dtype=np.int64))


def sum_totals(totals: Sequence[Totals]) -> Totals:
    """Return the sum of several totals, with all names that any of them has."""
    result: Totals = {}
    for name in dict.fromkeys(name for one in totals for name in one):
        values = [one[name] for one in totals if name in one]
        if name == _NAMED_BY_DATA:
            counts: Counter[str] = Counter()
            for value in values:
                counts.update(value)
            result[name] = dict(counts)
        elif name == UNREAD:
            result[name] = sum_unread(values)
        elif isinstance(values[0], dict):
            result[name] = sum_totals(values)
        else:
            result[name] = max(values) if name.startswith("max_") else sum(values)
    return result
