"""What is known of a file of records: how they are stored, what they say, and where the files they name lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.jsonl.media_files import MediaFolder
from orchdata.loaders.shards.jsonl.named_media import NamedMedia, media_of
from orchdata.loaders.shards.jsonl.records import Record, records_of
from orchdata.loaders.storage.paths import is_media_table, suffix_of
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.text.conversation import parse_json

_KEYS: Final = ("__key__", "id")


class RecordReader:
    """The records of a file, and what they name. Safe from many threads.

    Attributes:
        url: of the file.
        encoding: of its records, as in the facts.
        folder: where the files lie that they name; None: nobody said.
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
        """The record that begins at `offset`, as JSON. Raises DecodeError."""
        return self._records.as_json(self._records.at(offset))

    def as_json(self, data: bytes) -> bytes:
        """Raises DecodeError."""
        return self._records.as_json(data)

    def value(self, data: bytes) -> Any:
        """What JSON says. Raises DecodeError."""
        return parse_json(data)

    def media(self, value: Any) -> list[NamedMedia]:
        """The media that a record names. Raises DecodeError."""
        return media_of(value, file_names=self._is_table)

    def key(self, value: Any) -> str | None:
        """What a record calls itself."""
        names = (*_KEYS, "file_name") if self._is_table else _KEYS
        for held in (value.get(name) for name in names) if isinstance(value, dict) else ():
            if isinstance(held, str | int) and not isinstance(held, bool) and held != "":
                return str(held)
        return None
