"""Shards of records with media in other files: JSON Lines, JSON arrays, and tables of media folders.

    record --its own bytes--> field "json"
           --media it names--> fields "image.0", ...: files below media_root, or encoded in the record

The offset of a member that a record names is the offset of the record, together with a stamp of the modification time
of its file. Reading such a member parses the record again; if the file has changed since, its sample fails.

Reading ahead the objects that records name: a record must be read before the names in it are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from orchdata.loaders.errors import DecodeError, FieldError, OrchdataError, StaleIndexError
from orchdata.loaders.field_names import VALUE
from orchdata.loaders.limits import Limits
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.shards.fields import NAMED, NO_RULES, FieldRules
from orchdata.loaders.shards.jsonl.media_files import joined_stamp, shown_name
from orchdata.loaders.shards.jsonl.named_media import Folder, NamedMedia, ObjectFolder, folder_of
from orchdata.loaders.shards.jsonl.records import RecordReader
from orchdata.loaders.shards.jsonl.scan import Scanned, media_state, no_root, scan, scan_first
from orchdata.loaders.shards.shard import Beginning, Facts, beginning_of, facts_of, shard_failure
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.remote.stamps import STAMP_BITS
from orchdata.loaders.storage.storage import ReadBytes, Storage
from orchdata.loaders.text.conversation import parse_json

_MOST_BYTES: Final = 1 << (63 - STAMP_BITS)
_STAMP: Final = (1 << STAMP_BITS) - 1


class JsonLinesShard:
    """A file of records. `read` and `read_many` are safe from many threads.

    Args:
        url: as the user gave it.
        file: its bytes.
        limits: applied by `facts` and `read`.
        media_root: folder that names of media are relative to; None: no media file is opened.
        moved_media: whether media were in another folder when they were indexed, so that their versions are not known.
        rules: names of fields, and the function that makes records.
        reads: its `storage` counts the bytes read from other files.
        size, version: of the file as stored, if `file` is its decompressed content.
        is_new: whether that content was decompressed now, so that no one has compared it with an index.
        packed: whether the file is compressed.
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
        size: int | None = None,
        version: str | None = None,
        is_new: bool = False,
        packed: bool = False,
    ) -> None:
        self.url = url
        self.size = file.size if size is None else size
        self.version = file.version if version is None else version
        self.is_new = is_new
        self.packed = packed
        self._file = file
        self._limits = limits
        self._reads = reads
        self._moved_media = moved_media
        self._reader = RecordReader(url, file, limits, folder_of(media_root, files, reads), rules)
        self._taken = TakenRecords()
        self._last_media: dict[int, dict[str, NamedMedia]] = {}  # of the record that `read` used last

    def checksum(self) -> str:
        """Return the checksum of its whole content, without the media."""
        return ContentDigest(self._file).hexdigest()

    def media_state(self) -> str:
        """Return a digest of which named files exist, their sizes and modification times; "" if no file is named."""
        return media_state(self._reader, self._limits)

    @property
    def folder(self) -> Folder | None:
        """The folder of the files that its records name."""
        return self._reader.folder

    def names_same(self, members: Sequence[tuple[int, int, int, str]]) -> bool:
        """Return whether the files that a sample names still have the sizes and modification times of its members."""
        media: dict[int, dict[str, NamedMedia]] = {}
        try:
            for offset, size, encoding, field in members:
                if encoding != NAMED:
                    continue
                self._taken.take(offset >> STAMP_BITS)
                named, stamp = self._named_at(offset, field, media)
                if named is None or not self._is_same(named, size, stamp):
                    return False
        except (DecodeError, FieldError, StaleIndexError):
            return False
        return True

    def _is_same(self, media: NamedMedia, size: int, stamp: int) -> bool:
        folder = self._reader.folder
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
            scanned = Scanned(shard_failure(reason), self.size, "")
        else:
            scanned = scan(self._reader, self._limits)
        checksum = self.checksum()
        self._file.check_unchanged()
        table, lost, media, left_out = scanned
        ignored = table.ignored() | ({LEFT_OUT: left_out} if left_out else {})
        more: dict[str, Any] = {"ignored": ignored, "lost_bytes": lost, "media": media, "met": self._reader.met.counts}
        return facts_of(self, table, checksum, **more)

    def begin(self, most: int) -> Beginning:
        """Read the first records, and the headers of the media that they name. Bad data become rows with an error."""
        table, end = scan_first(self._reader, self._limits, most)
        self._file.check_unchanged()
        met = self._reader.met.counts
        return beginning_of(self, table, most, is_whole=end is None, reach=end or self._file.size, met=met)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """Read one member. Raises FieldError. Consecutive reads of files of one record parse the record once."""
        if encoding != NAMED:
            return self._read(offset, size, encoding, field, {})
        media = self._last_media
        if offset >> STAMP_BITS in media:
            self._file.check_unchanged()
        else:
            media = {}
        data = self._read(offset, size, encoding, field, media)
        self._last_media = media
        return data

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Read the members of one sample; its record is read once, and parsed once for its media. Raises FieldError."""
        media: dict[int, dict[str, NamedMedia]] = {}
        records: dict[int, bytes] = {}
        names_media = any(encoding == NAMED for _, _, encoding, _ in members)
        contents: list[bytes | memoryview] = []
        for offset, size, encoding, field in members:  # the record comes first
            data = self._read(offset, size, encoding, field, media, records)
            if names_media and encoding != NAMED and offset not in media:
                media[offset] = self._media(data, field)
            contents.append(data)
        return contents

    def is_text(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def is_json(self, field: str, encoding: int) -> bool:
        """Members are bytes."""
        return False

    def value(self, offset: int, size: int) -> Any:
        """Return the value of the record at this position, with the new names of its fields, before a function of the
        user's. Raises DecodeError.
        """
        data = self._file.read(offset, size)
        value = self._reader.value(data)
        self._file.check_unchanged()
        return value

    def expect(self, members: Sequence[tuple[int, int, int, str]]) -> object:
        ahead = self._file.expect([(offset, size) for offset, size, encoding, _ in members if encoding != NAMED])
        folder = self._reader.folder
        if not isinstance(folder, ObjectFolder) or all(encoding != NAMED for _, _, encoding, _ in members):
            return ahead
        return ahead, NamedAhead(folder, members, self._media_at, self._taken, moved=self._moved_media)

    def close(self) -> None:
        self._file.close()

    def _read(
        self,
        offset: int,
        size: int,
        encoding: int,
        field: str,
        media: dict[int, dict[str, NamedMedia]],
        records: dict[int, bytes] | None = None,
    ) -> bytes:
        """Read one member. `media` and `records` cache the media and the bytes of records."""
        if size > self._limits.member_bytes:
            raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
        try:
            if encoding == NAMED:
                self._taken.take(offset >> STAMP_BITS)
                named, stamp = self._named_at(offset, field, media)
                return self._content(named, size, stamp)
            known = {} if records is None else records
            data = known.get(offset) or self._file.read(offset, size)
            if len(data) < size:
                raise DecodeError(f"cut: {len(data)} of {size} bytes are in the file")
            known[offset] = data
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

    def _media_at(self, offset: int, size: int, field: str) -> dict[str, NamedMedia]:
        """Return the media that the record at an offset names, by field. Its size may be 0 if it is not known."""
        if not size:
            return self._media(self._reader.at(offset), field)
        return self._media(self._reader.as_json(self._file.read(offset, size)), field)

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


Member = tuple[int, int, int, str]
"""Offset, size, encoding, field."""
MediaOf = Callable[[int, int, str], Mapping[str, NamedMedia]]
"""(offset of a record, its size or 0, field for errors) -> the media that it names, by field."""


class TakenRecords:
    """The records whose objects are being read, by a sample or ahead: each object is asked for once."""

    def __init__(self) -> None:
        self._offsets: set[int] = set()
        self._lock = threading.Lock()

    def take(self, offset: int) -> None:
        """A sample reads the objects of a record now."""
        with self._lock:
            self._offsets.add(offset)

    def begin(self, offsets: Iterable[int]) -> None:
        """Samples with these records are about to be read."""
        with self._lock:
            self._offsets.difference_update(offsets)

    def take_ahead(self, offset: int, read: Callable[[], None]) -> None:
        """Call `read` unless a sample already reads the objects of the record."""
        with self._lock:
            if offset not in self._offsets:
                self._offsets.add(offset)
                read()


class NamedAhead:
    """Begins to read the objects that records name, in a thread; they are dropped with this object.

    Args:
        members: of samples; the records among them are being read.
        media_of: reads a record.
        taken: records whose objects are being read.
        moved: whether objects were in another place when they were indexed, so that their stamps are not known.
    """

    def __init__(
        self,
        folder: ObjectFolder,
        members: Sequence[Member],
        media_of: MediaOf,
        taken: TakenRecords,
        *,
        moved: bool = False,
    ) -> None:
        self._ahead: list[object] = []
        taken.begin(offset >> STAMP_BITS for offset, _, encoding, _ in members if encoding == NAMED)
        begin = partial(_begin, folder, list(members), media_of, taken, self._ahead, moved=moved)
        threading.Thread(target=begin, name="orchdata-named", daemon=True).start()


def _begin(
    folder: ObjectFolder,
    members: Sequence[Member],
    media_of: MediaOf,
    taken: TakenRecords,
    ahead: list[object],
    *,
    moved: bool,
) -> None:
    """Read each record, and begin to read what it names. What fails here is raised when the sample is read."""
    sizes = {offset: size for offset, size, encoding, _ in members if encoding != NAMED}
    of_record: dict[int, list[Member]] = {}
    for member in members:
        if member[2] == NAMED:
            of_record.setdefault(member[0] >> STAMP_BITS, []).append(member)
    for record, named in of_record.items():
        try:
            media = media_of(record, sizes.get(record, 0), named[0][3])
        except (OrchdataError, FieldError, DecodeError, ValueError):  # or the shard is closed: nothing waits for it
            continue
        wanted = [
            (one.path, size, None if moved else offset & _STAMP)
            for offset, size, _, field in named
            if (one := media.get(field)) is not None and one.path is not None
        ]
        taken.take_ahead(record, partial(_expect, folder, wanted, ahead))


def _expect(folder: ObjectFolder, wanted: Sequence[tuple[str, int, int | None]], ahead: list[object]) -> None:
    ahead.append(folder.expect(wanted))
