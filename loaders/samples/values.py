"""Values of members of a sample: text, columns, and JSON -> what a function of the user's and a batch get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import EMPTY, NULL, VALUE
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member
from orchdata.loaders.text.conversation import parse_json
from orchdata.loaders.text.preprocessor import decode_utf8
from orchdata.loaders.text.words import WORDS_SUFFIX

_SUFFIXES: Final = ("json", "jsn", "jsonl")
_MOST_LEVELS: Final = 48
"""Most levels of lists and dicts in a value: batches with deeper ones could not be sent to other processes."""


def check_text(member: Member, payload: bytes | memoryview, recipe: Recipe) -> None:
    """Raise FieldError if a text is bad, or above the limit."""
    if member.error is not None:
        raise FieldError(member.field, member.error)
    limit = recipe.limits.text_bytes
    if len(payload) > limit:
        raise FieldError(member.field, f"{len(payload)} bytes of text, above the limit text_bytes={limit}")


def text_of(member: Member, payload: bytes | memoryview, recipe: Recipe) -> str:
    """Return the text of a member. Raises FieldError."""
    check_text(member, payload, recipe)
    try:
        return decode_utf8(payload)
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__


def json_or_text(member: Member, payload: bytes | memoryview, recipe: Recipe) -> Any:
    """Return the value of a member that is JSON, else its text. Raises FieldError."""
    text = text_of(member, payload, recipe)
    try:
        return parse_json(text.encode())
    except (DecodeError, UnicodeEncodeError):
        return text


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
