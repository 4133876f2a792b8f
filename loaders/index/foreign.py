"""An index is foreign data: a digest says nothing about who wrote it, and its offsets go into kernels.

When it is opened first, every offset, number and code is in range, no count is negative, and all add up to the totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.table import MEMBERS, MOST_BYTES, OFFSETS, PARTS, STRINGS, Columns, TableSize
from orchdata.loaders.index.totals import UNREAD, Totals, sum_totals, summarize
from orchdata.loaders.modalities.builtin import UNUSED
from orchdata.loaders.shards.fields import OWN_BYTES, RAW

_ROWS_AT_A_TIME: Final = 1 << 18
_COUNTS: Final = ("llm_tokens loss_tokens piece cut_tokens part_positions part_tokens part_rows").split()


_SHARD: Final = (str, int, str, str, int, int, str, list, str, int, bool, bool, str)
"""The types of `ShardInfo.as_list`, which leaves the last ones out where they are the defaults."""


def check_head(values: Mapping[str, Any]) -> None:
    """Raise ValueError if the head of an index is malformed."""
    items = {"shards": list, "shard_rows": int, "modalities": str, "fields": str}
    for name, kind in items.items():
        _expect(
            type(values.get(name)) is list and {*map(type, values[name])} <= {kind}, name, f"are no {kind.__name__}"
        )
    shards, rows, modalities = values["shards"], values["shard_rows"], values["modalities"]
    _expect(all(7 <= len(shard) <= len(_SHARD) for shard in shards), "shards", "have another length")
    for number, kind in enumerate(_SHARD):
        given = [shard[number] for shard in shards if len(shard) > number]
        _expect({*map(type, given)} <= {kind}, "shards", f"are no {kind.__name__}")
        _expect(kind is not int or min(given, default=0) >= 0, "shards", "are negative")
    if "root" in values:
        _expect(type(values["root"]) is str, "root", "are no str")
        for name, media_root in ((shard[0], shard[6]) for shard in shards):
            parts = name.split("/")
            if "://" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(parts) or media_root not in ("", "."):
                raise ValueError(f"the shard {name!r:.200} is not named by a path below the common folder")
    renamed = [pair for shard in shards for pairs in shard[7:8] for pair in pairs]
    _expect(all(type(each) is list and [*map(type, each)] == [str, str] for each in renamed), "shards", "are no names")
    starts = rows[0] == 0 and len(rows) == len(shards) + 1 if rows else False
    _expect(starts and all(a <= b for a, b in pairwise(rows)), "shard_rows", "do not follow each other")
    _expect(modalities[:1] == ["text"] and len({*modalities}) == len(modalities), "modalities", f"are {modalities}")
    _expect(
        type(values.get("totals")) is dict and type(values.get("recipe")) is dict, "totals and recipe", "are missing"
    )
    _expect(all(type(values.get(name)) is str for name in ("fingerprint", "build_id")), "fingerprint", "are no str")
    totals, unread = values["totals"], values["totals"].get(UNREAD)
    _expect(type(unread) is dict and unread.keys() == {"names", "others"}, UNREAD, "are no counts")
    for counts in (totals.get("ignored_fields"), unread["names"], {"": unread["others"]}):
        _expect(type(counts) is dict and {*map(type, counts.values())} <= {int}, "totals", "are no counts")
    size: Any = values.get("size")
    is_size = type(size) is dict and size.keys() == {*TableSize.__slots__} and {*map(type, size.values())} <= {int}
    is_size = is_size and 0 <= min(size.values()) <= max(size.values()) < MOST_BYTES
    _expect(is_size and size["rows"] == rows[-1], "size", "are not those of the rows")


def check_columns(
    columns: Columns, *, modalities: Sequence[str], num_fields: int, shard_rows: NDArray[np.int64], totals: Totals
) -> None:
    """Raise ValueError, naming the column, for values that no build writes.

    Args:
        modalities: their names by code, text first.
        num_fields: number of field names, which `member_field` indexes.
        shard_rows: the first row of each shard, and the end.
        totals: of the columns.
    """
    # Offsets, codes and counts are in range.
    num_modalities = len(modalities)
    columns.check_ends()
    for name in OFFSETS:
        offsets = getattr(columns, name)
        _expect(not (offsets[1:] < offsets[:-1]).any(), name, "go back")
    for name in _COUNTS:
        _expect_range(getattr(columns, name), 0, None, name)
    for name in ("member_offset", "member_size"):
        _expect_range(getattr(columns, name), 0, MOST_BYTES, name)
    _expect_range(columns.part_modality, 1, num_modalities, "part_modality")
    _expect_range(columns.part_member, 0, None, "part_member")
    _expect_range(columns.member_field, 0, num_fields, "member_field")
    _expect_range(columns.member_encoding, RAW, OWN_BYTES + 1, "member_encoding")
    kinds = columns.member_kind
    _expect(not ((kinds >= num_modalities) & (kinds < UNUSED)).any(), "member_kind", "are of no modality")
    for name in STRINGS:
        _check_strings(getattr(columns, f"{name}_offsets"), getattr(columns, f"{name}_bytes"), name)

    # Rows follow their shards; bad rows are empty.
    _check_shards(columns, shard_rows)
    bad = columns.bad_row
    for name in ("part_offsets", "member_offsets"):
        offsets = getattr(columns, name)
        _expect(bool((offsets[bad] == offsets[bad + 1]).all()), name, "give bad rows parts or members")

    # Columns agree with each other and with the totals; ignored fields have no rows.
    sums: list[Totals] = []
    for chunk in _chunks(columns):
        _check_rows(chunk)
        sums.append(summarize(chunk, modalities, {}, {"names": {}, "others": 0}))
    counted = sum_totals(sums) | {name: totals.get(name) for name in ("ignored_fields", UNREAD)}
    if counted != totals:
        wrong = next((name for name in counted if counted[name] != totals.get(name)), "totals")
        raise ValueError(f"{wrong} add up to {counted.get(wrong)!r:.80}, and the totals say {totals.get(wrong)!r:.80}")


def _check_strings(offsets: NDArray[np.int64], data: NDArray[np.uint8], name: str) -> None:
    begins = offsets[offsets < data.size]
    _expect(not ((data[begins] & 0xC0) == 0x80).any(), name, "begin inside of a character")
    for start in range(0, offsets.size - 1, _ROWS_AT_A_TIME):
        first, last = offsets[start], offsets[min(start + _ROWS_AT_A_TIME, offsets.size - 1)]
        try:
            data[first:last].tobytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the values of {name} are not text: {error}") from None


def _check_shards(columns: Columns, shard_rows: NDArray[np.int64]) -> None:
    shard, num_shards = columns.shard, shard_rows.size - 1
    _expect_range(shard, 0, num_shards, "shard")
    _expect(not (shard[1:] < shard[:-1]).any(), "shard", "go back")
    starts = np.searchsorted(shard, np.arange(num_shards + 1))
    _expect(bool((starts == shard_rows).all()), "shard", "are not those that the head says")
    first = starts[:-1][starts[:-1] < shard.size]
    _expect(not columns.piece[first].any(), "piece", "begin a shard with a later piece")


def _check_rows(columns: Columns) -> None:
    """Check columns against each other; the first row must begin a sample."""
    _expect(bool((columns.loss_tokens <= columns.llm_tokens).all()), "loss_tokens", "exceed llm_tokens")
    piece = columns.piece
    counts_on = (piece[1:] == 0) | (piece[1:] == piece[:-1] + 1)
    _expect(bool(counts_on.all()) and not piece[:1].any(), "piece", "do not count the pieces of a sample")
    num_members = np.repeat(np.diff(columns.member_offsets), np.diff(columns.part_offsets))
    _expect(
        bool((columns.part_member < num_members).all()), "part_member", "are members that their samples do not have"
    )


def _chunks(columns: Columns) -> Iterator[Columns]:
    """Yield all rows in chunks, so that memory is bounded; the pieces of a sample stay together."""
    start, num_rows = 0, columns.shard.size
    if num_rows <= _ROWS_AT_A_TIME:
        yield columns
        return
    while start < num_rows:
        stop = min(start + _ROWS_AT_A_TIME, num_rows)
        while stop < num_rows and columns.piece[stop]:
            stop += 1
        yield _rows(columns, start, stop)
        start = stop


def _rows(columns: Columns, start: int, stop: int) -> Columns:
    """Return the rows from start to stop, without keys and reasons."""
    arrays: dict[str, Any] = {}
    for name in ("shard", "llm_tokens", "loss_tokens", "piece", "cut_tokens", "text_start"):
        arrays[name] = getattr(columns, name)[start:stop]
    for kind, names in (("part", PARTS), ("member", MEMBERS)):
        offsets = getattr(columns, f"{kind}_offsets")[start : stop + 1]
        arrays[f"{kind}_offsets"] = offsets - offsets[0]
        for name in names:
            arrays[f"{kind}_{name}"] = getattr(columns, f"{kind}_{name}")[offsets[0] : offsets[-1]]
    first, last = np.searchsorted(columns.bad_row, (start, stop))
    return replace(columns, **arrays, bad_row=columns.bad_row[first:last] - start)


def _expect_range(values: NDArray[Any], start: int, stop: int | None, name: str) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max()) if stop is not None else start
    if low < start or (stop is not None and high >= stop):
        raise ValueError(f"the values of {name} run from {low} to {high}")


def _expect(holds: bool, name: str, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"the values of {name} {otherwise}")
