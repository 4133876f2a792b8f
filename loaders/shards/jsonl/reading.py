"""Reading a file of records: how they are stored, their values, and the folder of the files that they name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.jsonl.media_files import MediaFolder
from orchdata.loaders.shards.jsonl.named_media import NamedMedia, media_of
from orchdata.loaders.shards.jsonl.records import Record, records_of
from orchdata.loaders.storage.paths import is_media_table, suffix_of
from orchdata.loaders.storage.storage import Storage

_KEYS: Final = ("__key__", "id")


class RecordReader:
    """The records of a file, and the media that they name. Safe from many threads.

    Attributes:
        url: of the file.
        encoding: of its records, as in the facts.
        folder: of the files that they name; None if it is not known.
    """

    def __init__(self, url: str, file: Storage, limits: Limits, media_root: str | None) -> None:
        self.url = url
        self._records = records_of(suffix_of(url), file, limits.text_bytes)
        self._is_table = is_media_table(url)
        self.encoding = self._records.encoding
        self.folder = None if media_root is None else MediaFolder(media_root)

    def all(self) -> Iterator[Record]:
        return self._records.all()

    def at(self, offset: int) -> bytes:
        """Return the record that begins at `offset`, as JSON. Raises DecodeError."""
        return self._records.as_json(self._records.at(offset))

    def as_json(self, data: bytes) -> bytes:
        """Convert the stored bytes of a record to JSON. Raises DecodeError."""
        return self._records.as_json(data)

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
