"""Shards of records with media in other files: JSON Lines, JSON arrays, and tables of media folders.

    record --its own bytes--> field "json"
           --media it names--> fields "image.0", ...: files below media_root, or encoded in the record

The offset of a member that a record names is the offset of the record, together with a stamp of the modification time
of its file. Reading such a member parses the record again; if the file has changed since, its sample fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from orchdata.loaders.errors import DecodeError, FieldError, OrchdataError, StaleIndexError
from orchdata.loaders.field_names import VALUE
from orchdata.loaders.limits import Limits
from orchdata.loaders.records import LEFT_OUT
from orchdata.loaders.shards.fields import NAMED, NO_RULES, FieldRules
from orchdata.loaders.shards.jsonl.media_files import joined_stamp, shown_name
from orchdata.loaders.shards.jsonl.named_media import Folder, NamedMedia, ObjectFolder, folder_of
from orchdata.loaders.shards.jsonl.records import RecordReader
from orchdata.loaders.shards.jsonl.scan import Scanned, media_state, no_root, scan
from orchdata.loaders.shards.shard import Beginning, Facts, Member, Shard, beginning_of, facts_of, shard_failure
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.storage import STAMP_BITS, ReadBytes, Storage
from orchdata.loaders.text.conversation import parse_json

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
