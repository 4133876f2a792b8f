"""Reading ahead the objects that records name: a record must be read before the names in it are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from orchdata.loaders.errors import DecodeError, FieldError, OrchdataError
from orchdata.loaders.shards.fields import NAMED
from orchdata.loaders.shards.jsonl.named_media import NamedMedia
from orchdata.loaders.shards.jsonl.object_media import ObjectFolder
from orchdata.loaders.storage.remote.stamps import STAMP_BITS

_STAMP: Final = (1 << STAMP_BITS) - 1
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
