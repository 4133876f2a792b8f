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

from orchdata.loaders.errors import DecodeError, FieldError, OrchdataError, StaleIndexError
from orchdata.loaders.field_names import VALUE
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.records import LEFT_OUT, LeftOut
from orchdata.loaders.shards.fields import NAMED, NO_RULES, FieldRules, printable
from orchdata.loaders.shards.named_media import (
    Folder,
    NamedMedia,
    ObjectFolder,
    folder_of,
    joined_stamp,
    shown_name,
)
from orchdata.loaders.shards.records import Record, Records, open_records
from orchdata.loaders.shards.shard import (
    NO_HEADER,
    Beginning,
    Facts,
    Member,
    Rows,
    Shard,
    beginning_of,
    facts_of,
    header_of,
    shard_failure,
)
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.storage import STAMP_BITS, Extent, ReadBytes, Storage
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

    Attributes:
        folder: of the files that its records name; None if it is not known.
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
        super().__init__(url, file, limits)
        self.folder = folder_of(media_root, files, reads)
        self._reads = reads
        self._moved_media = moved_media
        self._records = open_records(url, file, limits, rules)
        self._taken: set[int] = set()  # offsets of records whose objects are being read, by a sample or ahead
        self._lock = threading.Lock()
        self._last_media: dict[int, dict[str, NamedMedia]] = {}  # of the record that `read` used last

    def media_state(self) -> str:
        """Return a digest of which named files exist, their sizes and modification times; "" if no file is named. It is
        that of the facts, without reading any of them.
        """
        scan = _Scan(self._records, self.folder, self._limits)
        for _ in scan.probed(self._records.all(), is_look=True):
            pass
        return scan.media_state()

    def names_same(self, members: Sequence[Member]) -> bool:
        """Return whether the files that a sample names still have the sizes and modification times of its members."""
        media: dict[int, dict[str, NamedMedia]] = {}
        scan = _Scan(self._records, self.folder, self._limits)
        for offset, size, encoding, field in members:
            if encoding != NAMED:
                continue
            try:
                named = self._named_at(offset, field, media)
            except (DecodeError, FieldError, StaleIndexError):
                return False
            if named is None:
                return False
            if self.folder is None or any(one.path is None for one in named.parts()):
                continue  # media inside the record: the checks of the record cover them
            now = scan.probe(named, is_look=True)
            if now.error is not None or (now.size, now.stamp) != (size, offset & _STAMP):
                return False
        return True

    def facts(self) -> Facts:
        """Read all records, and the headers of the media that they name. Bad data become rows with an error."""
        scan = _Scan(self._records, self.folder, self._limits)
        if self._file.size < _MOST_BYTES:
            scan.run()
        else:
            reason = f"{self._file.size} bytes, but a file of records must be smaller than {_MOST_BYTES}: split it"
            scan.fail(reason, self.size)
        checksum = self.checksum()
        self._file.check_unchanged()
        ignored = scan.table.ignored() | ({LEFT_OUT: scan.left_out} if scan.left_out else {})
        more = {"lost_bytes": scan.lost_bytes, "media": scan.media_state(), "met": self._records.met.counts}
        return facts_of(self, scan.table, checksum, ignored=ignored, **more)

    def begin(self, most: int) -> Beginning:
        """Read the first records, and the headers of the media that they name. Bad data become rows with an error."""
        scan, met = _Scan(self._records, self.folder, self._limits), self._records.met.counts
        scan.run(most)
        self._file.check_unchanged()
        reach = scan.end or self._file.size
        return beginning_of(self, scan.table, most, is_whole=scan.end is None, reach=reach, met=met)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes | memoryview:
        """Read one member. Raises FieldError. Consecutive reads of files of one record parse the record once."""
        media = self._last_media
        if encoding != NAMED or offset >> STAMP_BITS not in media:
            media = {}
        (data,) = self._read([(offset, size, encoding, field)], media)
        self._last_media = media if encoding == NAMED else self._last_media
        return data

    def read_many(self, members: Sequence[Member]) -> list[bytes | memoryview]:
        """Read the members of one sample; its record is read once, and parsed once for its media. Raises FieldError."""
        return self._read(members, {})

    def value(self, offset: int, size: int) -> Any:
        """Return the value of the record at this position, with the new names of its fields, before a function of the
        user's. Raises DecodeError.
        """
        value = self._records.value(self._file.read(offset, size))
        self._file.check_unchanged()
        return value

    def ranges(self, members: Sequence[Member]) -> list[Extent]:
        return [(at, size) for at, size, encoding, _ in members if encoding != NAMED]

    def expect(self, members: Sequence[Member]) -> object:
        ahead: list[object] = [super().expect(members)]
        named = [at >> STAMP_BITS for at, _, encoding, _ in members if encoding == NAMED]
        if isinstance(self.folder, ObjectFolder) and named:
            with self._lock:
                self._taken.difference_update(named)
            # A record must be read before the names in it are known.
            given = self.folder, list(members), ahead
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
            size = sizes.get(record, 0)
            try:
                data = self._records.as_json(self._file.read(record, size)) if size else self._records.at(record)
                media = self._media(data, named[0][0])
            except (OrchdataError, FieldError, DecodeError, ValueError):  # or the shard is closed: nothing waits for it
                continue
            paths = ((media[each].path, size, stamp) for each, size, stamp in named if each in media)
            wanted = [(path, size, stamp) for path, size, stamp in paths if path is not None]
            with self._lock:
                if record not in self._taken:
                    self._taken.add(record)
                    ahead.append(folder.expect(wanted))

    def _read(self, members: Sequence[Member], media: dict[int, dict[str, NamedMedia]]) -> list[bytes | memoryview]:
        """Read members of one sample, the record first. `media` has the media of records that were parsed."""
        records: dict[int, bytes] = {}
        names_media = len(members) > 1 and any(encoding == NAMED for _, _, encoding, _ in members)
        contents: list[bytes | memoryview] = []
        for offset, size, encoding, field in members:
            if size > self._limits.member_bytes:
                raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
            try:
                if encoding == NAMED:
                    with self._lock:
                        self._taken.add(offset >> STAMP_BITS)
                    contents.append(self._content(self._named_at(offset, field, media), size, offset & _STAMP))
                    continue
                data = records[offset] = records.get(offset) or self._file.read(offset, size)
                if len(data) < size:
                    raise DecodeError(f"cut: {len(data)} of {size} bytes are in the file")
                data = self._records.as_json(data, is_made=not field.endswith(VALUE))  # may read a table's header line
                self._file.check_unchanged()
            except DecodeError as error:
                self._file.check_unchanged()  # a change of the file can look like damage
                raise error.at(field) from error.__cause__
            if names_media and offset not in media:
                media[offset] = self._media(data, field)
            contents.append(data)
        return contents

    def _named_at(self, offset: int, field: str, media: dict[int, dict[str, NamedMedia]]) -> NamedMedia | None:
        """Return the media entry of a member in its record. `media` caches the media of records."""
        record = offset >> STAMP_BITS
        data = b"" if record in media else self._records.at(record)
        self._file.check_unchanged()
        if record not in media:
            media[record] = self._media(data, field)
        return media[record].get(field)

    def _media(self, data: bytes, field: str) -> dict[str, NamedMedia]:
        """Return the media that a record names, by field."""
        try:
            return {one.field: one for one in self._records.media(parse_json(data))}
        except DecodeError as error:
            raise error.at(field) from error.__cause__

    def _content(self, media: NamedMedia | None, size: int, stamp: int) -> bytes:
        """Read the content of a member. Raises DecodeError if it changed since it was indexed."""
        if media is None or media.error is not None:
            raise DecodeError("its record no longer names this file: run `orchdata index` again")
        if isinstance(self.folder, ObjectFolder) and media.path is not None:
            return self.folder.indexed(media.path, size, None if self._moved_media else stamp)
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
        elif self.folder is None:
            raise DecodeError(no_root(media.path))
        else:
            with self.folder.open(media.path) as file:
                data, stamp = file.read(min(file.size, most + 1)), file.stamp
            if self._reads is not None and not isinstance(self.folder, ObjectFolder):  # which counts itself
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


class _Read(NamedTuple):
    """A parsed record."""

    record: Record
    key: str | None = None
    names_itself: bool = False
    media: Sequence[NamedMedia] = ()
    error: str | None = None
    is_left_out: bool = False


class _Probed(NamedTuple):
    """The result of probing one image or clip; `state` of its files says when they change."""

    size: int = 0
    stamp: int = 0
    header: Header = NO_HEADER
    error: str | None = None
    state: str = ""


class _Scan(Rows):
    """One pass over a file of records: its facts.

    Attributes:
        lost_bytes: that could not be read.
        left_out: how many records the user's function leaves out.
        end: the offset of the record after the first ones; None: there is none.
    """

    def __init__(self, records: Records, folder: Folder | None, limits: Limits) -> None:
        super().__init__(limits)
        self.lost_bytes = self.left_out = 0
        self.end: int | None = None
        self._records = records
        self._folder = folder
        self._states: hashlib.blake2b | None = None

    def fail(self, reason: str, lost_bytes: int) -> None:
        """The file as a whole is none that can be used."""
        self.table, self.lost_bytes, self.left_out, self._states = shard_failure(reason), lost_bytes, 0, None

    def media_state(self) -> str:
        """Return a digest over the named files in order: whether each exists, its size and its modification time; "" if
        none is named.
        """
        return "" if self._states is None else self._states.hexdigest()

    def run(self, most: int | None = None) -> None:
        """Scan the file, or its first `most` records. Bad records and media become rows with an error."""

        def records() -> Iterator[Record]:
            for number, record in enumerate(self._records.all()):
                if number == most:
                    self.end = record.offset
                    return
                yield record

        number = 0
        for read, probed in self.probed(records()):
            left = iter(probed)
            for each in read:
                self._add(number, each, [next(left) for _ in each.media])
                number += 1
            if len(self.table) > self.limits.shard_rows:
                if most is not None:
                    break  # the whole file has more
                self.fail(f"more than {self.limits.shard_rows} fields, above Limits.shard_rows", 1)
                return
        if not len(self.table) and not self.left_out and self.end is None:
            self.fail("no samples: the file has no records", 0)

    def probed(
        self, all_records: Iterator[Record], *, is_look: bool = False
    ) -> Iterator[tuple[list[_Read], list[_Probed]]]:
        """Yield some records at a time, with all media that they name. A look finds the states of the files alone."""
        current, number = here(), 0
        shard = current.shard

        def probe(one: tuple[str, NamedMedia]) -> _Probed:
            mine = here()  # of the thread that probes
            mine.shard, mine.key = shard, one[0]
            try:
                return self.probe(one[1], is_look=is_look)
            except MemoryError as error:
                raise measured_at(error, self._records.url, one[0], one[1].field) from error
            finally:
                mine.key = None

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="orchdata-media") as pool:
            while records := list(islice(all_records, _CHUNK)):
                read = []
                current.fraction = SCANNING * records[0].offset / max(1, self._records.size)
                for record in records:
                    current.key = f"record {number}"
                    read.append(self._read(record, number, is_look))
                    number += 1
                current.key = None
                first = number - len(read)
                media = [
                    (each.key or f"record {first + at}", one) for at, each in enumerate(read) for one in each.media
                ]
                if self._folder is not None:
                    paths = [each.path for _, one in media for each in one.parts()]
                    self._folder.prepare([path for path in paths if path is not None])
                probed = mapped(pool, probe, media)
                for each in probed:
                    if each.state:
                        self._states = self._states or hashlib.blake2b(digest_size=16)
                        self._states.update(f"{each.state}\0".encode("utf-8", "backslashreplace"))
                yield read, probed

    def _read(self, record: Record, number: int, is_look: bool) -> _Read:
        """Read one record; its number serves to check the user's function with the first ones."""
        if record.error is not None:
            return _Read(record, error=record.error)
        key, records = None, self._records
        try:
            value = records.value(record.data, counts=not is_look)
            key = records.key(value)
            names_itself = isinstance(value, dict) and "__key__" in value
            if not is_look:
                records.check_function(record.data, number)
            media = records.media(records.made(value))
        except LeftOut:
            return _Read(record, key, is_left_out=True)
        except DecodeError as error:
            return _Read(record, key, error=error.reason)
        count = sum(len(one.parts()) for one in media)
        if count > self.limits.sample_parts:
            reason = f"it names {count} files, above Limits.sample_parts={self.limits.sample_parts}"
            return _Read(record, key, error=reason)
        return _Read(record, key, names_itself, media)

    def probe(self, media: NamedMedia, *, is_look: bool) -> _Probed:
        """Look at one image or clip, and read its header unless `is_look`."""
        if not media.files:
            return self._probe_one(media, is_look)
        files = [self._probe_one(one, is_look) for one in media.files]
        size, stamp = sum(one.size for one in files), joined_stamp([one.stamp for one in files])
        bad = (f"file {at} of its list: {one.error}" for at, one in enumerate(files) if one.error is not None)
        error = next(bad, None) or self.limits.size_error(size, is_text=False)
        return _Probed(size, stamp, error=error, state="\0".join(one.state for one in files if one.state))

    def _probe_one(self, media: NamedMedia, is_look: bool) -> _Probed:
        size, stamp, header, state = 0, 0, NO_HEADER, ""
        has_header = media.kind != OTHER and not is_look
        try:
            if media.error is not None:
                raise DecodeError(media.error)
            if media.path is None:  # encoded in the record
                data = b"" if is_look else media.decoded(self.limits)
                size = len(data)
                header = header_of(media.kind, size, lambda count: data[:count], self.limits) if has_header else header
            elif self._folder is None:
                raise DecodeError(no_root(media.path))
            else:
                with self._folder.open(media.path) as file:
                    size, stamp = file.size, file.stamp
                    state = f"{media.path}\0{file.size} {file.stamp}"
                    reason = self.limits.size_error(size, is_text=False)
                    if reason is not None:
                        raise DecodeError(reason)
                    header = header_of(media.kind, size, file.read, self.limits) if has_header else header
        except DecodeError as error:
            if not state and media.path is not None and self._folder is not None:
                state = f"{media.path}\0{error.reason}"
            return _Probed(size, stamp, error=error.reason, state=state)
        return _Probed(size, stamp, header, state=state)

    def _add(self, number: int, read: _Read, probed: Sequence[_Probed]) -> None:
        """Add the rows of a record."""
        table, offset, field = self.table, read.record.offset, self._records.field
        self.lost_bytes += read.record.lost_bytes
        if read.is_left_out:
            self.left_out += 1
            return

        # A bad record is one row, without its media.
        key = str(number) if read.key is None else printable(read.key)
        too_long = self.limits.name_error("key", key)
        if (error := read.error or too_long) is not None:
            table.append(number, key if too_long is None else shortened(key), field, error=error)
            return
        key = key if read.names_itself else self.distinct(key, number)  # each is a sample, also if its id comes twice

        # The record, then its media.
        first, size = len(table), len(read.record.data)
        reason = self.limits.size_error(size, is_text=True)
        encoding = self._records.encoding
        table.append(number, key, field, kind=TEXT, offset=offset, size=size, encoding=encoding, error=reason)
        for media, one in zip(read.media, probed, strict=True):
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
        self.end_sample(key, first, "records {} and {} both have the key {!r}: give each a different key")


def mapped(pool: Executor, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call a function for each item: the first few here; the others in the pool if those mostly waited."""
    began, worked = time.perf_counter(), time.thread_time()
    results = [function(item) for item in items[:_TIMED]]
    worked = time.thread_time() - worked
    is_waiting = time.perf_counter() - began > 2 * worked
    return [*results, *(pool.map if is_waiting else map)(function, items[_TIMED:])]


def no_root(path: str) -> str:
    shown = shown_name(path)
    return f"the record names {shown}, but its folder is unknown: pass media_root= (on the command line --media-root)"
