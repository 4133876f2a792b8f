"""Shards of records with media in other files: JSON Lines, JSON arrays, and tables of media folders.

    record --its own bytes--> field "json"
           --media it names--> fields "image.0", ...: files below media_root, or encoded in the record

The offset of a member that a record names is the offset of the record, together with a stamp of the modification time
of its file. Reading such a member parses the record again; if the file has changed since, its sample fails.

One pass makes the facts. Records are read some hundreds at a time. Their media are probed in threads if files are slow;
for files in the page cache, threads would only wait for each other.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from orchdata.loaders.compact import RowsOfKeys
from orchdata.loaders.errors import DecodeError, FieldError, OrchdataError, StaleIndexError
from orchdata.loaders.field_names import VALUE
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header, read_header
from orchdata.loaders.records import LEFT_OUT, LeftOut
from orchdata.loaders.shards.fields import NAMED, NO_RULES, FieldRules, printable
from orchdata.loaders.shards.jsonl.media_files import joined_stamp, shown_name
from orchdata.loaders.shards.jsonl.named_media import Folder, NamedMedia, ObjectFolder, folder_of
from orchdata.loaders.shards.jsonl.records import Record, RecordReader
from orchdata.loaders.shards.shard import (
    NO_HEADER,
    Beginning,
    Facts,
    FactsTable,
    Member,
    Shard,
    beginning_of,
    facts_of,
    shard_failure,
)
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.storage import STAMP_BITS, ReadBytes, Storage
from orchdata.loaders.text.conversation import parse_json
from orchdata.loaders.watch import SCANNING, here

_MOST_BYTES: Final = 1 << (63 - STAMP_BITS)
_STAMP: Final = (1 << STAMP_BITS) - 1


class JsonLinesShard(Shard):
    """A file of records. `read` and `read_many` are safe from many threads.

    Args:
        media_root: folder that names of media are relative to; None: no media file is opened.
        moved_media: whether media were in another folder when they were indexed, so that their versions are not known.
        reads: its `storage` counts the bytes read from other files.
    """

    def __init__(
        self,
        url: str,
        file: Storage,
        *,
        limits: Limits,
        media_root: str | None,
        moved_media: bool = False,
        rules: FieldRules = NO_RULES,
        reads: ReadBytes | None = None,
        files: Files = PLAIN_FILES,
    ) -> None:
        self.url, self.size, self.version = url, file.size, file.version
        self._file = file
        self._limits = limits
        self._reads = reads
        self._moved_media = moved_media
        self._reader = RecordReader(url, file, limits, folder_of(media_root, files, reads), rules)
        self._taken: set[int] = set()  # offsets of records whose objects are being read, by a sample or ahead
        self._lock = threading.Lock()
        self._last_media: dict[int, dict[str, NamedMedia]] = {}  # of the record that `read` used last

    def checksum(self) -> str:
        """Return the checksum of its whole content, without the media."""
        return ContentDigest(self._file).hexdigest()

    def media_state(self) -> str:
        """Return a digest of which named files exist, their sizes and modification times; "" if no file is named. It is
        that of the facts, without reading any of them.
        """
        reader, states = self._reader, MediaStates()
        media = (one for record in reader.all() for one in _Read.of(record, reader, self._limits).media)
        named = (file.path for one in media for file in one.parts())
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="orchdata-media") as pool:
            for some in _batches(named, _CHUNK):
                _prepare(reader.folder, some)
                states.add(mapped(pool, lambda path: _state(path, reader.folder), some))
        return states.digest()

    @property
    def folder(self) -> Folder | None:
        """The folder of the files that its records name."""
        return self._reader.folder

    def names_same(self, members: Sequence[Member]) -> bool:
        """Return whether the files that a sample names still have the sizes and modification times of its members."""
        media: dict[int, dict[str, NamedMedia]] = {}
        try:
            return all(
                self._is_same(*self._named_at(offset, field, media), size)
                for offset, size, encoding, field in members
                if encoding == NAMED
            )
        except (DecodeError, FieldError, StaleIndexError):
            return False

    def _is_same(self, media: NamedMedia | None, stamp: int, size: int) -> bool:
        folder = self._reader.folder
        if media is None:
            return False
        if folder is None or any(one.path is None for one in media.parts()):
            return True  # media inside the record: the checks of the record cover them
        now: list[tuple[int, int]] = []
        for one in media.parts():
            with folder.open(str(one.path)) as file:
                now.append((file.size, file.stamp))
        return sum(each for each, _ in now) == size and joined_stamp([each for _, each in now]) == stamp

    def facts(self) -> Facts:
        """Read all records, and the headers of the media that they name. Bad data become rows with an error."""
        if self._file.size >= _MOST_BYTES:
            reason = f"{self._file.size} bytes, but a file of records must be smaller than {_MOST_BYTES}: split it"
            scanned = Scanned(shard_failure(reason), self.size)
        else:
            scanned = scan(self._reader, self._limits)
        checksum = self.checksum()
        self._file.check_unchanged()
        ignored = scanned.table.ignored() | ({LEFT_OUT: scanned.left_out} if scanned.left_out else {})
        more = {"lost_bytes": scanned.lost_bytes, "media": scanned.media, "met": self._reader.met.counts}
        return facts_of(self, scanned.table, checksum, ignored=ignored, **more)

    def begin(self, most: int) -> Beginning:
        """Read the first records, and the headers of the media that they name. Bad data become rows with an error."""
        scanned, met = scan(self._reader, self._limits, most), self._reader.met.counts
        self._file.check_unchanged()
        reach = scanned.end or self._file.size
        return beginning_of(self, scanned.table, most, is_whole=scanned.end is None, reach=reach, met=met)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read one member. Raises FieldError. Consecutive reads of files of one record parse the record once."""
        if encoding != NAMED:
            return self._read((offset, size, encoding, field), {}, {})
        media = self._last_media
        if offset >> STAMP_BITS in media:
            self._file.check_unchanged()
        else:
            media = {}
        data = self._read((offset, size, encoding, field), media, {})
        self._last_media = media
        return data

    def read_many(self, members: Sequence[Member]) -> list[bytes | memoryview]:
        """Read the members of one sample; its record is read once, and parsed once for its media. Raises FieldError."""
        media: dict[int, dict[str, NamedMedia]] = {}
        records: dict[int, bytes] = {}
        names_media = any(encoding == NAMED for _, _, encoding, _ in members)
        contents: list[bytes | memoryview] = []
        for member in members:  # the record comes first
            offset, _, encoding, field = member
            data = self._read(member, media, records)
            if names_media and encoding != NAMED and offset not in media:
                media[offset] = self._media(data, field)
            contents.append(data)
        return contents

    def value(self, offset: int, size: int) -> Any:
        """Return the value of the record at this position, with the new names of its fields, before a function of the
        user's. Raises DecodeError.
        """
        data = self._file.read(offset, size)
        value = self._reader.value(data)
        self._file.check_unchanged()
        return value

    def expect(self, members: Sequence[Member]) -> object:
        ahead: list[object] = [
            self._file.expect([(at, size) for at, size, encoding, _ in members if encoding != NAMED])
        ]
        folder, named = self._reader.folder, [at >> STAMP_BITS for at, _, encoding, _ in members if encoding == NAMED]
        if isinstance(folder, ObjectFolder) and named:
            with self._lock:
                self._taken.difference_update(named)
            # A record must be read before the names in it are known.
            given = folder, list(members), ahead
            threading.Thread(target=self._expect_named, args=given, name="orchdata-named", daemon=True).start()
        return ahead

    def _expect_named(self, folder: ObjectFolder, members: Sequence[Member], ahead: list[object]) -> None:
        """Begin to read the objects that records name. What fails here is raised when the sample is read."""
        sizes = {offset: size for offset, size, encoding, _ in members if encoding != NAMED}
        of_record: dict[int, list[tuple[str, int, int | None]]] = {}
        for offset, size, encoding, field in members:
            if encoding == NAMED:
                stamp = None if self._moved_media else offset & _STAMP
                of_record.setdefault(offset >> STAMP_BITS, []).append((field, size, stamp))
        for record, named in of_record.items():
            field, size = named[0][0], sizes.get(record, 0)
            try:
                data = self._reader.as_json(self._file.read(record, size)) if size else self._reader.at(record)
                media = self._media(data, field)
            except (OrchdataError, FieldError, DecodeError, ValueError):  # or the shard is closed: nothing waits for it
                continue
            paths = ((media[each].path, size, stamp) for each, size, stamp in named if each in media)
            wanted = [(path, size, stamp) for path, size, stamp in paths if path is not None]
            with self._lock:
                if record not in self._taken:
                    self._taken.add(record)
                    ahead.append(folder.expect(wanted))

    def close(self) -> None:
        self._file.close()

    def _read(self, member: Member, media: dict[int, dict[str, NamedMedia]], records: dict[int, bytes]) -> bytes:
        """Read one member. `media` and `records` cache the media and the bytes of records."""
        offset, size, encoding, field = member
        if size > self._limits.member_bytes:
            raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
        try:
            if encoding == NAMED:
                with self._lock:
                    self._taken.add(offset >> STAMP_BITS)
                named, stamp = self._named_at(offset, field, media)
                return self._content(named, size, stamp)
            data = records.get(offset) or self._file.read(offset, size)
            if len(data) < size:
                raise DecodeError(f"cut: {len(data)} of {size} bytes are in the file")
            records[offset] = data
            data = self._reader.as_json(data, is_made=not field.endswith(VALUE))  # may read the header line of a table
            self._file.check_unchanged()
            return data
        except DecodeError as error:
            self._file.check_unchanged()  # a change of the file can look like damage
            raise error.at(field) from error.__cause__

    def _named_at(
        self, offset: int, field: str, media: dict[int, dict[str, NamedMedia]]
    ) -> tuple[NamedMedia | None, int]:
        """Return the media entry of a member in its record, and its stamp. `media` caches the media of records."""
        record_offset = offset >> STAMP_BITS
        if record_offset not in media:
            data = self._reader.at(record_offset)
            self._file.check_unchanged()
            media[record_offset] = self._media(data, field)
        return media[record_offset].get(field), offset & _STAMP

    def _media(self, data: bytes, field: str) -> dict[str, NamedMedia]:
        """Return the media that a record names, by field."""
        try:
            return {one.field: one for one in self._reader.media(parse_json(data))}
        except DecodeError as error:
            raise error.at(field) from error.__cause__

    def _content(self, media: NamedMedia | None, size: int, stamp: int) -> bytes:
        """Read the content of a member. Raises DecodeError if it changed since it was indexed."""
        if media is None or media.error is not None:
            raise DecodeError("its record no longer names this file: run `orchdata index` again")
        folder = self._reader.folder
        if isinstance(folder, ObjectFolder) and media.path is not None:
            return folder.indexed(media.path, size, None if self._moved_media else stamp)
        name = "its list of files" if media.files else shown_name(media.path or media.field)
        contents, stamps, left = [], [], size
        for one in media.parts():
            data, stamped = self._named(one, left, name)
            contents.append(data)
            stamps.append(stamped)
            left -= len(data)
        if left:
            raise _changed(name, size - left, size)
        if not self._moved_media and joined_stamp(stamps) != stamp:
            raise DecodeError(
                f"{name} was changed since it was indexed: it has the same size, but another modification time. Run "
                "`orchdata index` again. `cp -r` changes the time of a copy; `cp -a` and `rsync -a` keep it"
            )
        return media.joined(contents) if media.files else contents[0]

    def _named(self, media: NamedMedia, most: int, name: str) -> tuple[bytes, int]:
        """Return the content of a file or encoded part, and its stamp. Raises DecodeError above `most` bytes."""
        if media.path is None:
            data, stamp = media.decoded(self._limits), 0
        elif self._reader.folder is None:
            raise DecodeError(no_root(media.path))
        else:
            with self._reader.folder.open(media.path) as file:
                data, stamp = file.read(min(file.size, most + 1)), file.stamp
            if self._reads is not None and not self._reader.folder.is_counted:
                self._reads.storage.add(len(data))
        if len(data) > most:
            raise _changed(name, f"above {most}", most)
        return data, stamp


def _changed(name: str, now: int | str, then: int) -> DecodeError:
    return DecodeError(
        f"{name} was changed since it was indexed ({now} bytes now, {then} then): run `orchdata index` again"
    )


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
