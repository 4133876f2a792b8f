"""Reading a file of records: how they are stored, their values, and the folder of the files that they name.

stored bytes --JSON--> value --columns=--> with its new names --Recipe.record--> record as it is read
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.records import RECORD_FIELD, LeftOut, Media, check_function, made_record
from orchdata.loaders.shards.field_rules import NO_RULES, FieldRules
from orchdata.loaders.shards.fields import Met
from orchdata.loaders.shards.jsonl.named_media import NamedMedia, media_of
from orchdata.loaders.shards.jsonl.object_media import Folder
from orchdata.loaders.shards.jsonl.records import Record, records_of
from orchdata.loaders.storage.storage import Storage
from orchdata.loaders.storage.suffixes import is_media_table, suffix_of
from orchdata.loaders.text.chat_keys import Repeating
from orchdata.loaders.text.conversation import parse_json

_KEYS: Final = ("__key__", "id")
_JSON_FIELD: Final = "json"


class RecordReader:
    """The records of a file, and the media that they name. Safe from many threads.

    Attributes:
        url, size: of the file.
        encoding: of its records, as in the facts.
        field: of its records, as in the facts.
        folder: of the files that they name; None if it is not known.
        met: counts the names of renamed fields.
    """

    def __init__(
        self, url: str, file: Storage, limits: Limits, folder: Folder | None, rules: FieldRules = NO_RULES
    ) -> None:
        self.url = url
        self.size = file.size
        self._records = records_of(suffix_of(url), file, limits.text_bytes)
        self._is_table = is_media_table(url)
        self._names = dict(rules.columns)
        self.met = Met(rules.columns)
        self._function = rules.record
        self.encoding = self._records.encoding
        self.field = _JSON_FIELD if rules.record is None else RECORD_FIELD
        self.folder = folder

    def all(self) -> Iterator[Record]:
        return self._records.all()

    def at(self, offset: int) -> bytes:
        """Return the record that begins at `offset`, as JSON. Raises DecodeError."""
        return self.as_json(self._records.at(offset))

    def as_json(self, data: bytes, *, is_made: bool = True) -> bytes:
        """Convert the stored bytes of a record to JSON, as it is read. Raises DecodeError.

        Args:
            is_made: whether the user's function makes it; otherwise it is the record that the function gets.
        """
        if not self._names and (self._function is None or not is_made):
            return self._records.as_json(data)
        try:
            record = self.value(data)
            record = self.made(record) if is_made else record
        except LeftOut:
            raise DecodeError("Recipe.record leaves this sample out now: it must return the same each time") from None
        return json.dumps(record).encode()

    def value(self, data: bytes, *, counts: bool = False) -> Any:
        """Return the value of a record's stored bytes, with the new names of its fields. Raises DecodeError.

        Args:
            counts: whether its names count in `met`.
        """
        value = parse_json(self._records.as_json(data))
        if not self._names or not isinstance(value, dict):
            return value
        if counts:
            self.met.add(value)
        if isinstance(value, Repeating):
            raise DecodeError("a key comes twice in the record")
        names = self._names
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


def _refuse_references(value: Any) -> None:
    if isinstance(value, Media):
        raise DecodeError(f"Recipe.record returned {value}: records of JSON and CSV name media by their paths")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_references(item)
