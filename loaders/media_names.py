"""Strings that name an image or a clip under keys that no rule reads, counted so that a loader can warn of them.

{"meta": {"image": "a.jpg"}, "text": "a cat"} --names_in--> {"meta.image": ("image", "a.jpg")} --UnreadNames--> counts
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, ON_REQUEST, UNDECODED
from orchdata.loaders.storage.shared.values import COUNT
from orchdata.loaders.text.chat_keys import is_chat_context
from orchdata.loaders.text.media_words import record_keys
from orchdata.loaders.text.messages import CHAT_KEYS
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.words import names_words

_CLASSES: Final = {**BUILTINS, **ON_REQUEST}
_MEAN_OTHERS: Final = frozenset(("au", "snd", "mts"))
"""Endings that strings often have for another reason, as domains of Australia and modules of TypeScript do."""
_ENDINGS: Final = {
    ending: name
    for name, kind in reversed(_CLASSES.items())  # a GIF is an image first
    for ending in (*kind.fields, *UNDECODED[name].split())
    if "." not in ending and ending not in _MEAN_OTHERS
}
_RECORD_KEYS: Final = record_keys(_CLASSES)
_OF_SAMPLES: Final = frozenset(("id", "__key__", "__url__"))
_NAME_CHARACTERS: Final = 1024
_SHOWN_CHARACTERS: Final = 80
_NAME_BYTES: Final = 4 * _NAME_CHARACTERS
_MOST_SPACES: Final = 3
"""A name with more spaces is a sentence that ends in a name."""
_TAIL: Final = 2 + max(map(len, _ENDINGS))
_LETTERS: Final = [{each for ending in _ENDINGS for each in (ending[at], ending[at].upper())} for at in range(3)]
_MAY_NAME: Final = re.compile(
    r'\.(?=[{}][{}][{}]\w?(?:["?#,\t\r\n]|$))(?i:{})\b'.format(
        *("".join(sorted(letters)) for letters in _LETTERS), "|".join(sorted(_ENDINGS))
    ).encode()
)
"""An ending of media where a value of JSON or CSV ends, or the path of an address in it. Endings have 3 or 4 letters; a
lookahead that compares them makes it three times as fast.
"""
_AFTER_PATH: Final = re.compile(r"[?#]")
_SECRETS: Final = re.compile(r"(?<=://)[^/@]*@|[?#].*")
_KEY_CHARACTERS: Final = 256
_MOST_ITEMS: Final = 64
_MOST_NESTED: Final = 256
_MOST_FIELDS: Final = 16

UNREAD_SHAPE: Final = {str: {str: {"samples": COUNT, "example": str}}}
"""The shape of `UnreadNames.counts`, see `storage.shared.values`."""

MediaNames = dict[str, tuple[str, str]]
"""Field, with dots between the keys that lead to it -> the modality that its value names, and the value."""


def modality_of_ending(name: str) -> str | None:
    """Return the modality of files with the ending of a name, decoded or not; None for no media."""
    _, dot, ending = name[-_TAIL:].rpartition(".")
    return _ENDINGS.get(ending.lower()) if dot else None


def modality_of_member(field: str, kind: int) -> str | None:
    """Return the modality of a member of a sample by its kind in the facts, its column or its ending."""
    if 0 < kind < len(KINDS):
        return KINDS[kind]
    return _RECORD_KEYS.get(field.partition(".")[0]) or modality_of_ending(f".{field}")


def modality_named(value: str) -> str | None:
    """Return the modality of the file that a string names by its path or address; None if it names none."""
    if len(value) > _NAME_CHARACTERS:
        return None
    modality = modality_of_ending(value)
    is_address = "://" in value
    if modality is None and is_address:
        value = _AFTER_PATH.split(value, maxsplit=1)[0]
        modality = modality_of_ending(value)
    if modality is None or "\n" in value or value.count(" ") > _MOST_SPACES:
        return None
    name = value.partition("://")[2].partition("/")[2] if is_address else value
    return modality if name.rpartition("/")[2].rpartition(".")[0] else None


def may_name_media(data: bytes | memoryview) -> bool:
    """Return whether a record as stored may have a value that names media: a quick test for `names_in`."""
    return _MAY_NAME.search(data) is not None


def names_in(record: Any) -> MediaNames:
    """Return the fields of a record, at any depth, that name media and that no rule reads; of a list the first name.

    Left out are keys that are read, keys of text, and the keys that name a sample.
    """
    found: MediaNames = {}
    nested = [("", record)] if isinstance(record, dict) else []
    for prefix, item in nested:  # grows
        for key, value in item.items():
            if len(key) > _KEY_CHARACTERS or (not prefix and _is_read(key)):
                continue
            for each in value[:_MOST_ITEMS] if isinstance(value, list) else [value]:
                if isinstance(each, dict) and len(nested) < _MOST_NESTED:
                    nested.append((f"{prefix}{key}.", each))
                elif isinstance(each, str) and not _is_left_out(key) and (modality := modality_named(each)) is not None:
                    found.setdefault(prefix + key, (modality, each))
    return found


def names_in_cell(field: str, data: bytes | memoryview, *, is_json: bool) -> MediaNames:
    """Return as `names_in` does the names in a cell of a table, or in a field of a sample."""
    if (len(data) > _NAME_BYTES and not is_json) or not may_name_media(data):
        return {}
    try:
        text = bytes(data).decode()
        return names_in({field: json.loads(text) if is_json else text})
    except (ValueError, RecursionError):  # not valid UTF-8, which is judged elsewhere
        return {}


@lru_cache(maxsize=4096)
def _is_left_out(key: str) -> bool:
    """Return whether the strings of a key are the words or the name of a sample."""
    return key in _OF_SAMPLES or key.lower() in TEXT_FIELDS or names_words(key)


@lru_cache(maxsize=4096)
def _is_read(key: str) -> bool:
    """Return whether a key of a record is read as media or as a chat, or judged as a part of one."""
    return key in _RECORD_KEYS or key in CHAT_KEYS or is_chat_context(key)


def is_watched(column: str) -> bool:
    """Return whether no rule reads a column of strings, so that names of media in it are lost."""
    return not (_is_left_out(column) or _is_read(column) or column.lower() in _RECORD_KEYS)


class UnreadNames:
    """Counts samples with names of media that are not read, and that have no other media of the modality.

    Attributes:
        counts: modality -> field -> {"samples": number of samples, "example": the first value, shortened}, JSON-safe;
            at most 16 fields of a modality.
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, dict[str, Any]]] = {}

    def add(self, found: Mapping[str, tuple[str, str]], has: Collection[str | None]) -> None:
        """Count a sample.

        Args:
            found: as `names_in` returns it.
            has: modalities of the sample's media.
        """
        for field, (modality, value) in found.items():
            if modality in has:
                continue
            fields = self.counts.setdefault(modality, {})
            field = _printable(field)
            if field in fields:
                fields[field]["samples"] += 1
            elif len(fields) < _MOST_FIELDS:
                fields[field] = {
                    "samples": 1,
                    "example": _printable(_SECRETS.sub("", value) if "://" in value else value),
                }


def _printable(text: str) -> str:
    text = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def sum_unread(counts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sum of several `UnreadNames.counts`, with the examples of the first and as many fields at most."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for one in counts:
        for modality, named in one.items():
            fields = result.setdefault(modality, {})
            for field, each in named.items():
                if field in fields:
                    fields[field]["samples"] += each["samples"]
                elif len(fields) < _MOST_FIELDS:
                    fields[field] = dict(each)
    return result
