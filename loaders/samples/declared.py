"""Counts of text tokens that the data declare (`TextPreprocessor.count_field`): indexing calls no tokenizer then."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import FieldError
from orchdata.loaders.field_names import is_kept_as
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import ADDED_FIELDS
from orchdata.loaders.samples.compose import Composition
from orchdata.loaders.samples.kept import key_of
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import TextRun, expansion_of
from orchdata.loaders.samples.values import is_json
from orchdata.loaders.text.template import TextSegment

_INT32_MAX: Final = 2**31 - 1
_DIGITS: Final = 20
_WHOLE_NUMBER: Final = re.compile("[0-9]{1,18}")


class Declared(NamedTuple):
    """Numbers of text tokens of a sample: special tokens included, those of media not. `loss` is None if the data do
    not declare it.
    """

    tokens: int
    loss: int | None


def fields_with_counts(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Return the indices of the members to read for `declared_counts`, besides those of the text."""
    names = recipe.text.count_fields
    return [at for at, member in enumerate(members) if any(is_kept_as(member.field, name) for name in names)]


def declared_counts(
    members: Sequence[Member], payloads: Mapping[int, bytes | memoryview], recipe: Recipe
) -> Declared | None:
    """Return the counts that a sample declares; None if the recipe names no field for them. Raises FieldError."""
    names = recipe.text.count_fields
    if not names:
        return None
    tokens, *loss = [_count(name, members, payloads) for name in names]
    if loss and loss[0] > tokens:
        raise FieldError(names[1], f"declares {loss[0]} tokens with loss, and {names[0]} declares {tokens} tokens")
    return Declared(tokens, loss[0] if loss else None)


def _count(name: str, members: Sequence[Member], payloads: Mapping[int, bytes | memoryview]) -> int:
    for at, member in enumerate(members):
        if at in payloads and is_kept_as(member.field, name):
            if member.error is not None:
                raise FieldError(member.field, member.error)
            return _checked(_parsed(bytes(payloads[at])), name)
    for at, member in enumerate(members):
        if at in payloads and member.kind == TEXT and is_json(member.field.removesuffix(".gz")):
            record = _parsed(bytes(payloads[at]))
            added = record.get(ADDED_FIELDS) if isinstance(record, dict) else None
            for values in (record, added):
                if isinstance(values, dict) and (key := key_of(name, values)) is not None:
                    return _checked(values[key], name)
    raise FieldError(
        name,
        "the sample has no such field, column or key, which TextPreprocessor(count_field=...) reads: declare a count "
        "for every sample, or leave count_field out",
    )


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data[:_DIGITS].decode(errors="replace")


def _checked(value: object, name: str) -> int:
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value.strip()):  # cells of CSV are texts
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32_MAX:
        raise FieldError(name, f"declares {value!r:.40} tokens: write a whole number from 0 to {_INT32_MAX}")
    return value


def declared_runs(
    declared: Declared, composition: Composition, sizes: Sequence[PartSize], recipe: Recipe
) -> list[TextRun | int]:
    """Return the spans of an outline with declared counts: only their sums are right.

    Raises:
        FieldError: what carries loss is unknown, or there are more tokens without loss than tokens.
    """
    expansions = [expansion_of(recipe, name, size) for (name, _), size in zip(composition.parts, sizes, strict=True)]
    between = [name for (name, _), each in zip(composition.parts, expansions, strict=True) if not each.bare]
    if between:
        raise FieldError(
            between[0],
            f"text stands between the tokens of {between[0]}, and depends on the size of a part: leave count_field out",
        )
    loss = declared.loss if declared.loss is not None else _loss_of_plain_text(declared, composition, recipe)
    runs = [TextRun(loss, True, False, -1), TextRun(declared.tokens - loss, False, False, -1)]
    return [*(run for run in runs if run.num_tokens), *range(len(sizes))]


def _loss_of_plain_text(declared: Declared, composition: Composition, recipe: Recipe) -> int:
    """Return the number of tokens with loss: all but those that the recipe puts around media and before the text."""
    text, segments = recipe.text, composition.segments
    if composition.is_chat or any(isinstance(each, TextSegment) and not each.loss for each in segments):
        raise FieldError(
            composition.where,
            "a chat, or a prompt with its completion, and only TextPreprocessor(loss_count_field=...) says how many of "
            "its tokens carry loss: name a field that declares it, or leave count_field out",
        )
    slots = [recipe.slots[name] for name, _ in composition.parts]
    without = sum([(slot.start_id is not None) + (slot.end_id is not None) for slot in slots])
    # The first token of all carries no loss, and an end token only after text.
    begins_with_text = not segments or isinstance(segments[0], TextSegment)
    ends_with_text = bool(segments) and isinstance(segments[-1], TextSegment)
    if text.bos_token_id is not None or (begins_with_text and declared.tokens):
        without += 1
    if text.eos_token_id is not None and not ends_with_text:
        without += 1
    if without > declared.tokens:
        raise FieldError(
            text.count_fields[0], f"declares {declared.tokens} tokens, and {without} of the sample carry no loss"
        )
    return declared.tokens - without
