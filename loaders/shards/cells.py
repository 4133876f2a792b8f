"""Cells of columns of Parquet and Arrow files: schema -> the columns with media or text; cell -> its bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from orchdata.loaders.field_names import EMPTY, FILE_KEYS, NULL, VALUE, is_edge, is_kept_as
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import BUILTINS, OTHER, TEXT
from orchdata.loaders.shards.fields import ALL_AS_NAMED, ColumnRules, classify, listed_modality, names_content
from orchdata.loaders.text.conversation import WORDS_SUFFIX, names_words
from orchdata.loaders.text.messages import CHAT_KEYS, HARMLESS, is_chat_context

_WORDS = {code: kind.column_words for code, kind in enumerate(BUILTINS.values(), TEXT + 1)} | {
    TEXT: frozenset("text texts caption captions transcript transcription sentence prompt response".split()),
}
_FEATURES = {f'"{kind.hf_feature}"': code for code, kind in enumerate(BUILTINS.values(), TEXT + 1)}
_TURNS = (frozenset(("role", "content")), frozenset(("from", "value")))
_CHATS = ("messages", "conversations")
_KEYS = ("__key__", "__url__", "id")
_JSON_FORMS = frozenset(("chat", "words", "value"))
_SUFFIXES = {"words": WORDS_SUFFIX, "value": VALUE}


class Refused(Exception):
    """The file can be read, but cannot be used as a shard; the message is the reason."""


class PathOnly(Exception):
    """A media struct with a path but no bytes: paths from data are never opened."""


@dataclass(frozen=True, slots=True)
class Column:
    """How a column is read.

    Attributes:
        name: of the column.
        form: "text", "chat", "words" (lists and structs with text that are not a chat, and other types under the name
            of a text, chat or media, as JSON), "value" (anything, as JSON, that is only kept), "label" (the number of a
            class), "binary" or "struct" (bytes and path), "turns" (media inside of a chat).
        listed: whether cells are lists; each item is a field `name.0`, `name.1`, ...
        kind: its modality, or OTHER if it depends on the first bytes of each cell.
        labels: names of the classes.
        has_nulls: whether cells that are null are fields too.
    """

    name: str
    form: str
    listed: bool
    kind: int
    labels: tuple[str, ...] = ()
    has_nulls: bool = False

    @property
    def field(self) -> str:
        """The name of the field of a cell that is not a list."""
        return self.name + _SUFFIXES.get(self.form, "")

    @property
    def is_json(self) -> bool:
        """Whether the bytes of its cells are JSON."""
        return self.form in _JSON_FORMS

    def missing(self, scalar: pa.Scalar) -> str | None:
        """Return the name of the field for a cell without content; None if it has content, or nulls are no fields."""
        if not self.has_nulls:
            return None
        if not scalar.is_valid:
            return self.name + NULL
        return self.name + EMPTY if self.listed and not len(scalar.values) else None

    def item(self, scalar: pa.Scalar, number: int, limits: Limits) -> bytes | None:
        """Return the bytes of an item of a cell (of the cell itself if cells are not lists), None for null. Raises
        PathOnly, and ValueError for a cell above the limits.
        """
        excess = self.excess(scalar, limits)
        if excess is not None:
            raise ValueError(excess)
        if self.form == "turns":
            return dict(enumerate(self.media(scalar))).get(number)
        if self.listed:
            if not scalar.is_valid or number >= len(scalar.values):
                return None
            scalar = scalar.values[number]
        data = self.content(scalar)
        return None if data is None else bytes(data)

    def content(self, scalar: pa.Scalar) -> bytes | memoryview | None:
        """Return the bytes of a cell, or of an item of a list, without a copy if they are stored unchanged; None for
        null. Raises PathOnly.
        """
        if not scalar.is_valid:
            return None
        if self.form == "text":
            return text_bytes(scalar)
        if self.is_json:
            return json.dumps(
                _plain(scalar.as_py()),
                ensure_ascii=False,
                default=lambda other: None if isinstance(other, bytes) else str(other),
            ).encode()
        if self.form == "label":
            return self._label(scalar.as_py())
        content = scalar if self.form == "binary" else _plain_scalar(scalar)["bytes"]
        if self.form == "struct" and scalar.type.num_fields > 2:
            struct = _plain_scalar(scalar)
            known = {name: struct[name].as_py() for name in struct if is_edge(name, or_length=True)}
            edges = [name for name, value in known.items() if value]
            if edges and any(is_edge(name) for name, value in known.items() if value is not None):
                raise PathOnly(f"has {edges[0]!r} in its struct, which is not read: write it as a column of the row")
        if content.is_valid:
            return text_bytes(content)
        path = self.path(scalar)
        if path:
            raise PathOnly(f"contains a path, not bytes: {path!r}; embed the bytes when writing the file")
        return None

    def media(self, scalar: pa.Scalar) -> list[bytes]:
        """Return the bytes inside of the turns of a chat, in their order."""
        return _bytes_in(scalar.as_py()) if self.form in ("chat", "turns") and _holds(scalar.type, _is_binary) else []

    def _label(self, number: int) -> bytes | None:
        """Return the name of a class; None for -1, which means "no class" in `datasets`."""
        if number == -1:
            return None
        if not 0 <= number < len(self.labels):
            raise ValueError(f"class {number} of {len(self.labels)}")
        return self.labels[number].encode()

    def path(self, scalar: pa.Scalar) -> str | None:
        """Return the path of a struct with bytes."""
        if self.form != "struct" or not scalar.is_valid:
            return None
        struct = _plain_scalar(scalar)
        path = struct["path"].as_py() if "path" in struct else None
        return path if isinstance(path, str) else None

    def excess(self, scalar: pa.Scalar, limits: Limits) -> str | None:
        """Return why a cell is too large, or None; checked before any of its values becomes a Python object."""
        items = values = 0
        if self.is_json:
            items, values = _counted_in(scalar)
        elif self.listed and scalar.is_valid and scalar.values is not None:
            items = len(scalar.values)
        if items > limits.sample_parts:
            return f"a list of {items} items, above Limits.sample_parts={limits.sample_parts}"
        if values > limits.text_bytes:  # null fields count too, although no text shows them
            return f"{values} values, more than Limits.text_bytes={limits.text_bytes}"
        return None

    def kind_of(self, data: bytes | memoryview, path: str | None = None) -> int:
        """Return the modality of one cell."""
        if self.kind != OTHER or self.form == "value":
            return self.kind
        by_path = classify(path)[0] if path else OTHER
        return by_path if by_path != OTHER else sniff(data)


class Columns(list[Column]):
    """Columns that are read, in the order of the file; `names` has all of the file. If they are read as a whole, the
    facts have its keys alone.
    """

    names: frozenset[str] = frozenset()
    are_whole: bool = False

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        return {column.name: column for column in self}


def text_bytes(scalar: pa.Scalar) -> memoryview:
    """Return the stored bytes of a string; they may not be UTF-8, for which only their sample fails."""
    return memoryview(_plain_scalar(scalar).as_buffer())


def _plain_scalar(scalar: pa.Scalar) -> pa.Scalar:
    return scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar


def _counted_in(scalar: pa.Scalar) -> tuple[int, int]:
    """Count as `_counted` does, for one cell. pyarrow cannot make an array of a struct with a field of type null."""
    if not scalar.is_valid:
        return 0, 1
    if _is_list(scalar.type):
        items, values = _counted(scalar.values)
        return max(len(scalar.values), items), 1 + values
    if pa.types.is_struct(scalar.type):
        counted = [_counted_in(scalar[i]) for i in range(scalar.type.num_fields)]
        return max((items for items, _ in counted), default=0), 1 + sum(values for _, values in counted)
    return 0, 1


def _counted(array: pa.Array) -> tuple[int, int]:
    """Return the length of the longest array of list items at any depth, and the number of all values."""
    if _is_list(array.type):
        inner = array.flatten()
        items, values = _counted(inner)
        return max(len(inner), items), len(array) + values
    if pa.types.is_struct(array.type):
        counted = [_counted(array.field(i)) for i in range(array.type.num_fields)]
        return max((items for items, _ in counted), default=0), len(array) + sum(values for _, values in counted)
    return 0, len(array)


def renamed(schema: pa.Schema, rules: ColumnRules) -> pa.Schema:
    """Return the schema with the new names of its columns. Two columns with one name are an error of the build."""
    names = dict(rules.names)
    return pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema], schema.metadata)


def plan_columns(schema: pa.Schema, rules: ColumnRules = ALL_AS_NAMED) -> tuple[Columns, list[str], str | None]:
    """Return (columns to read, names of the ignored columns, name of the key column) of a schema with the new names.
    The name of an ignored column with strings ends in WORDS_SUFFIX.
    """
    names = frozenset(schema.names)
    key = "__key__" if "__key__" in names else ("id" if "id" in names else None)
    new_names = dict(rules.names)
    features = {new_names.get(name, name): feature for name, feature in _huggingface_features(schema).items()}
    used = Columns()
    used.names = names
    if rules.only:
        used.are_whole = True
        for field in schema:
            if field.name in rules.only:
                labels = _labels(features.get(field.name)) if pa.types.is_integer(field.type) else ()
                used.append(Column(field.name, "value", False, OTHER, labels))
        return used, [], key
    ignored: list[str] = []
    has_text = any(names_content(field.name) and declared_kind(field.name, None) == TEXT for field in schema)
    for field in schema:
        column = None
        if field.name not in _KEYS:
            column = _plan_column(field.name, field.type, features.get(field.name))
            if column is None and not has_text and field.name not in HARMLESS and _holds(field.type, is_text):
                column = Column(field.name, "words", False, TEXT)  # perhaps the only words of its rows
        if rules.all and field.name not in ("__key__", "__url__"):
            # For a function of the user's: with nulls, and as JSON unless it is text or media.
            if column is None and is_text(field.type):  # a column that names its rows
                column = Column(field.name, "text", False, TEXT)
            if column is None or column.form in ("chat", "words"):
                column = Column(field.name, "words", False, TEXT)
            column = replace(column, has_nulls=True)
        if column is None and any(is_kept_as(field.name, name) for name in rules.kept):
            column = Column(field.name, "value", False, OTHER)
        if column is None:
            if field.name != key:
                # Structs without names of words are metadata, and strings, or lists of them, may be text.
                has_strings = is_text(field.type.value_type if _is_list(field.type) else field.type)
                ignored.append(field.name + WORDS_SUFFIX if has_strings else field.name)
        else:
            used.append(column)
            item = field.type.value_type if column.listed else field.type
            if column.form == "struct" and pa.types.is_struct(item):
                near = [each.name for each in item if each.name not in FILE_KEYS and not pa.types.is_null(each.type)]
                ignored += [f"{field.name}{'[]' * column.listed}.{name}" for name in near if not is_edge(name)]
    # These may say that a clip is a part of its file.
    edges = [name for name in ignored if is_edge(name, or_length=True)]
    if any(map(is_edge, edges)) and any(column.form in ("binary", "struct") for column in used):
        used += [Column(name, "value", False, OTHER) for name in edges]
        ignored = [name for name in ignored if name not in edges]
    return used, ignored, key


def field_clash(columns: Columns) -> str | None:
    """Return why two columns have a field of the same name, as `images` (a list) and `images.0`, or None."""
    for column in columns:
        name, _, number = column.name.rpartition(".")
        other = columns.by_name.get(name)
        if other is not None and ((other.listed and number.isdecimal()) or other.field == column.name):
            both = f"the columns {name!r} and {column.name!r}"
            return f"{both} have fields of the same name: rename one, columns={{old: new}}"
    return None


def column_of(columns: Columns, field: str) -> tuple[Column, int] | None:
    """Return the column of a field and the item in its lists (-1 if cells are not lists); None for no column."""
    by_name = columns.by_name
    if field.endswith(VALUE):
        name = field.removesuffix(VALUE)
        return (Column(name, "value", False, OTHER), -1) if name in columns.names else None
    column = by_name.get(field) or by_name.get(field.removesuffix(WORDS_SUFFIX))
    if column is not None and not column.listed:
        return column, -1
    name, _, number = field.rpartition(".")
    item = int(number) if number.isdecimal() and len(number) < 10 else -1
    column = by_name.get(name)
    if column is not None and column.form == "chat":
        column = replace(column, form="turns", listed=True, kind=OTHER)
    return (column, item) if column is not None and column.listed and item >= 0 else None


def sniff(data: bytes | memoryview) -> int:
    """Return the kind by the first bytes, or OTHER."""
    head = bytes(data[:16])
    return next((code for code, kind in enumerate(BUILTINS.values(), TEXT + 1) if kind.matches_magic(head)), OTHER)


def _plan_column(name: str, type_: pa.DataType, feature: object) -> Column | None:
    if _is_turns(type_) or any(_is_turns(type_.field(chat).type) for chat in _CHATS if chat in _field_names(type_)):
        return Column(name, "chat", False, TEXT)
    labels = _labels(feature)
    if labels and pa.types.is_integer(type_):
        return Column(name, "label", False, TEXT, labels)
    listed = _is_list(type_)
    item = type_.value_type if listed else type_
    if pa.types.is_dictionary(item) or pa.types.is_run_end_encoded(item):
        item = item.value_type
    if is_text(item) and not listed:
        return Column(name, "text", False, TEXT)
    if _is_binary(item):
        return Column(name, "binary", listed, declared_kind(name, feature))
    if pa.types.is_struct(item):
        fields = {item.field(i).name: item.field(i).type for i in range(item.num_fields)}
        if "bytes" in fields and _is_binary(fields["bytes"]):
            return Column(name, "struct", listed, declared_kind(name, feature))
    if (listed or pa.types.is_struct(type_)) and is_chat_context(name):  # tools of a chat: read to see if they are used
        return Column(name, "chat", False, TEXT)
    is_nested = listed or pa.types.is_struct(type_)
    is_named = names_words(name) and (not is_nested or _holds(type_, is_text))
    if is_named or _holds_words(name, type_) or names_content(name) or (is_nested and listed_modality(name)):
        return Column(name, "words", False, TEXT)
    return None


def _holds(type_: pa.DataType, is_leaf: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type is such a leaf, or a list or struct that contains one at some depth."""
    if _is_list(type_):
        return _holds(type_.value_type, is_leaf)
    return is_leaf(type_) or (pa.types.is_struct(type_) and any(_holds(field.type, is_leaf) for field in type_))


def _bytes_in(value: object) -> list[bytes]:
    """Return all bytes in a value of lists and structs, in their order."""
    if isinstance(value, bytes):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [each for item in items for each in _bytes_in(item)]


def _holds_words(name: str, type_: pa.DataType) -> bool:
    """Return whether a list or struct has text by its name, or by the names of its fields."""
    while _is_list(type_):
        type_ = type_.value_type
    if not pa.types.is_struct(type_):
        return False
    texts = {type_.field(i).name for i in range(type_.num_fields) if is_text(type_.field(i).type)}
    named = (name, *_field_names(type_)) if texts else _field_names(type_)
    return any(map(names_words, named)) or {"user", "assistant"} <= texts


def declared_kind(name: str, feature: object) -> int:
    """Return the modality by Hugging Face's metadata, by the suffix, or by a word of the name."""
    declared = json.dumps(feature)
    for feature_name, code in _FEATURES.items():
        if feature_name in declared:
            return code
    kind, _ = classify(name.lower())
    if name in CHAT_KEYS:
        return TEXT
    if kind != OTHER and name not in ("input", "output"):  # which may be media
        return kind
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((kind for kind, kind_words in _WORDS.items() if words & kind_words), OTHER)


def _labels(feature: object) -> tuple[str, ...]:
    """Return the class names of a ClassLabel feature."""
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _huggingface_features(schema: pa.Schema) -> Mapping[str, object]:
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _is_list(type_: pa.DataType) -> bool:
    kinds = pa.types
    is_plain = kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_)
    return bool(is_plain or kinds.is_list_view(type_) or kinds.is_large_list_view(type_))


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def _is_binary(type_: pa.DataType) -> bool:
    kinds = pa.types
    is_plain = kinds.is_binary(type_) or kinds.is_large_binary(type_) or kinds.is_fixed_size_binary(type_)
    return bool(is_plain or kinds.is_binary_view(type_))


def _field_names(type_: pa.DataType) -> frozenset[str]:
    return frozenset(type_.field(i).name for i in range(type_.num_fields)) if pa.types.is_struct(type_) else frozenset()


def _is_turns(type_: pa.DataType) -> bool:
    """Return whether it is a list of turns, or a struct of lists with their keys (`datasets`: a Sequence of dicts)."""
    if _is_list(type_):
        names = _field_names(type_.value_type)
        return any(turn <= names for turn in _TURNS)
    names = _field_names(type_)
    if not any(turn <= names for turn in _TURNS):
        return False
    return all(_is_list(type_.field(i).type) for i in range(type_.num_fields))


def _plain(value: object) -> object:
    """Drop the nulls that a common struct type forces on every dict; turn structs of lists into lists of dicts."""
    if isinstance(value, Mapping):
        items = {name: _plain(item) for name, item in value.items() if item is not None}
        if any(turn <= items.keys() for turn in _TURNS) and all(isinstance(item, list) for item in items.values()):
            columns: dict[str, Sequence[Any]] = {name: item for name, item in items.items() if isinstance(item, list)}
            if len({len(column) for column in columns.values()}) == 1:
                return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return items
    return [_plain(item) for item in value] if isinstance(value, list) else value
