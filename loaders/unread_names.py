"""Names of fields that no rule reads, counted while samples are measured, so that a loader can say what is not learned.

    record, and what was read of it --names_of_record--> names --UnreadNames--> counts of a shard --> of an index

A name leads to a value by keys, with dots; `[]` stands for the items of a list: `meta.lang`, `messages[].weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.field_names import FILE_KEYS, NUMBER, bare_name, is_edge, says_edge
from orchdata.loaders.modalities.builtin import BUILTINS, ON_REQUEST, UNDECODED
from orchdata.loaders.modalities.video.containers import TIMING
from orchdata.loaders.records import ADDED_FIELDS
from orchdata.loaders.text.conversation import Document, Rules, parse_json
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    ALPACA,
    CHAT_KEYS,
    CONTENT_KEYS,
    PAIR,
    ROLE_KEYS,
    SYSTEM,
    is_chat_context,
    is_flag,
    is_loss_flag,
    says,
    speaks,
)
from orchdata.loaders.text.template import record_keys

SHARD_NAMES: Final = 256
INDEX_NAMES: Final = 1024
_FORGOTTEN_AT: Final = 4
_MOST_SETS: Final = 1024
_LEVELS: Final = 4
_MOST_KEYS: Final = 64
"""The keys of an object with more of them are data, not names."""
_MOST_ITEMS: Final = 256
_CHARACTERS: Final = 80
_FLAT: Final = frozenset((str, int, float, bool))
_EMPTY: Final = (b"", b"null", b"[]", b"{}", b'""')
_KEYS: Final = ("__key__", "id", ADDED_FIELDS)
_ITEM_KEYS: Final = ("type", "text", "index")
_ITEM_NAMES: Final = ("path", "url", "base64", "source")
"""Keys under which an item of media names its file, after those of its modality. The first with a value is read."""
REJECTED: Final = "rejected"
"""The one key next to a conversation that may say what no turn says: the answer that is not preferred."""


class UnreadNames:
    """Counts the samples that have each unread name, in memory for some: of more than `most`, the frequent stay."""

    def __init__(self, most: int = SHARD_NAMES) -> None:
        self._most = most
        self._sets: dict[tuple[str, ...], list[Any]] = {}  # names of a sample -> [samples since `_forget`, numbers]
        self._known: dict[str, list[int]] = {}  # name -> [its number, count]
        self._given = 0
        self._others = 0

    def add(self, names: tuple[str, ...], others: int = 0, *, count: int = 1) -> list[int]:
        """Count names of `count` samples, and others that are not known by name. Return the number of each name; a name
        that was forgotten in between gets another one.
        """
        self._others += others
        found = self._sets.get(names)  # most samples have the names of others
        if found is None:
            if len(self._known) > _FORGOTTEN_AT * self._most or len(self._sets) > _MOST_SETS:
                self._forget()
            for name in names:
                if name not in self._known:
                    self._known[name] = [self._given, 0]
                    self._given += 1
            found = self._sets[names] = [0, [self._known[name][0] for name in names]]
        found[0] += count
        numbers: list[int] = found[1]
        return numbers

    def numbers(self) -> dict[str, int]:
        """Return the most frequent names with their numbers; no others are known afterwards."""
        self._forget()
        return {name: number for name, (number, _) in self._known.items()}

    def totals(self) -> dict[str, Any]:
        """Return {"names": name -> number of samples, "others": the sum of all other counts}, JSON-safe."""
        self._forget()
        return {"names": {name: count for name, (_, count) in self._known.items()}, "others": self._others}

    def _forget(self) -> None:
        for names, (count, _) in self._sets.items():
            for name in names:
                self._known[name][1] += count
        self._sets = {}
        ordered = sorted(self._known.items(), key=lambda each: (-each[1][1], each[1][0]))
        self._known = dict(ordered[: self._most])
        self._others += sum(count for _, (_, count) in ordered[self._most :])


def sum_unread(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of several `UnreadNames.totals`."""
    total = UnreadNames(INDEX_NAMES)
    for each in counts:
        total.add((), each["others"])
        for name, count in each["names"].items():
            total.add((name,), count=count)
    return total.totals()


def above(name: str) -> list[str]:
    """Return a name, and the names that it is below: `a`, `a[]` and `a[].b` for "a[].b"."""
    return [*(name[: at.start()] for at in re.finditer(r"\.|\[", name)), name]


@lru_cache(maxsize=4096)
def name_of_member(field: str) -> str:
    """Return the name of a member or column: without numbers, and without what its container adds."""
    return _short(NUMBER.sub("", bare_name(field)))


def is_empty(payload: bytes | memoryview) -> bool:
    """Return whether a field is nothing but blanks, or an empty value of JSON."""
    return len(payload) < 16 and bytes(payload).strip() in _EMPTY


def names_of_record(
    record: Any, document: Document | None, rules: Rules, name: str, read: Collection[str], has: Collection[str]
) -> tuple[str, ...]:
    """Return the unread names of a record, a name before those below it. `document` is what the sample's text was read
    from it, or None; `name` is its member's, for what is no object; `read` are more keys that are read; what names
    media of the modalities in `has` is read too.
    """
    found: dict[str, None] = {}
    is_chat = document is not None and document.is_chat
    if not isinstance(record, dict):
        if is_chat:
            _add_turns(f"{name}[]", record, rules, found)
        else:
            _add(name, record, found)
    elif is_chat and any(map(record.get, ROLE_KEYS)) and not any(map(record.get, CHAT_KEYS)):
        _add_turns("", [record], rules, found)
    else:
        mine = () if document is None else _keys_read(record, document, rules)
        media = [key for key, modality in rules.words.records.items() if modality in has] if has else ()
        keys, names = _others(tuple(record), (*mine, *media, *read))
        values = [record[key] for key in keys]
        is_false = False in values and not record.keys().isdisjoint(rules.words.records)
        near = any(isinstance(record.get(key), list | dict | int | float) for key in media)
        if not (is_chat or near or is_false) and _FLAT.issuperset(map(type, values)) and "" not in values:
            return names
        for key, its_name, value in zip(keys, names, values, strict=True):
            if value is not False or key not in rules.words.records:  # in place of media it says nothing
                _add(its_name, value, found)
        for key in media if near else ():
            _add_next_to_file(_short(key), record.get(key), rules, found)
        for key in [key for key in (*CHAT_KEYS, *PAIR) if key in mine] if is_chat else ():
            _add_turns(f"{key}[]", _listed(record[key]), rules, found)
    return tuple(found)


def _listed(value: Any) -> Any:
    """Return a list of turns, which a column has as JSON."""
    if isinstance(value, str) and value[:1] == "[":
        with suppress(DecodeError):
            value = parse_json(value.encode("utf-8", "replace"))
    return value if isinstance(value, list) else ()


def _keys_read(record: Mapping[str, Any], document: Document, rules: Rules) -> list[str]:
    """Return the keys of a record that its document was made of."""
    if document.completion is not None:
        return [*PAIR]
    if document.text is not None:
        return [document.key]
    if not document.is_chat:
        return []
    template = rules.template
    is_jinja = isinstance(template, JinjaTemplate)
    ignored = template.ignore_keys if isinstance(template, JinjaTemplate) else ()
    read = [key for key in CHAT_KEYS if isinstance(record.get(key), list)]
    if not any(record[key] for key in read):
        is_alpaca = all(isinstance(record.get(key), str) for key in ALPACA)
        read += (*ALPACA, "input", "history") if is_alpaca else PAIR
    context = _context(tuple(record), ignored)
    systems = (
        [key for key in SYSTEM if key in context and says(record[key])][1:] if context else ()
    )  # the first is read
    for key in context:
        is_said = says(record[key]) and (is_jinja or not is_flag(record[key]))
        if key in ignored or (is_said and key != REJECTED and key not in systems):
            read.append(key)
    return read


@lru_cache(maxsize=256)
def _context(keys: tuple[str, ...], ignored: tuple[str, ...]) -> list[str]:
    """Return the keys that belong to a conversation, or that its template may lose."""
    return [key for key in keys if key in ignored or is_chat_context(key)]


@lru_cache(maxsize=256)
def _others(keys: tuple[str, ...], read: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
    """Return the keys that are not read, and their names."""
    others = [key for key in keys if key not in read and key not in _KEYS]
    return others, tuple(map(_short, others))


def _add_turns(name: str, turns: Any, rules: Rules, found: dict[str, None]) -> None:
    """Add the keys of turns, and of the items of their content, that neither this library nor the template names."""
    template = rules.template
    named: tuple[str, ...] = ()
    if isinstance(template, JinjaTemplate):
        named = (template.source, template.tool_source or "", *template.ignore_keys)
    for turn in turns:
        if not isinstance(turn, dict) or (len(turn) == 2 and isinstance(turn.get("content") or turn.get("value"), str)):
            continue
        for key, its_name in _others_of_turn(tuple(turn), name, named):
            if not speaks(key, turn[key], rules.words.records):
                _add(its_name, turn[key], found)
        for key in CONTENT_KEYS:
            if isinstance(content := turn.get(key), list | dict):
                for item in content if isinstance(content, list) else [content]:
                    if isinstance(item, dict) and not (len(item) == 2 and "text" in item and "type" in item):
                        _add_item(f"{_below(name, key)}[]", item, rules, named, found)


@lru_cache(maxsize=256)
def _others_of_turn(keys: tuple[str, ...], name: str, named: tuple[str, ...]) -> list[tuple[str, str]]:
    own = (*ROLE_KEYS, *CONTENT_KEYS)
    return [
        (key, _below(name, key)) for key in keys if key not in own and not is_loss_flag(key) and not _names(named, key)
    ]


def _add_item(name: str, item: Mapping[str, Any], rules: Rules, named: tuple[str, ...], found: dict[str, None]) -> None:
    """Add the keys of an item. A template gets items of text, all strings of which must be rendered, and no media."""
    words = rules.words
    kind = item.get("type")
    kind = next((key for key in words.items if item.get(key) is not None), None) if kind is None else kind
    modality = words.items.get(kind) if isinstance(kind, str) else None
    frames = modality in words.listed and isinstance(item.get(str(kind)), list)
    names = (str(kind), *(word for word, its in words.items.items() if its == modality), *_ITEM_NAMES)
    used = next((key for key in names if item.get(key) is not None), None) if modality else None
    cuts = bool(modality) and any(map(is_edge, item))  # a length alone is not read
    for key, value in item.items():
        is_checked = cuts and says_edge(key, value) if modality else bool(named) and _names(named, key)
        is_checked = is_checked or (frames and TIMING.search(key) is not None)
        if key != used and key not in _ITEM_KEYS and not is_checked:
            _add(_below(name, key), value, found)
    if used is not None:
        _add_next_to_file(_below(name, used), item[used], rules, found)


def _add_next_to_file(name: str, value: Any, rules: Rules, found: dict[str, None]) -> None:
    """Add the keys next to a file, or a list of frames: `images[].bbox` of {"path": ..., "bbox": ...}; and a number."""
    for item in value if isinstance(value, list) else (value,):
        if isinstance(item, int | float) and item is not False:
            found[name] = None
        for key, its_value in item.items() if isinstance(item, dict) else ():
            is_read = key == "frames" or TIMING.search(key) if "frames" in item else says_edge(key, its_value)
            if key not in FILE_KEYS and key not in rules.words.items and not is_read:
                _add(_below(f"{name}[]" if isinstance(value, list) else name, key), its_value, found)


@lru_cache(maxsize=1024)
def _names(named: tuple[str, ...], key: str) -> bool:
    """Return whether a template names a key: in its sources, or among those that it may lose."""
    sources, ignored = named[:2], named[2:]
    pattern = re.compile(rf"(?<!\w){re.escape(key)}(?!\w)")
    return key in ignored or any(pattern.search(source) is not None for source in sources)


def _add(name: str, value: Any, found: dict[str, None], levels: int = _LEVELS) -> None:
    """Add a name whose value says something, and the names below it."""
    if value is None or (not value and isinstance(value, str | list | dict)):
        return
    found[name] = None
    if levels > 1 and isinstance(value, list | dict):
        _add_below(name, value, found, levels)


def _add_below(name: str, value: list[Any] | dict[str, Any], found: dict[str, None], levels: int) -> None:
    if isinstance(value, list):
        for item in value[:_MOST_ITEMS]:
            if levels > 1 and isinstance(item, list | dict):
                _add_below(f"{name}[]", item, found, levels - isinstance(item, list))
    elif len(value) <= _MOST_KEYS:
        for key, item in value.items():
            _add(_below(name, key), item, found, levels - 1)


@lru_cache(maxsize=4096)
def _below(name: str, key: str) -> str:
    return _short(f"{name}.{key}" if name else key)


def _short(name: str) -> str:
    """Return a name that can be stored and shown: without control characters and halves of characters, shortened."""
    name = name if name.isprintable() else name[:_CHARACTERS].encode("unicode_escape").decode()
    return name if len(name) <= _CHARACTERS else f"{name[: _CHARACTERS - 3]}..."


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


def modality_of_name(name: str) -> str | None:
    """Return the modality of a field that is called so, or is a file with this ending; None for no media."""
    return _RECORD_KEYS.get(name) or _ENDINGS.get(name.rpartition(".")[2].lower())
