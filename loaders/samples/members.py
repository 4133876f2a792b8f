"""The members of a sample: their facts in the index, and which of them text and media are read from, and their values.

Fields and records of one sample -> one value for each name of `Recipe.keep`: `kept_values`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import (
    EMPTY,
    NULL,
    NUMBER,
    VALUE,
    bare_name,
    is_kept_as,
    leading_number,
    number_of,
    without_leading_number,
)
from orchdata.loaders.modalities.builtin import KINDS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import RECORD_FIELD
from orchdata.loaders.shards.fields import classify, listed_modality
from orchdata.loaders.text.conversation import WORDS_SUFFIX, parse_json
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import CHAT_KEYS, is_chat_context
from orchdata.loaders.text.preprocessor import TEXT_FIELDS, decode_utf8

if TYPE_CHECKING:
    pass


_MOST_KNOWN: Final = 4096
_LABELS: Final = frozenset("cls cls2 class count index inx id".split())
"""Suffixes of fields that webdataset reads as a number."""
_JSON_NAMES: Final = ("json", "jsn", "jsonl", "messages", "conversations")
_TEXT_SUFFIXES: Final = re.compile(r"\.(json|jsn|jsonl|txt|text)$")


class Member(NamedTuple):
    """One field of a sample as the index knows it, from headers."""

    field: str  # lower-cased, for example "0.jpg" or "json"
    kind: int  # its code under the recipe, UNUSED or OTHER
    header: Header = ()  # result of its modality's probe, possibly padded with zeros
    size: int = 0  # bytes of payload
    error: str | None = None  # why the field is bad; raised only if the field is used


class Uses(NamedTuple):
    """Indices of a sample's members by use."""

    media: Mapping[str, tuple[int, ...]]  # modality -> its parts, numbered fields by number; in the recipe's order
    kept: tuple[int, ...]  # go with the sample, by their names
    records: tuple[int, ...]  # JSON, of which keys go with the sample: `Recipe.keep` has names that no member has
    made: tuple[int, ...]  # of the record that a function of the user's makes, if it may add kept fields
    texts: tuple[int, ...]  # all members from which text is read, ascending
    json: tuple[int, ...] = ()  # in the order of the shard
    # The preferred plain text; several members of its name are an error if it is used.
    plain: tuple[int, ...] = ()
    # Text with a name that belongs to a conversation (`tools`, `system.txt`), in the order of the shard; it may be in
    # `json` or `plain` too.
    chat_context: tuple[int, ...] = ()
    # Text under other names, if there is neither JSON nor plain text: a Parquet column of chats may have any name.
    # Under a jinja template, text under all names.
    other_text: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()  # other text than `plain`, needed only if that is blank or a placeholder alone
    # Text that names media by path, or cannot be media: columns `image`, `audios`, `jpg` without bytes.
    media_paths: tuple[int, ...] = ()
    # Columns with the name of a text, before that of `plain`, or of a chat, that are no strings or turns.
    unfit: tuple[int, ...] = ()


Payloads: TypeAlias = Mapping[int, bytes | memoryview]
"""Bytes of members, by index in the sample."""


class Fields(NamedTuple):
    """The members of a sample under a recipe, with the texts that were read."""

    members: Sequence[Member]
    texts: Payloads
    recipe: Recipe
    uses: Uses

    def name(self, at: int) -> str:
        return self.members[at].field

    def checked(self, at: int, payload: bytes | memoryview | None = None) -> bytes | memoryview:
        """Return the bytes of a text. Raises FieldError if it is bad, or above the limit."""
        member, limit = self.members[at], self.recipe.limits.text_bytes
        payload = self.texts[at] if payload is None else payload
        if member.error is not None:
            raise FieldError(member.field, member.error)
        if len(payload) > limit:
            raise FieldError(member.field, f"{len(payload)} bytes of text, above the limit text_bytes={limit}")
        return payload

    def text(self, at: int, payload: bytes | memoryview | None = None) -> str:
        """Return the text of a member. Raises FieldError."""
        try:
            return decode_utf8(self.checked(at, payload))
        except DecodeError as error:
            raise error.at(self.name(at)) from error.__cause__

    def json_or_text(self, at: int) -> Any:
        """Return the value of a member that is JSON, else its text. Raises FieldError."""
        text = self.text(at)
        try:
            return parse_json(text.encode())
        except (DecodeError, UnicodeEncodeError):
            return text


def uses_of(members: Sequence[Member], recipe: Recipe) -> Uses:
    """Sort members by use. Plain text is the recipe's first field that exists, whole names before extensions."""
    names = tuple([member[:2] for member in members])
    known = recipe.uses  # most samples of a data set have the same fields
    uses: Uses | None = known.get(names)
    if uses is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        uses = known[names] = _uses(names, recipe)
    return uses


def _uses(names: tuple[tuple[str, int], ...], recipe: Recipe) -> Uses:
    media = {name: tuple(_in_field_order(names, kind)) for kind, name in enumerate(recipe.kinds) if kind != TEXT}
    kept = tuple(index for index, (name, _) in enumerate(names) if recipe.keep and recipe.keeps(name))
    records: tuple[int, ...] = ()
    if not all(any(is_kept_as(field, name) for field, _ in names) for name in recipe.keep):
        records = tuple(index for index, (name, kind) in enumerate(names) if kind == TEXT and has_keys(name))
    if recipe.record is not None and not _has_record(names):  # a function of the user's gets the text of all fields
        is_text = [kind == TEXT or (kind == OTHER and is_label(name)) for name, kind in names]
        texts = [index for index, its in enumerate(is_text) if its]
        return Uses(media, kept, records, made=tuple(texts) if recipe.keep else (), texts=tuple(texts))
    texts = _in_field_order(names, TEXT)
    is_json = {index: _name(names[index][0]).rpartition(".")[2] in _JSON_NAMES for index in texts}
    json = sorted(index for index in texts if is_json[index])
    rest = [index for index in texts if not is_json[index]]
    plain = _preferred([(index, names[index][0].lower().removesuffix(".gz")) for index in rest], recipe.text.fields)
    is_rendered = isinstance(recipe.text.template, JinjaTemplate)  # columns that form a chat go before text
    is_path = {index: named_modality(names[index][0], recipe) is not None for index in texts}
    words = {index: NUMBER.sub("", names[index][0].removesuffix(WORDS_SUFFIX)) for index in rest}
    no_chats = [index for index in rest if words[index] in CHAT_KEYS and names[index][0] not in CHAT_KEYS]
    first = _preferred([(index, _name(name)) for index, name in words.items()], recipe.text.fields)
    unfit = tuple(dict.fromkeys((*no_chats, *(index for index in first if index not in plain))))
    media_paths = tuple(index for index in sorted(texts) if is_path[index])
    chat_context = tuple(i for i in sorted(texts) if not is_path[i] and is_chat_context(stem(names[i][0])))
    other_text = () if json or (plain and not is_rendered) else tuple(index for index in texts if not is_path[index])
    return Uses(
        media,
        kept,
        records,
        json=tuple(json),
        plain=plain,
        chat_context=chat_context,
        other_text=other_text,
        spare=() if json or other_text else tuple(index for index in rest if not is_path[index] and index not in plain),
        media_paths=media_paths,
        unfit=unfit,
        made=tuple(index for index, (name, _) in enumerate(names) if name == RECORD_FIELD and recipe.keep),
        texts=tuple(sorted({*json, *plain, *chat_context, *other_text, *media_paths, *unfit})),
    )


def named_modality(field: str, recipe: Recipe) -> str | None:
    """Return the modality that a text names by its field, or cannot be; None for a field of another name."""
    name = field.lower().removesuffix(WORDS_SUFFIX)
    kind = classify(name)[0]
    if kind not in (TEXT, OTHER):
        return KINDS[kind]
    named = recipe.rules.words.records.get(name)
    return named if named is not None or name == field.lower() else listed_modality(name)


def is_made(members: Sequence[Member], recipe: Recipe) -> bool:
    """Return whether the user's function makes the sample's record from its members."""
    return recipe.record is not None and not _has_record([member[:2] for member in members])


def _has_record(names: Iterable[tuple[str, int]]) -> bool:
    """Return whether the function was called before, as in files of records."""
    return any(name == RECORD_FIELD for name, _ in names)


def has_keys(field: str) -> bool:
    """Return whether a field is JSON that may be an object with keys."""
    return _name(field).rpartition(".")[2] in ("json", "jsn")


def is_label(field: str) -> bool:
    """Return whether a field that no modality reads is a number, as `cls` in webdataset."""
    return field.lower().rpartition(".")[2] in _LABELS


def _preferred(candidates: Sequence[tuple[int, str]], text_fields: Sequence[str]) -> tuple[int, ...]:
    bare = [(index, without_leading_number(name)) for index, name in candidates]
    for wanted in text_fields:
        if (*text_fields,) == TEXT_FIELDS:  # of `0.txt` and `0.b.txt` neither is known to be the sample's
            chosen = [index for index, name in bare if name.rpartition(".")[2] == wanted]
        else:
            chosen = [index for index, name in candidates if name == wanted]
            chosen = chosen or [index for index, name in bare if name == wanted]
            chosen = chosen or [index for index, name in bare if _TEXT_SUFFIXES.sub("", name) == wanted]
            chosen = chosen or [index for index, name in bare if name.endswith("." + wanted)]
        if chosen:
            return tuple(chosen)
    return ()


def _in_field_order(names: Sequence[tuple[str, int]], kind: int) -> list[int]:
    indices = [index for index, (_, its_kind) in enumerate(names) if its_kind == kind]
    return sorted(indices, key=lambda index: (leading_number(names[index][0]), index))


def _name(name: str) -> str:
    """A field's name without its leading number and `.gz`, in lower case (Parquet columns keep their case)."""
    return without_leading_number(name.lower().removesuffix(".gz"))


def stem(name: str) -> str:
    """A field's name without its number and text suffixes."""
    return _TEXT_SUFFIXES.sub("", _name(name))


_SUFFIXES: Final = ("json", "jsn", "jsonl")
_MOST_LEVELS: Final = 48
"""Most levels of lists and dicts in a value: batches with deeper ones could not be sent to other processes."""


def is_json(field: str) -> bool:
    """Return whether a field is JSON by its name, without its `.gz`."""
    return field.rpartition(".")[2].lower() in _SUFFIXES or field.endswith((WORDS_SUFFIX, VALUE))


def is_cell_without_content(field: str, size: int) -> bool:
    """Return whether a field stands for a cell that is null, or an empty list."""
    return not size and field.endswith((NULL, EMPTY))


def json_value(field: str, payload: bytes | memoryview) -> Any:
    """Return the value of a JSON field, or of a cell without content. Raises FieldError."""
    if is_cell_without_content(field, len(payload)):
        return None if field.endswith(NULL) else []
    try:
        return parse_json(payload, lines=field.removesuffix(".gz").lower().endswith("jsonl"))
    except DecodeError as error:
        raise error.at(field) from error.__cause__


def plain_value(value: Any, field: str, level: int = 0) -> Any:
    """Return a JSON value made of plain dicts and lists, as batches have it. Raises FieldError for too many levels."""
    if not isinstance(value, dict | list):
        return value
    if level >= _MOST_LEVELS:
        raise FieldError(field, f"a value of lists and dicts nested more than {_MOST_LEVELS} deep, which no batch has")
    if isinstance(value, Mapping):
        return {key: plain_value(item, field, level + 1) for key, item in value.items()}
    return [plain_value(item, field, level + 1) for item in value]


KeptValue: TypeAlias = Any
"""Bytes of a member, or the value of a column or key: a string, number, boolean, list or dict, or None."""


def kept_values(
    names: Iterable[str], fields: Mapping[str, KeptValue], records: Sequence[Mapping[str, Any]] = ()
) -> dict[str, KeptValue]:
    """Return name -> value of one sample. A field with exactly that name goes before fields that only end in it.
    Numbered fields ("0.cls", an item of a Parquet list), and several fields, are a list. Without such a field it is the
    value under that key of the first record that has it. None if the sample has neither.
    """
    values: dict[str, KeptValue] = {}
    for name in names:
        matches = [field for field in fields if is_kept_as(field, name)]
        exact = next((field for field in matches if bare_name(field).lower() == name), None)
        if not matches:
            keys = ((record, key_of(name, record)) for record in records)
            values[name] = next((record[key] for record, key in keys if key is not None), None)
        elif exact is not None:
            values[name] = fields[exact]
        elif len(matches) == 1 and not NUMBER.search(bare_name(matches[0])):
            values[name] = fields[matches[0]]
        else:
            matches.sort(key=lambda field: number_of(bare_name(field)))
            values[name] = [fields[field] for field in matches]
    return values


def key_of(name: str, record: Mapping[str, Any]) -> str | None:
    """Return the key of a record with this name, which has no upper-case letters, or None."""
    return name if name in record else next((key for key in record if key.lower() == name), None)
