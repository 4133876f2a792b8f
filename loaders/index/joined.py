"""Several indexes as one, without copies; many tables as one index file.

joined row --first row of its source--> (source, row in that index) --> values of that index
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DamagedIndexError, DataError
from orchdata.loaders.index.index import Index, PartTable, spread
from orchdata.loaders.index.table import sum_totals
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe, digest
from orchdata.loaders.samples.members import Member

Ints = NDArray[np.int64]
T = TypeVar("T")


class JoinedIndex(Index):
    """Indexes of recipes with the same modalities as one index; pickles as the list of them.

    Args:
        indexes: at least one; the same index may come several times.
    """

    indexes: tuple[Index, ...] = ()
    first_rows: Ints = np.zeros(1, np.int64)

    def __init__(self, indexes: Sequence[Index]) -> None:
        first = indexes[0]
        self.indexes = tuple(indexes)
        self._distinct = tuple({index.path: index for index in indexes}.values())
        self._in_turn = cycle(self._distinct)
        self._kept_table: tuple[Ints, PartTable] | None = None
        self.path = first.path
        self.fingerprint = digest([index.fingerprint for index in indexes])
        self.build_id = digest([index.build_id for index in indexes])
        self.modalities = first.modalities
        self.totals = sum_totals([index.totals for index in indexes])
        self.recipe = first.recipe
        self.shards = tuple(shard for index in indexes for shard in index.shards)
        self._rows = _Joined([index.num_rows for index in indexes])
        self.first_rows = self._rows.first
        self.num_rows = int(self.first_rows[-1])
        self.num_samples = sum(index.num_samples for index in indexes)
        self.is_split = self.num_rows > self.num_samples
        self._parts = _Joined([index.part_modality.size for index in indexes])
        first_shards = _Joined([len(index.shards) for index in indexes]).first
        self.shard_rows = np.concatenate(
            [[0], *(index.shard_rows[1:] + first for index, first in zip(indexes, self.first_rows, strict=False))]
        ).astype(np.int64)
        self.shard = _Column(self._rows, [index.shard for index in indexes], first_shards)  # type: ignore[assignment]
        for name in ("llm_tokens", "loss_tokens", "piece", "cut_tokens", "text_start"):
            setattr(self, name, _Column(self._rows, [getattr(index, name) for index in indexes]))
        for name in ("part_modality", "part_positions", "part_tokens"):
            setattr(self, name, _Column(self._parts, [getattr(index, name) for index in indexes]))
        # The range of each row's parts: in its own index, as stored.
        self._part_first = _Column(self._rows, [index.part_offsets[:-1] for index in indexes])
        self._part_stop = _Column(self._rows, [index.part_offsets[1:] for index in indexes])

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Any, ...]]:
        return JoinedIndex, (self.indexes,)

    def __repr__(self) -> str:
        return f"JoinedIndex({self.num_samples} samples of {len(self.indexes)} sources)"

    def source_of(self, row: int) -> int:
        self._check_row(row)
        return int(self._rows.index_of(row))

    def check_unchanged(self, rows: Ints | None = None) -> None:
        if rows is None:
            used: Iterable[Index] = self._distinct
        else:  # one more in turn: also one that gives nothing in this stage is in use
            used = {next(self._in_turn), *(self.indexes[number] for number in self._rows.numbers_in(rows))}
        for index in used:
            index.check_unchanged()

    def release(self) -> None:
        for index in self._distinct:
            index.release()

    def damaged(self, reason: str) -> DamagedIndexError:
        return self.indexes[0].damaged(reason)

    def key(self, row: int) -> str:
        return self._at(row, Index.key)

    def sample_rows(self) -> Ints:
        return np.concatenate(
            [index.sample_rows() + first for index, first in zip(self.indexes, self.first_rows, strict=False)]
        )

    def part_range(self, row: int) -> range:
        parts, first = self._at(row, Index.part_range), int(self._parts.first[self.source_of(row)])
        return range(parts.start + first, parts.stop + first)

    def member_of(self, part: int, num_members: int) -> int:
        index, own = self._own_part(part)
        return index.member_of(own, num_members)

    def modality_of(self, part: int) -> str:
        index, own = self._own_part(part)
        return index.modality_of(own)

    def sizes(self, parts: Ints | range, recipe: Recipe) -> list[PartSize]:
        numbers = np.arange(parts.start, parts.stop) if isinstance(parts, range) else parts
        sizes: list[Any] = [None] * len(numbers)
        for number, positions, own in self._parts.split(numbers):
            for position, size in zip(positions.tolist(), self.indexes[number].sizes(own, recipe), strict=True):
                sizes[position] = size
        return sizes

    def part_table(self, rows: Ints) -> PartTable:
        kept = self._kept_table  # each phase asks for the same rows
        if kept is not None and np.array_equal(kept[0], rows):
            return kept[1]
        parts, offsets = spread(*self._part_spans(rows))
        columns = offsets, self.part_modality[parts], self.part_positions[parts]
        for column in columns:
            column.setflags(write=False)  # kernels are compiled for mapped columns, which are read-only
        table = np.arange(len(rows)), *columns
        if len(rows) <= _KEPT_NUMBERS:
            self._kept_table = rows.copy(), table
        return table

    def _part_spans(self, rows: Ints) -> tuple[Ints, Ints]:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise ValueError(f"rows {rows.min()} to {rows.max()} of an index of {self.num_rows} rows")
        number, first, stop = self._rows.index_of(rows), self._part_first[rows], self._part_stop[rows]
        wrong = (first < 0) | (stop < first) | (stop > np.diff(self._parts.first)[number])
        if wrong.any():
            self.part_range(int(rows[wrong][0]))  # its error names the index
        return first + self._parts.first[number], stop - first

    def bad_rows(self) -> Ints:
        return np.concatenate(
            [index.bad_rows() + first for index, first in zip(self.indexes, self.first_rows, strict=False)]
        )

    def failure(self, row: int) -> DataError:
        return self._at(row, Index.failure)

    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]:
        return self._at(row, Index.read_spec)

    def members(self, row: int) -> list[Member]:
        return self._at(row, Index.members)

    def keys(self, start: int, stop: int) -> tuple[Ints, NDArray[np.uint8]]:
        offsets, data = [np.zeros(1, np.int64)], [np.zeros(0, np.uint8)]
        for number, index in enumerate(self.indexes):
            first, end = (int(row) for row in self.first_rows[number : number + 2])
            if (low := max(start, first)) < (high := min(stop, end)):
                own_offsets, own_data = index.keys(low - first, high - first)
                offsets.append(own_offsets[1:] + offsets[-1][-1])
                data.append(own_data)
        return np.concatenate(offsets), np.concatenate(data)

    def find_all(self, shard: str | None, key: str) -> list[int]:
        """Return the rows of a sample in all sources that have it."""
        return [
            row + int(first)
            for index, first in zip(self.indexes, self.first_rows, strict=False)
            for row in index.find_all(shard, key)
        ]

    def _at(self, row: int, ask: Callable[[Index, int], T]) -> T:
        """Return what the index of a row says of it."""
        number = self.source_of(row)
        return ask(self.indexes[number], row - int(self.first_rows[number]))

    def _own_part(self, part: int) -> tuple[Index, int]:
        number = self._parts.index_of(part)
        return self.indexes[number], part - int(self._parts.first[number])


class _Column:
    """A column over all indexes; its values are looked up by a number, a slice or an array of numbers.

    All columns are mapped into memory, so one array that reaches from the first of them to the end of the last has
    every value at its address: values of a thousand indexes are read at once. What lies between them is never read.

    Args:
        added: a number to add to the values of each index.
    """

    def __init__(self, joined: _Joined, columns: Sequence[NDArray[Any]], added: Ints | None = None) -> None:
        self._joined = joined
        self._added = added
        self.size = int(joined.first[-1])
        self.dtype = columns[0].dtype
        self._columns = [np.require(column, self.dtype, ["C", "A"]) for column in columns]  # they stay mapped
        starts = np.array([column.__array_interface__["data"][0] for column in self._columns], np.int64)
        num_bytes = np.array([column.nbytes for column in self._columns])
        filled = starts[num_bytes > 0]  # others may be anywhere, also between two values
        low, high = (int(filled.min()), int((starts + num_bytes)[num_bytes > 0].max())) if filled.size else (0, 0)
        memory: Any = (ctypes.c_char * (high - low)).from_address(low)
        self._memory: NDArray[Any] = np.frombuffer(memory, self.dtype)
        self._shift = (starts - low) // self.dtype.itemsize - joined.first[:-1]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.size))
        number = self._joined.index_of(rows)
        if not isinstance(rows, np.ndarray):
            values = self._columns[number][int(rows) - int(self._joined.first[number])]
        elif len(rows) and not 0 <= rows.min() <= rows.max() < self.size:
            raise IndexError(f"number {rows.min()} or {rows.max()} of {self.size}")
        else:
            values = self._memory[self._shift[number] + rows]
        return values if self._added is None else values + self._added[number].astype(self.dtype)


_KEPT_NUMBERS = 1 << 20


class _Joined:
    """The numbers of all indexes, one after the other, such as of their rows; `first` is the first one of each index,
    and the end.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.first: Ints = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._last: tuple[Ints, Ints] | None = None

    def index_of(self, numbers: Any) -> Any:
        """Return the index that each number is of; -1 below all of them, and their count above. The last array's are
        kept: a plan asks for many columns of the same rows.
        """
        if not isinstance(numbers, np.ndarray):
            return int(np.searchsorted(self.first, numbers, side="right")) - 1
        last = self._last
        if last is not None and np.array_equal(last[0], numbers):
            return last[1]
        found = np.searchsorted(self.first, numbers, side="right") - 1
        if len(numbers) <= _KEPT_NUMBERS:
            self._last = numbers.copy(), found
        return found

    def numbers_in(self, numbers: Ints) -> list[int]:
        """Return the indexes that some of the numbers are of, ascending."""
        found: list[int] = np.unique(self.index_of(numbers)).tolist()
        return found

    def split(self, numbers: Ints) -> list[tuple[int, Ints, Ints]]:
        """Return (number of the index, positions of its numbers in `numbers`, its own numbers) for each index that has
        some.
        """
        of = self.index_of(numbers)
        in_order = np.argsort(of, kind="stable")
        runs = np.split(in_order, np.flatnonzero(np.diff(of[in_order])) + 1) if len(of) else []
        found = [(int(of[positions[0]]), positions) for positions in runs]
        return [(number, positions, numbers[positions] - self.first[number]) for number, positions in found]
