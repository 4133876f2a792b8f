"""Shards of records whose media lie in other files: JSON Lines, arrays of JSON, and tables of folders of media.

    record --its own bytes--> field "json"
           --media it names--> fields "image.0", ...: files below media_root, or encoded in the record

A member that a record names has the record's place for its offset, with a stamp of its file's time of change: to read
it the record is looked at again, and a file that is not what was indexed is an error of its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orchdata.loaders.errors import DecodeError, FieldError, StaleIndexError
from orchdata.loaders.limits import Limits, limits_fingerprint
from orchdata.loaders.shards.facts_table import Facts, FactsMeta, shard_failure
from orchdata.loaders.shards.fields import NAMED, TABLE_ROW
from orchdata.loaders.shards.jsonl.media_files import STAMP_BITS, MediaFolder, joined_stamp, shown_name
from orchdata.loaders.shards.jsonl.named_media import NamedMedia
from orchdata.loaders.shards.jsonl.reading import RecordReader
from orchdata.loaders.shards.jsonl.scan import Scanned, media_state, no_root, scan
from orchdata.loaders.storage.content_digest import ContentDigest
from orchdata.loaders.storage.counted import ReadBytes
from orchdata.loaders.storage.storage import Storage

_MOST_BYTES: Final = 1 << (63 - STAMP_BITS)
_STAMP: Final = (1 << STAMP_BITS) - 1


class JsonLinesShard:
    """A file of records. `read` and `read_many` are safe from many threads.

    Args:
        url: as the user gave it.
        file: its bytes.
        limits: held by `facts` and `read`.
        media_root: folder that names of media are relative to; None: none is opened.
        reads: what is read of other files is added to its `storage`.
    """

    def __init__(
        self, url: str, file: Storage, *, limits: Limits, media_root: str | None, reads: ReadBytes | None = None
    ) -> None:
        self.url = url
        self.size = file.size
        self.version = file.version
        self._file = file
        self._limits = limits
        self._reads = reads
        self._reader = RecordReader(url, file, limits, media_root)
        self._known: dict[int, dict[str, NamedMedia]] = {}  # of the record that `read` last looked at

    def checksum(self) -> str:
        """Of its whole content, without the media."""
        return ContentDigest(self._file).hexdigest()

    def media_state(self) -> str:
        """Of all files that its records name: whether each is there, its size and time of change. Empty without any."""
        return media_state(self._reader, self._limits)

    @property
    def folder(self) -> MediaFolder | None:
        """Where the files lie that its records name."""
        return self._reader.folder

    def names_same(self, members: Sequence[tuple[int, int, int, str]]) -> bool:
        """Whether the files that a sample names have the sizes and times of change that its members tell."""
        media: dict[int, dict[str, NamedMedia]] = {}
        try:
            for offset, size, encoding, field in members:
                if encoding != NAMED:
                    continue
                named, stamp = self._named_at(offset, field, media)
                if named is None or not self._is_same(named, size, stamp):
                    return False
        except (DecodeError, FieldError, StaleIndexError):
            return False
        return True

    def _is_same(self, media: NamedMedia, size: int, stamp: int) -> bool:
        folder = self._reader.folder
        if folder is None or any(one.path is None for one in media.parts()):
            return True  # what the record itself holds, its own checks see to
        now: list[tuple[int, int]] = []
        for one in media.parts():
            with folder.open(str(one.path)) as file:
                now.append((file.size, file.stamp))
        return sum(each for each, _ in now) == size and joined_stamp([each for _, each in now]) == stamp

    def facts(self) -> Facts:
        """Read all records, and the headers of the media that they name. Bad data are rows with an error."""
        if self.size >= _MOST_BYTES:
            reason = f"{self.size} bytes, and files of records are below {_MOST_BYTES}: split it"
            found = Scanned(shard_failure(reason), self.size, "")
        else:
            found = scan(self._reader, self._limits)
        checksum = self.checksum()
        self._file.check_unchanged()
        meta = FactsMeta(
            url=self.url,
            size=self.size,
            version=self.version,
            checksum=checksum,
            limits=limits_fingerprint(self._limits),
            ignored=found.table.ignored(),
            lost_bytes=found.lost_bytes,
            media=found.media,
        )
        return Facts(found.table, meta)

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        """One member. Raises FieldError. A record that names many files is parsed once where they are read in turn."""
        if encoding != NAMED:
            return self._read(offset, size, encoding, field, {})
        known = self._known
        if offset >> STAMP_BITS in known:
            self._file.check_unchanged()
        else:
            known = {}
        data = self._read(offset, size, encoding, field, known)
        self._known = known
        return data

    def read_many(self, members: Sequence[tuple[int, int, int, str]]) -> list[bytes | memoryview]:
        """Members of one sample, whose record is parsed once. Raises FieldError."""
        media: dict[int, dict[str, NamedMedia]] = {}
        names_media = any(encoding == NAMED for _, _, encoding, _ in members)
        contents: list[bytes | memoryview] = []
        for offset, size, encoding, field in members:  # the record is the first of them
            data = self._read(offset, size, encoding, field, media)
            if names_media and encoding != NAMED:
                media[offset] = self._media(data, field)
            contents.append(data)
        return contents

    def close(self) -> None:
        self._file.close()

    def _read(
        self, offset: int, size: int, encoding: int, field: str, media: dict[int, dict[str, NamedMedia]]
    ) -> bytes:
        if size > self._limits.member_bytes:
            raise FieldError(field, f"{size} bytes, above Limits.member_bytes={self._limits.member_bytes}")
        try:
            if encoding == NAMED:
                named, stamp = self._named_at(offset, field, media)
                return self._content(named, size, stamp)
            data = self._file.read(offset, size)
            if len(data) < size:
                raise DecodeError(f"cut: {len(data)} of {size} bytes are in the file")
            if encoding == TABLE_ROW:
                data = self._reader.as_json(data)  # which may read the line of names
            self._file.check_unchanged()
            return data
        except DecodeError as error:
            self._file.check_unchanged()  # or it may be the change that looks like damage
            raise error.at(field) from error.__cause__

    def _named_at(
        self, offset: int, field: str, media: dict[int, dict[str, NamedMedia]]
    ) -> tuple[NamedMedia | None, int]:
        """What a member's record names it by, and its stamp; `media` are those of records known, which this adds to."""
        place = offset >> STAMP_BITS
        if place not in media:
            media[place] = self._media(self._record(place), field)
        return media[place].get(field), offset & _STAMP

    def _record(self, place: int) -> bytes:
        data = self._reader.at(place)
        self._file.check_unchanged()
        return data

    def _media(self, data: bytes, field: str) -> dict[str, NamedMedia]:
        """The media that a record names, by field."""
        try:
            return {one.field: one for one in self._reader.media(self._reader.value(data))}
        except DecodeError as error:
            raise error.at(field) from error.__cause__

    def _content(self, media: NamedMedia | None, size: int, stamp: int) -> bytes:
        """Raises DecodeError where it is not what was indexed."""
        if media is None or media.error is not None:
            raise DecodeError("its record names no such file: run `orchdata index` again")
        name = "its list of files" if media.files else shown_name(media.path or media.field)
        contents, stamps, left = [], [], size
        for one in media.parts():
            data, stamped = self._named(one, left, name)
            contents.append(data)
            stamps.append(stamped)
            left -= len(data)
        if left:
            raise _changed(name, size - left, size)
        if joined_stamp(stamps) != stamp:
            raise DecodeError(
                f"{name} was changed since it was indexed: it has another time of change, and the same size. Run "
                "`orchdata index` again. `cp -r` makes copies like that; `cp -a` and `rsync -a` keep the time"
            )
        return media.joined(contents) if media.files else contents[0]

    def _named(self, media: NamedMedia, most: int, name: str) -> tuple[bytes, int]:
        """What is named, and its stamp. Raises DecodeError for more than so many bytes, in the name of all."""
        if media.path is None:
            data, stamp = media.decoded(self._limits), 0
        elif self._reader.folder is None:
            raise DecodeError(no_root(media.path))
        else:
            with self._reader.folder.open(media.path) as file:
                data, stamp = file.read(min(file.size, most + 1)), file.stamp
            if self._reads is not None:
                self._reads.storage.add(len(data))
        if len(data) > most:
            raise _changed(name, f"above {most}", most)
        return data, stamp


def _changed(name: str, now: int | str, then: int) -> DecodeError:
    return DecodeError(
        f"{name} was changed since it was indexed ({now} bytes now, {then} then): run `orchdata index` again"
    )
