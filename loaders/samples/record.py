"""Members of a sample -> the record that `Recipe.record` gets -> the record that it makes, and the media in it.

    members --record_of--> {"jpg": Media("jpg", 0), "json": {...}, "txt": "..."} --Recipe.record--> record with Media
    --made_sample--> the record without Media, and the members that they refer to

Files of records are not read here: their function is called before the media that they name are read (`shards.lines`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import EMPTY, NULL, VALUE
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.modalities.modality import outer_of
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import Media, made_record
from orchdata.loaders.samples.members import (
    Fields,
    Member,
    Payloads,
    is_cell_without_content,
    is_json,
    is_label,
    json_value,
    uses_of,
)
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.text.messages import CHAT_KEYS, CONTENT_KEYS, kind_of, says_nothing

_LEADING: Final = re.compile(r"(\d+)\.(.+)", re.DOTALL)
_TRAILING: Final = re.compile(r"(.+)\.(\d+)", re.DOTALL)
_INTEGER: Final = re.compile(r"\s*[+-]?\d{1,4000}\s*")  # more digits are a ValueError of Python's

_Groups: TypeAlias = Mapping[str, tuple[bool, list[int]]]
"""Name of a field -> (whether it is a list, members by number)."""


class MadeSample(NamedTuple):
    """A record that the user's function made, without references to media; and modality -> members of its parts, in the
    order of the record.
    """

    record: dict[str, Any]
    media: Mapping[str, tuple[int, ...]]


def record_of(members: Sequence[Member], texts: Payloads, recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a sample by name. Text is a string, JSON and columns that are no strings are values, and
    everything else is a `Media`. Fields with a number ("0.jpg", "images.0") form a list under the name without it.
    Raises FieldError if a text cannot be read, or two fields have the same name here ("txt" and "txt.gz").
    """
    fields = Fields(members, texts, recipe, uses_of(members, recipe))
    return _record(_grouped(members, recipe), fields)


def _record(groups: _Groups, fields: Fields) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, (is_listed, indices) in groups.items():
        if len(indices) > 1 and not is_listed:
            one, other = map(fields.name, indices[:2])
            raise FieldError(other, f"Recipe.record gets this as {name!r}, and {one!r} too")
    for name, (is_listed, indices) in groups.items():
        values: list[Any] = []
        for number, at in enumerate(indices):
            member = fields.members[at]
            if member.kind not in (TEXT, OTHER) or (member.kind == OTHER and not is_label(member.field)):
                values.append(Media(name, number))
                continue
            payload = fields.checked(at, fields.texts.get(at, b""))
            if is_cell_without_content(member.field, member.size) or is_json(name) or is_json(member.field):
                values.append(json_value(member.field, payload))
                continue
            text = fields.text(at, payload)
            values.append(int(text) if member.kind == OTHER and _INTEGER.fullmatch(text) else text)
        record[name] = values if is_listed else values[0]
    return record


def made_sample(fields: Fields) -> MadeSample:
    """Call the recipe's function. Without any `Media` in its record all media are used, in the order of the fields; but
    an empty list or None under a key such as "images" chooses none. Raises LeftOut; FieldError as `record_of`, or if
    the function fails, or refers to media that the sample does not have.
    """
    members, _, recipe, uses = fields
    assert recipe.record is not None
    groups = _grouped(members, recipe)
    record = _record(groups, fields)
    try:
        made = made_record(recipe.record, record)
        references = _References(groups, members, recipe)
        made = references.taken_from(made)
    except DecodeError as error:
        raise error.at("*") from error.__cause__
    return MadeSample(made, references.media() or uses.media)


def _grouped(members: Sequence[Member], recipe: Recipe) -> _Groups:
    groups: dict[str, list[tuple[int, int]]] = {}
    listed: set[str] = set()
    for index, member in enumerate(members):
        if _outer(member, recipe) is not None or member.field.endswith(VALUE):
            continue
        name, number = _name(member)
        if number >= 0:
            listed.add(name)
        groups.setdefault(name, []).append((number, index))
    return {name: (name in listed, [index for _, index in sorted(group)]) for name, group in groups.items()}


def _outer(member: Member, recipe: Recipe) -> str | None:
    """Return the field that a part is inside of, as the sound in a video, which goes with its video; else None."""
    outer, inner = outer_of(member.field)
    return outer if inner in recipe.modalities else None


def _name(member: Member) -> tuple[str, int]:
    """Return a field's name without its number, and the number; -1 for no number."""
    field = member.field.removesuffix(WORDS_SUFFIX).removesuffix(".gz")
    is_null = member.kind == TEXT and not member.size and field.endswith((NULL, EMPTY))
    if is_null:
        field = field.removesuffix(NULL).removesuffix(EMPTY)
    if match := _LEADING.fullmatch(field):
        return match[2], int(match[1][:18])
    if (member.kind != TEXT or is_null) and (match := _TRAILING.fullmatch(field)):
        return match[1], int(match[2][:18])
    return field, -1


class _References:
    """Collects the references to media in a record."""

    def __init__(self, groups: _Groups, members: Sequence[Member], recipe: Recipe) -> None:
        self._members = members
        self._recipe = recipe
        self._index_of = {
            Media(name, number): index for name, (_, indices) in groups.items() for number, index in enumerate(indices)
        }
        self._taken: dict[str, list[int]] = {}
        self._is_none = False

    def media(self) -> dict[str, tuple[int, ...]] | None:
        """Return the members referred to, by modality, in the recipe's order; with the sound in videos. None for a
        record without references, and without a key of media that names none: it does not say which are used.
        """
        if not (self._taken or self._is_none):
            return None
        chosen = {index for indices in self._taken.values() for index in indices}
        fields = {self._members[index].field for index in chosen}
        for index, member in enumerate(self._members):
            if _outer(member, self._recipe) in fields and (name := self._modality(index)) is not None:
                self._taken.setdefault(name, []).append(index)
        return {name: tuple(self._taken.get(name, ())) for name in self._recipe.modalities}

    def taken_from(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record without its references. Raises DecodeError for one where no media can be."""
        words = self._recipe.rules.words
        left: dict[str, Any] = {}
        in_turns: dict[str, list[int]] = {}
        for key, value in record.items():
            items = value if isinstance(value, list) else [value]
            if key in words.records and any(isinstance(item, Media) for item in items):
                wanted = words.records[key]
                indices = [self._member(item, wanted, f"[{key!r}]") for item in items]
                if self._taken.setdefault(wanted, indices) != indices:
                    raise DecodeError(f"Recipe.record: {key!r} and another key both refer to {wanted}: use one")
            elif key in words.records and all(map(says_nothing, items)):
                _without_media(value, f"[{key!r}]")
                self._is_none = True
            elif key in words.records and (wrong := [item for item in items if not isinstance(item, str)]):
                _without_media(value, f"[{key!r}]")
                what = kind_of(wrong[0]) if isinstance(wrong[0], dict | list) else repr(wrong[0])
                raise DecodeError(f"Recipe.record: {key!r} has {what}: return references to media there, or none")
            elif key in CHAT_KEYS and isinstance(value, list):
                left[key] = [self._turn(turn, in_turns, f"{key}[{number}]") for number, turn in enumerate(value)]
            else:
                left[key] = _without_media(value, f"[{key!r}]")
        for name, indices in in_turns.items():
            if self._taken.setdefault(name, indices) != indices:
                raise DecodeError(f"Recipe.record: the turns and a key of the record both refer to {name}: use one")
        for name, indices in self._taken.items():
            if len(set(indices)) < len(indices):
                raise DecodeError(
                    f"Recipe.record: the record refers to one {name} twice, and each can be in a sample once: leave "
                    "out the second reference, or say it in words"
                )
        return left

    def _turn(self, turn: Any, taken: dict[str, list[int]], where: str) -> Any:
        """Return a turn with an item of type image, ... for each reference in its content."""
        if not isinstance(turn, dict):
            return _without_media(turn, where)
        made = {}
        for key, value in turn.items():
            if key in CONTENT_KEYS and isinstance(value, list):
                made[key] = [self._item(item, taken, f"{where}[{key!r}][{at}]") for at, item in enumerate(value)]
            else:
                made[key] = _without_media(value, f"{where}[{key!r}]")
        return made

    def _item(self, item: Any, taken: dict[str, list[int]], where: str) -> Any:
        if isinstance(item, Media):
            index = self._member(item, None, where)
            name = self._modality(index)
            assert name is not None
            taken.setdefault(name, []).append(index)
            return {"type": name}
        if item is None:
            raise DecodeError(f"Recipe.record: {where} is None: leave the item out of a sample without such media")
        kind = None
        if isinstance(item, dict):  # Qwen writes items of media without a type too
            kind = item.get("type", next((key for key, value in item.items() if isinstance(value, Media)), None))
        if isinstance(kind, str) and isinstance(item.get(kind), Media):
            wanted = self._recipe.rules.words.items.get(kind)
            if wanted is None:
                raise DecodeError(f"Recipe.record: {where} is of type {kind!r}, which no modality of the recipe reads")
            taken.setdefault(wanted, []).append(self._member(item[kind], wanted, where))
            item = {"type": kind, **{key: value for key, value in item.items() if key != kind}}
        return _without_media(item, where)

    def _member(self, item: Any, wanted: str | None, where: str) -> int:
        """Return the member of a reference, which must be of the modality `wanted`. Raises DecodeError."""
        if not isinstance(item, Media):
            raise DecodeError(f"Recipe.record: {where} has references to media and other values")
        index = self._index_of.get(item)
        if index is None:
            fields = ", ".join(map(repr, sorted({each.field for each in self._index_of}))) or "none"
            raise DecodeError(f"Recipe.record: {where} is {item}, which the sample does not have; its fields: {fields}")
        name = self._modality(index)
        if name is None or wanted not in (None, name):
            reads = "no modality of the recipe reads" if name is None else f"is {name}, not {wanted}"
            raise DecodeError(f"Recipe.record: {where} is {item}, which {reads}")
        return index

    def _modality(self, index: int) -> str | None:
        kind, kinds = self._members[index].kind, self._recipe.kinds
        return kinds[kind] if TEXT < kind < len(kinds) else None


def _without_media(value: Any, where: str) -> Any:
    """Return the value. Raises DecodeError if it has references to media."""
    if isinstance(value, Media):
        raise DecodeError(
            f"Recipe.record: {where} is {value}, and media can be items of a turn's content, or under a key that names "
            "a modality, alone or in one list"
        )
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _without_media(item, f"{where}[{key!r}]")
    return value
