"""Columns of strings without a Python object for each row.

A list of millions of strings costs memory, and time: the garbage collector walks it again and again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_FEW_SLOTS: Final = 64
_EMPTY: Final = -1
_MOST_BYTES: Final = 2**31 - 1
"""Arrow's offsets of strings have 32 bits."""


class Strings(Sequence[str]):
    """A column of strings of which few are equal, such as keys: their UTF-8 bytes, one after another. Surrogates, which
    UTF-8 does not have, become escapes.
    """

    __slots__ = ("_bytes", "_ends")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        self._ends = array("q")
        self.extend(strings)

    def append(self, string: str) -> None:
        self._bytes += string.encode("utf-8", "backslashreplace")
        self._ends.append(len(self._bytes))

    def extend(self, strings: Iterable[str]) -> None:
        for string in strings:
            self.append(string)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Strings: ...
    def __getitem__(self, row: int | slice) -> str | Strings:
        if isinstance(row, slice):
            return Strings([self[each] for each in range(*row.indices(len(self)))])
        end = self._ends[row]
        first = row in (0, -len(self._ends))
        return self._bytes[0 if first else self._ends[row - 1] : end].decode()

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends:
            yield self._bytes[start:end].decode()
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strings) and (self._ends, self._bytes) == (other._ends, other._bytes)

    __hash__ = None  # type: ignore[assignment]

    def encoded(self) -> tuple[NDArray[np.int64], bytes]:
        """Return the start of each string in the bytes of all and their end, int64 (len + 1,), and these bytes."""
        return np.concatenate([np.zeros(1, np.int64), self._ends]), bytes(self._bytes)

    def arrow(self) -> pa.Array | pa.ChunkedArray:
        """Return an Arrow array of strings; in chunks, if they have more than 2 GiB."""
        if len(self._bytes) > _MOST_BYTES:
            return pa.array(list(self), pa.string())
        offsets, content = self.encoded()
        return pa.StringArray.from_buffers(len(self), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content))

    @staticmethod
    def of_arrow(column: pa.Array | pa.ChunkedArray) -> Strings:
        """Build the column from Arrow strings without nulls."""
        result = Strings()
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            if not len(chunk):
                continue
            _, ends, content = chunk.buffers()
            bounds = np.frombuffer(ends, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1].astype(np.int64)
            result._ends.frombytes((bounds[1:] - bounds[0] + len(result._bytes)).tobytes())
            result._bytes += memoryview(content)[bounds[0] : bounds[-1]] if content is not None else b""
        return result


class Names(Sequence[str]):
    """A column of strings of which many are equal, such as names of fields: a number for each row."""

    __slots__ = ("_codes", "_known", "_names")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: list[str] = []
        self._known: dict[str, int] = {}
        self._codes = array("i")
        self.extend(names)

    def append(self, name: str) -> None:
        self.extend((name,))

    def extend(self, names: Iterable[str]) -> None:
        known = self._known
        for name in names:
            code = known.get(name)
            if code is None:
                code = known[name] = len(self._names)
                self._names.append(name)
            self._codes.append(code)

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._names[code] for code in self._codes[row]]
        return self._names[self._codes[row]]

    def __iter__(self) -> Iterator[str]:
        return map(self._names.__getitem__, self._codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def arrow(self) -> pa.Array:
        """Return an Arrow array of strings."""
        return pa.DictionaryArray.from_arrays(np.asarray(self._codes), pa.array(self._names, pa.string())).cast(
            pa.string()
        )

    @staticmethod
    def of_arrow(column: pa.Array | pa.ChunkedArray) -> Names:
        """Build the column from Arrow strings without nulls."""
        result = Names()
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            encoded, at = chunk.dictionary_encode(), len(result)
            names = encoded.dictionary.to_pylist()
            result.extend(names)  # their codes, and then those of the rows
            codes = np.array(result._codes[at:], np.int32)[encoded.indices.to_numpy()]
            del result._codes[at:]
            result._codes.frombytes(codes.tobytes())
        return result


class RowsOfKeys:
    """The first row of each key, as a dict from key to row would have it, without an object for each key. `keys` has
    the key of each row: a key that is added is, or will be, the key of its row.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._count = 0
        self._make(_FEW_SLOTS)

    def __contains__(self, key: str) -> bool:
        return self._rows[self._slot(key, hash(key))] != _EMPTY

    def setdefault(self, key: str, row: int) -> int:
        """Return the first row of a key; add it if the key is new."""
        code = hash(key)
        slot = self._slot(key, code)
        earlier = self._rows[slot]
        if earlier != _EMPTY:
            return earlier
        self._rows[slot], self._codes[slot] = row, code
        self._count += 1
        if 2 * self._count > len(self._rows):
            self._grow()
        return row

    def _slot(self, key: str, code: int) -> int:
        """Return the slot of a key, or the empty one where it belongs."""
        rows, mask = self._rows, len(self._rows) - 1
        slot = code & mask
        while (row := rows[slot]) != _EMPTY:
            if self._codes[slot] == code and self._keys[row] == key:
                return slot
            slot = (slot + 1) & mask
        return slot

    def _make(self, slots: int) -> None:
        self._rows = array("q", [_EMPTY]) * slots
        self._codes = array("q", [0]) * slots  # hashes: another key is seldom looked at

    def _grow(self) -> None:
        former = zip(self._rows, self._codes, strict=True)
        self._make(2 * len(self._rows))
        rows, codes, mask = self._rows, self._codes, len(self._rows) - 1
        for row, code in former:
            if row != _EMPTY:
                slot = code & mask
                while rows[slot] != _EMPTY:
                    slot = (slot + 1) & mask
                rows[slot], codes[slot] = row, code
