"""Files of records: JSON Lines, a JSON array, CSV, TSV, plain text -> offsets of records, and one record at a time.

    stored bytes --JSON--> value --columns=--> with its new names --Recipe.record--> record as it is read

Lines and rows that cannot be read are records with an error. If the start of the next record is unknown (a broken
element of an array, a quote that is never closed), the rest of the file is one record with an error.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError, PackageError
from orchdata.loaders.limits import Limits
from orchdata.loaders.records import RECORD_FIELD, LeftOut, Media, check_function, made_record
from orchdata.loaders.shards.fields import NO_RULES, RAW, TABLE_ROW, FieldRules, Met
from orchdata.loaders.shards.named_media import NamedMedia, media_of
from orchdata.loaders.storage.paths import is_media_table, suffix_of
from orchdata.loaders.storage.storage import BLOCK_BYTES, Storage
from orchdata.loaders.text.conversation import parse_json
from orchdata.loaders.text.messages import Repeating
from orchdata.loaders.text.preprocessor import decode_utf8

_BOM: Final = codecs.BOM_UTF8
_FIRST_BYTES: Final = 1 << 14
_SPACE: Final = " \t\r\n"
_KEYS: Final = ("__key__", "id")
_JSON_FIELD: Final = "json"
_CELL_CHARACTERS: Final = 131_072
"""Most characters of a CSV cell: the default limit of the csv module, which a program can change for its process."""
# Only finds where a value ends, so numbers are not parsed.
_END_FINDER: Final = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)


class Record(NamedTuple):
    """One record of a file: its bytes, or why it cannot be read; and how many bytes after it are lost because of it."""

    offset: int
    size: int
    data: bytes = b""
    error: str | None = None
    lost_bytes: int = 0


class Records(ABC):
    """The records of a file, and the media that they name. Safe from many threads, but for `all`.

    Attributes:
        encoding, field: of its records, as in the facts.
        met: counts the names of renamed fields.
    """

    encoding = RAW

    def __init__(self, url: str, file: Storage, limits: Limits, rules: FieldRules = NO_RULES) -> None:
        self.url, self.size = url, file.size
        self.met = Met(rules.columns)
        self.field = _JSON_FIELD if rules.record is None else RECORD_FIELD
        self._file = file
        self._most_bytes = limits.text_bytes
        self._is_table = is_media_table(url)
        self._new_names = dict(rules.columns)
        self._function = rules.record
        self._header: list[str] | None = None  # of a table

    @abstractmethod
    def all(self) -> Iterator[Record]:
        """Yield every record, in one pass."""

    @abstractmethod
    def _stored_at(self, offset: int) -> bytes:
        """Return the stored bytes of the record that begins at `offset`. Raises DecodeError."""

    def _json(self, data: bytes) -> bytes:
        """Convert the stored bytes of a record to JSON. Raises DecodeError."""
        return data

    def _row(self, data: bytes, cells_of: Callable[[bytes], list[str]], others: str) -> bytes:
        """Return a row of a table as a JSON object of strings. Raises DecodeError if it has another number of cells
        than the header line; `others` are separators of other kinds of files.
        """
        if self._header is None:
            start = len(_BOM) if self._file.read(0, len(_BOM)) == _BOM else 0
            self._header = _checked_names(cells_of(self._stored_at(start)), others)
        cells, names = cells_of(data), self._header
        if len(cells) != len(names):
            raise DecodeError(f"a row has {len(cells)} cells, the header line {len(names)} names")
        return json.dumps(dict(zip(names, cells, strict=True)), ensure_ascii=False).encode()

    def at(self, offset: int) -> bytes:
        """Return the record that begins at `offset`, as JSON. Raises DecodeError."""
        return self.as_json(self._stored_at(offset))

    def as_json(self, data: bytes, *, is_made: bool = True) -> bytes:
        """Convert the stored bytes of a record to JSON, as it is read; as the user's function gets it, unless
        `is_made`. Raises DecodeError.
        """
        if not self._new_names and (self._function is None or not is_made):
            return self._json(data)
        try:
            record = self.value(data)
            record = self.made(record) if is_made else record
        except LeftOut:
            raise DecodeError("Recipe.record leaves this sample out now: it must return the same each time") from None
        return json.dumps(record).encode()

    def value(self, data: bytes, *, counts: bool = False) -> Any:
        """Return the value of a record's stored bytes, with the new names of its fields, which may count in `met`.
        Raises DecodeError.
        """
        value = parse_json(self._json(data))
        if not self._new_names or not isinstance(value, dict):
            return value
        if counts:
            self.met.add(value)
        if isinstance(value, Repeating):
            raise DecodeError("a key comes twice in the record")
        names = self._new_names
        new = {names.get(key, key): item for key, item in value.items()}
        if len(new) < len(value):
            twice = next(new for old, new in names.items() if old in value and new in value and new not in names)
            raise DecodeError(f"columns= gives a field the name {twice!r}, which another field of the record has")
        return new

    def made(self, value: Any) -> Any:
        """Return the record that the user's function makes. Raises LeftOut and DecodeError."""
        if self._function is None:
            return value
        if not isinstance(value, dict):
            raise DecodeError(f"the record is a {type(value).__name__}, and Recipe.record gets a dict")
        if isinstance(value, Repeating):
            raise DecodeError("a key comes twice in the record")
        made = made_record(self._function, value)
        _refuse_references(made)
        return made

    def check_function(self, data: bytes, number: int) -> None:
        """Check the user's function with the first records: see `records.check_function`."""
        if self._function is not None:
            check_function(self._function, number, lambda: self.value(data))

    def media(self, value: Any) -> list[NamedMedia]:
        """Return the media that a record names. Raises DecodeError."""
        return media_of(value, file_names=self._is_table)

    def key(self, value: Any) -> str | None:
        """Return the key that a record gives itself."""
        names = (*_KEYS, "file_name") if self._is_table else _KEYS
        for key in (value.get(name) for name in names) if isinstance(value, dict) else ():
            if isinstance(key, str | int) and not isinstance(key, bool) and key != "":
                return str(key)
        return None


class Lines(Records):
    """JSON Lines; empty lines are skipped."""

    def all(self) -> Iterator[Record]:
        for offset, size, line in _lines(self._file, self._most_bytes):
            if line is None:
                reason = f"a line of {size} bytes, above Limits.text_bytes={self._most_bytes}"
                yield Record(offset, size, error=reason)
                continue
            data = self._content(line)
            if data.strip():
                yield Record(offset + line.index(data), len(data), data)

    def _stored_at(self, offset: int) -> bytes:
        def line(data: bytes, ended: bool) -> bytes | None:
            end = data.find(b"\n")
            return self._content(data[:end]) if end >= 0 else self._content(data) if ended else None

        return _read_record(self._file, offset, self._most_bytes, line)

    @staticmethod
    def _content(line: bytes) -> bytes:
        """Return the record in a line."""
        return line.strip()


class TextLines(Lines):
    """Plain text: each line is a document; empty lines are skipped."""

    encoding = TABLE_ROW

    def _json(self, data: bytes) -> bytes:
        return json.dumps({"text": decode_utf8(data)}, ensure_ascii=False).encode()

    @staticmethod
    def _content(line: bytes) -> bytes:
        return line.rstrip(b"\r\n")


class TabLines(TextLines):
    """TSV with a header line: cells between tabs, without quotes, as IANA registers text/tab-separated-values."""

    def all(self) -> Iterator[Record]:
        yield from islice(super().all(), 1, None)

    def _json(self, data: bytes) -> bytes:
        return self._row(data, lambda row: decode_utf8(row).split("\t"), ",;|")


class Array(Records):
    """One JSON array of any length: elements are found one after another, with one in memory at a time."""

    def all(self) -> Iterator[Record]:
        window = _Window(self._file)
        if window.next_character() != "[":
            reason = "not an array of records: it does not begin with [ (name a file with one record per line .jsonl)"
            yield self._lost(window, reason)
            return
        window.take(window.position + 1)
        separators = ""  # commas since the last element
        while True:
            character = window.next_character()
            if character == ",":
                separators += character
                window.take(window.position + 1)
            elif character == "]":
                window.take(window.position + 1)
                if window.next_character():
                    reason = "data after the end of the array (files joined?): write one array per file"
                    yield self._lost(window, reason)
                return
            elif not character:
                yield self._lost(window, "the file is cut: its array has no end")
                return
            else:
                element = None if separators == ",," else self._element(window)
                if element is None:
                    yield self._lost(window, "not valid JSON, or larger than Limits.text_bytes: the rest is not read")
                    return
                yield element
                separators = ""

    def _stored_at(self, offset: int) -> bytes:
        def element(data: bytes, ended: bool) -> bytes | None:
            text = data.decode("utf-8", "surrogateescape" if ended else "ignore")
            try:
                return text[: _END_FINDER.raw_decode(text)[1]].encode("utf-8", "surrogateescape")
            except (ValueError, RecursionError):
                return None

        return _read_record(self._file, offset, self._most_bytes, element)

    def _element(self, window: _Window) -> Record | None:
        while True:
            try:
                end = _END_FINDER.raw_decode(window.text, window.position)[1]
            except (ValueError, RecursionError):
                if len(window.text) - window.position > self._most_bytes or not window.grow():
                    return None
                continue
            if end < len(window.text) or not window.grow():
                break
        offset, data = window.offset, window.take(end)
        return Record(offset, len(data), data)

    def _lost(self, window: _Window, reason: str) -> Record:
        return Record(window.offset, 0, error=reason, lost_bytes=max(1, self._file.size - window.offset))


class Table(Records):
    """CSV with a header line; a record is a row, in JSON an object of strings."""

    encoding = TABLE_ROW

    def all(self) -> Iterator[Record]:
        rows = _rows(_lines(self._file, self._most_bytes))
        try:
            for number, (offset, size, data) in enumerate(rows):
                if number and data.strip():
                    yield Record(offset, size, data)
        except DecodeError as error:
            end = max(0, self._file.size - 1)
            yield Record(end, 0, error=error.reason, lost_bytes=1)

    def _stored_at(self, offset: int) -> bytes:
        def row(data: bytes, ended: bool) -> bytes | None:
            lines = data.splitlines(keepends=True) if ended else data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            try:
                return next(_rows((0, len(line), line) for line in lines))[2]
            except (DecodeError, StopIteration):
                return None

        return _read_record(self._file, offset, self._most_bytes, row)

    def _json(self, data: bytes) -> bytes:
        return self._row(data, _cells, ";\t|")


def _checked_names(names: list[str], others: str) -> list[str]:
    """Return the names of columns. Raises DecodeError if two are equal, or if one has all, between `others`: separators
    of other kinds of files.
    """
    separator = next((each for each in others if each in names[0]), "") if len(names) == 1 else ""
    if separator:
        again = f"write it again with commas: pandas.read_csv(path, sep={separator!r}).to_csv('new.csv', index=False)"
        way_out = {",": "name the file .csv", "\t": "name the file .tsv"}.get(separator, again)
        raise DecodeError(
            f"the header line looks separated by {separator!r}, and a .csv has commas, a .tsv tabs: {way_out}"
        )
    if len(set(names)) < len(names):
        raise DecodeError(f"two columns have the same name: {', '.join(names)[:200]}")
    return names


def _lines(file: Storage, most_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (offset, size, bytes) of each line with its line end; None instead of bytes if the line is too long."""
    pieces: list[bytes] = []
    offset = size = 0
    for start in range(0, max(1, file.size), BLOCK_BYTES):
        block = file.read(start, BLOCK_BYTES)
        begin = 0
        if start == 0 and block.startswith(_BOM):
            begin = offset = len(_BOM)
        while begin < len(block):
            end = block.find(b"\n", begin) + 1 or len(block)
            size += end - begin
            if size <= most_bytes:
                pieces.append(block[begin:end])
            else:
                pieces.clear()
            if block[end - 1] == 10:
                yield offset, size, b"".join(pieces) if size <= most_bytes else None
                pieces.clear()
                offset, size = offset + size, 0
            begin = end
    if size:
        yield offset, size, b"".join(pieces) if size <= most_bytes else None


def _rows(lines: Iterator[tuple[int, int, bytes | None]]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, size, bytes) of each CSV row; cells may have line breaks. Raises DecodeError."""
    taken: list[tuple[int, int, bytes]] = []

    def texts() -> Iterator[str]:
        for offset, size, line in lines:
            if line is None:
                raise DecodeError(f"a line of {size} bytes, above Limits.text_bytes: the rest is not read")
            taken.append((offset, size, line))
            yield line.decode("utf-8", "surrogateescape")

    _check_csv()
    try:
        for cells in csv.reader(texts(), strict=True):
            if max(map(len, cells), default=0) > _CELL_CHARACTERS:
                raise csv.Error(f"field larger than field limit ({_CELL_CHARACTERS})")
            yield taken[0][0], sum(size for _, size, _ in taken), b"".join(line for _, _, line in taken)
            taken.clear()
    except csv.Error as error:
        raise DecodeError(f"not valid CSV: {error}: the rest is not read") from None


def _check_csv() -> None:
    """Raise PackageError if a process-wide setting of the csv module would make good rows look damaged."""
    if (most := csv.field_size_limit()) < _CELL_CHARACTERS:
        reason = f"csv.field_size_limit() is {most}"
        raise PackageError("csv", reason, f"call csv.field_size_limit({_CELL_CHARACTERS}), its default", "reading CSV")


def _cells(row: bytes) -> list[str]:
    _check_csv()
    try:
        return next(csv.reader(io.StringIO(row.decode(), newline="\n"), strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise DecodeError(f"not valid CSV: {error}") from None


def _read_record(file: Storage, offset: int, most_bytes: int, cut: Callable[[bytes, bool], bytes | None]) -> bytes:
    """Read more and more bytes from `offset` on until `cut` finds a whole record in them, and return it."""
    size = _FIRST_BYTES
    while True:
        data = file.read(offset, size)
        record = cut(data, len(data) < size)
        if record is not None:
            return record
        if len(data) < size or size > 2 * most_bytes:
            raise DecodeError("not the record that was indexed: index the file again")
        size *= 4


class _Window:
    """A part of a file as text: it grows at its end, and is dropped at its front.

    Bytes that are not UTF-8 become one character each, so that positions in the text map to offsets in the file.
    """

    def __init__(self, file: Storage) -> None:
        self._file = file
        self._read = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.text = ""
        self.position = 0
        self.offset = 0  # in the file, at `position`
        self.grow()
        if self.text.startswith("\ufeff"):
            self.take(self.position + 1)

    def grow(self) -> bool:
        """Read more of the file, at least as much as is in memory. Return False at the end of the file."""
        if self._read >= self._file.size:
            return False
        data = self._file.read(self._read, max(BLOCK_BYTES, len(self.text) - self.position))
        self._read = self._read + len(data) if data else self._file.size
        self.text = self.text[self.position :] + self._decode(data, self._read >= self._file.size)
        self.position = 0
        return True

    def next_character(self) -> str:
        """Return the next character that is not white space, and "" at the end."""
        while True:
            start = self.position
            while self.position < len(self.text) and self.text[self.position] in _SPACE:
                self.position += 1
            self.offset += self.position - start
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.grow():
                return ""

    def take(self, end: int) -> bytes:
        """Return the bytes up to position `end` of the text, and move there."""
        data = self.text[self.position : end].encode("utf-8", "surrogateescape")
        self.position = end
        self.offset += len(data)
        return data


_FORMS: Final[dict[str, type[Records]]] = {
    ".jsonl": Lines,
    ".ndjson": Lines,
    ".csv": Table,
    ".tsv": TabLines,
    ".txt": TextLines,
}


def open_records(url: str, file: Storage, limits: Limits, rules: FieldRules = NO_RULES) -> Records:
    """Return the records of a file, by its suffix; a .json file is an array, or JSON Lines if its first line is an
    object.
    """
    suffix = suffix_of(url).removesuffix(".gz").removesuffix(".zst")
    form = _FORMS.get(suffix, Array)
    if suffix == ".json":
        line, end, _ = file.read(0, _FIRST_BYTES).removeprefix(_BOM).lstrip().partition(b"\n")
        if line.startswith(b"{"):
            try:
                _END_FINDER.decode(line.decode("utf-8", "surrogateescape"))
                form = Lines
            except (ValueError, RecursionError):
                form = Array if end else Lines  # a line that is longer than what was read
    return form(url, file, limits, rules)


def _refuse_references(value: Any) -> None:
    if isinstance(value, Media):
        raise DecodeError(f"Recipe.record returned {value}: records of JSON and CSV name media by their paths")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_references(item)
