"""One pass over a file of records: records -> rows of the facts, with the headers of the media that they name.

Records are read some hundreds at a time. Their media are probed in threads if files are slow; for files in the page
cache, threads would only wait for each other.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.checks import read_header
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.records import LeftOut
from orchdata.loaders.shards.fields import NAMED, printable
from orchdata.loaders.shards.jsonl.media_files import joined_stamp, shown_name
from orchdata.loaders.shards.jsonl.named_media import Folder, NamedMedia
from orchdata.loaders.shards.jsonl.records import Record, RecordReader
from orchdata.loaders.shards.shard import NO_HEADER, FactsTable, shard_failure
from orchdata.loaders.storage.storage import STAMP_BITS
from orchdata.loaders.watch import SCANNING, here

_THREADS: Final = 8
_CHUNK: Final = 256
_TIMED: Final = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class Scanned(NamedTuple):
    """What is known of a file of records: bytes that could not be read, the state of the media that it names, how many
    records the user's function leaves out, and the offset of the record after the first ones (None: there is none).
    """

    table: FactsTable
    lost_bytes: int
    media: str = ""
    left_out: int = 0
    end: int | None = None


def scan(reader: RecordReader, limits: Limits, most: int | None = None) -> Scanned:
    """Scan a file of records, or its first `most`. Bad records and media become rows with an error."""
    rows, states = _Scan(reader, limits), MediaStates()
    after: list[int] = []

    def records() -> Iterator[Record]:
        for number, record in enumerate(reader.all()):
            if number == most:
                after.append(record.offset)
                return
            yield record

    for read, probed in _probed(reader, records(), limits):
        rows.add(read, probed)
        states.add([one.state for one in probed])
        if len(rows.table) > limits.shard_rows:
            if most is not None:
                break  # the whole file has more
            return Scanned(shard_failure(f"more than {limits.shard_rows} fields, above Limits.shard_rows"), 1)
    if not len(rows.table) and not rows.left_out and not after:
        return Scanned(shard_failure("no samples: the file has no records"), 0)
    return Scanned(rows.table, rows.lost_bytes, states.digest(), rows.left_out, after[0] if after else None)


def media_state(reader: RecordReader, limits: Limits) -> str:
    """Return the state of the files that the records name, equal to that of `scan`, without reading any of them."""
    states = MediaStates()
    media = (one for record in reader.all() for one in _Read.of(record, reader, limits).media)
    named = (file.path for one in media for file in one.parts())
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="orchdata-media") as pool:
        for some in _batches(named, _CHUNK):
            _prepare(reader.folder, some)
            states.add(mapped(pool, lambda path: _state(path, reader.folder), some))
    return states.digest()


class MediaStates:
    """A digest over the named files in order: whether each exists, its size and its modification time."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._any = False

    def add(self, states: Sequence[str]) -> None:
        for state in states:
            if state:
                self._any = True
                self._digest.update(f"{state}\0".encode("utf-8", "backslashreplace"))

    def digest(self) -> str:
        """Return the hex digest; "" if no file is named."""
        return self._digest.hexdigest() if self._any else ""


class _Probed(NamedTuple):
    """The result of probing one image or clip."""

    size: int = 0
    stamp: int = 0
    header: Header = NO_HEADER
    error: str | None = None
    state: str = ""


class _Read(NamedTuple):
    """A parsed record."""

    record: Record
    key: str | None = None
    names_itself: bool = False
    size: int = 0
    media: Sequence[NamedMedia] = ()
    error: str | None = None
    is_left_out: bool = False

    @staticmethod
    def of(record: Record, reader: RecordReader, limits: Limits, number: int | None = None) -> _Read:
        """Read one record. Its number serves to check the user's function with the first ones; None: only its media are
        wanted.
        """
        if record.error is not None:
            return _Read(record, error=record.error)
        key = None
        try:
            value = reader.value(record.data, counts=number is not None)
            key = reader.key(value)
            names_itself = isinstance(value, dict) and "__key__" in value
            if number is not None:
                reader.check_function(record.data, number)
            media = reader.media(reader.made(value))
        except LeftOut:
            return _Read(record, key, is_left_out=True)
        except DecodeError as error:
            return _Read(record, key, error=error.reason)
        count = sum(len(one.parts()) for one in media)
        if count > limits.sample_parts:
            reason = f"it names {count} files, above Limits.sample_parts={limits.sample_parts}"
            return _Read(record, key, error=reason)
        return _Read(record, key, names_itself, len(record.data), media)


def _batches(items: Iterator[Item], length: int) -> Iterator[list[Item]]:
    while batch := list(islice(items, length)):
        yield batch


def _probed(
    reader: RecordReader, all_records: Iterator[Record], limits: Limits
) -> Iterator[tuple[list[_Read], list[_Probed]]]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="orchdata-media") as pool:
        current, number = here(), 0
        shard = current.shard

        def probe(one: tuple[str, NamedMedia]) -> _Probed:
            mine = here()  # of the thread that probes
            mine.shard, mine.key = shard, one[0]
            try:
                return _probe(one[1], reader.folder, limits)
            except MemoryError as error:
                raise measured_at(error, reader.url, one[0], one[1].field) from error
            finally:
                mine.key = None

        for records in _batches(all_records, _CHUNK):
            read = []
            current.fraction = SCANNING * records[0].offset / max(1, reader.size)
            for record in records:
                current.key = f"record {number}"
                read.append(_Read.of(record, reader, limits, number))
                number += 1
            current.key = None
            first = number - len(read)
            media = [(each.key or f"record {first + at}", one) for at, each in enumerate(read) for one in each.media]
            _prepare(reader.folder, [each.path for _, one in media for each in one.parts()])
            yield read, mapped(pool, probe, media)


def _prepare(folder: Folder | None, paths: Sequence[str | None]) -> None:
    if folder is not None:
        folder.prepare([path for path in paths if path is not None])


def mapped(pool: Executor, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call a function for each item: the first few here; the others in the pool if those mostly waited."""
    began, worked = time.perf_counter(), time.thread_time()
    results = [function(item) for item in items[:_TIMED]]
    worked = time.thread_time() - worked
    is_waiting = time.perf_counter() - began > 2 * worked
    return [*results, *(pool.map if is_waiting else map)(function, items[_TIMED:])]


def _state(path: str | None, folder: Folder | None) -> str:
    """Return a path with size and stamp of its file, by which a change is noticed; the reason if it cannot be read."""
    if path is None or folder is None:
        return ""
    try:
        with folder.open(path) as file:
            return f"{path}\0{file.size} {file.stamp}"
    except DecodeError as error:
        return f"{path}\0{error.reason}"


def _probe(media: NamedMedia, folder: Folder | None, limits: Limits) -> _Probed:
    if not media.files:
        return _probe_one(media, folder, limits)
    files = [_probe_one(one, folder, limits) for one in media.files]
    size, stamp = sum(one.size for one in files), joined_stamp([one.stamp for one in files])
    error = next((f"file {at} of its list: {one.error}" for at, one in enumerate(files) if one.error is not None), None)
    error = error or limits.size_error(size, is_text=False)
    state = "\0".join(one.state for one in files if one.state)
    return _Probed(size, stamp, error=error, state=state)


def _probe_one(media: NamedMedia, folder: Folder | None, limits: Limits) -> _Probed:
    modality = None if media.kind == OTHER else BUILTINS[KINDS[media.kind]]
    size = stamp = 0
    header = NO_HEADER
    state = ""
    try:
        # Encoded in the record, or a file.
        if media.error is not None:
            raise DecodeError(media.error)
        if media.path is None:
            data = media.decoded(limits)
            size = len(data)
            if modality is not None:
                header = read_header(modality, size, lambda count: data[:count], limits)
        else:
            if folder is None:
                raise DecodeError(no_root(media.path))
            with folder.open(media.path) as file:
                size, stamp = file.size, file.stamp
                state = f"{media.path}\0{file.size} {file.stamp}"
                reason = limits.size_error(size, is_text=False)
                if reason is not None:
                    raise DecodeError(reason)
                if modality is not None:
                    header = read_header(modality, size, file.read, limits)
    except DecodeError as error:
        if not state and media.path is not None and folder is not None:
            state = f"{media.path}\0{error.reason}"
        return _Probed(size, stamp, error=error.reason, state=state)
    return _Probed(size, stamp, (*header, *NO_HEADER[len(header) :]), state=state)


def no_root(path: str) -> str:
    shown = shown_name(path)
    return f"the record names {shown}, but its folder is unknown: pass media_root= (on the command line --media-root)"


class _Scan:
    """Collects the rows of the facts."""

    def __init__(self, reader: RecordReader, limits: Limits) -> None:
        self.table = FactsTable()
        self.lost_bytes = 0
        self.left_out = 0
        self._field = reader.field
        self._limits = limits
        self._encoding = reader.encoding
        self._number = 0
        self._first_row = RowsOfKeys(self.table.key)

    def add(self, read: Sequence[_Read], probed: Sequence[_Probed]) -> None:
        """Add records; `probed` are the media of all of them, in order."""
        left = iter(probed)
        for each in read:
            self._add(each, left)
            self._number += 1

    def _add(self, read: _Read, probed: Iterator[_Probed]) -> None:
        table, number = self.table, self._number
        offset = read.record.offset
        key = str(number) if read.key is None else printable(read.key)
        error = read.error or self._limits.name_error("key", key)
        self.lost_bytes += read.record.lost_bytes
        if read.is_left_out:
            self.left_out += 1
            return

        # A bad record is one row, without its media.
        if error is not None:
            for _ in read.media:
                next(probed)
            key = key if self._limits.name_error("key", key) is None else shortened(key)
            table.append(number, key, self._field, kind=OTHER, error=error)
            return
        if not read.names_itself:
            while key in self._first_row:  # every record is a sample, also if its id comes twice
                key = f"{key}#{number}"

        # The record, then its media.
        first = len(table)
        reason = self._limits.size_error(read.size, is_text=True)
        table.append(
            number, key, self._field, kind=TEXT, offset=offset, size=read.size, encoding=self._encoding, error=reason
        )
        for media in read.media:
            one = next(probed)
            table.append(
                number,
                key,
                media.field,
                kind=media.kind,
                offset=offset << STAMP_BITS | one.stamp,
                size=one.size,
                encoding=NAMED,
                header=one.header,
                error=one.error,
            )
        earlier = self._first_row.setdefault(key, first)
        if earlier != first:
            reason = (
                f"records {table.sample[earlier]} and {number} both have the key {key!r}: give each a different key"
            )
            table.fail_structure(earlier, reason)
            table.fail_structure(first, reason)
