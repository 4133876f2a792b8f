"""Checks that the parts of a sample agree: its words are read, and its media are those that its texts name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member, Uses, stem
from orchdata.loaders.samples.values import json_or_text, text_of
from orchdata.loaders.text.chat_keys import check_record, phrases, says, shown
from orchdata.loaders.text.conversation import Document, named_in, why_unread
from orchdata.loaders.text.jinja import JinjaTemplate, Work
from orchdata.loaders.text.media_words import holds_mark, is_part, media_marks, words_of_media
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.template import Placeholder, Segment, TextSegment, Turn
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words

NO_RECORD: Final = "Recipe.record returned a record that cannot be used"
RENAMED: Final = "ShardDataset(columns={old name: new name}) renames a field"
OWN_LAYOUT: Final = "Recipe(record=...), a function of yours, reads data in a layout of its own (docs/layouts.md)"


def check_context(
    turns: Sequence[Turn],
    context: Iterable[int],
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Raise FieldError if fields that belong to the conversation (a column of tools) say more than its turns."""
    record: dict[str, Any] = {}
    for index in context:
        record[stem(members[index].field)] = json_or_text(members[index], texts[index], recipe)
    try:
        check_record(record, (), turns, Work())
    except DecodeError as error:
        raise error.at(", ".join(members[index].field for index in context)) from None


def check_unread(
    documents: Mapping[int, Document],
    uses: Uses,
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Raise FieldError if a sample without text has words in members that are not read."""
    for index, document in documents.items():
        reason = why_unread(document.rest)
        if reason is not None:
            said = f"{NO_RECORD}: {reason}" if recipe.record is not None else f"{reason}; {RENAMED}, and {OWN_LAYOUT}"
            raise FieldError(members[index].field, said)
    json = {*uses.json}
    for index in uses.chat_context:
        if index not in json and says(json_or_text(members[index], texts[index], recipe)):
            raise FieldError(members[index].field, "belongs to a conversation, and the sample has none")
    unread = [members[index].field for index in uses.other_text if _has_words(members[index], texts[index], recipe)]
    if unread:
        field, *more = (name.removesuffix(WORDS_SUFFIX) for name in unread)
        raise FieldError(field, f"has the sample's only words and is not read: {_way_out(unread[0], more)}")


def _has_words(member: Member, payload: bytes | memoryview, recipe: Recipe) -> bool:
    """Whether an unread field contains words. Default text fields do not count: the recipe left them out on purpose."""
    name = stem(member.field)
    if name.endswith(WORDS_SUFFIX):
        return says(json_or_text(member, payload, recipe))
    if name.rpartition(".")[2] in TEXT_FIELDS or not names_words(name):
        return False
    return says(text_of(member, payload, recipe))


def _way_out(field: str, more: Sequence[str]) -> str:
    """Say how to read the words of a field, or of several fields."""
    if more:
        return (
            f"{', '.join(map(repr, more))} too: {OWN_LAYOUT}, or write them as one chat, a list of turns under "
            "messages; leave them out if the model need not see them"
        )
    if field.endswith(WORDS_SUFFIX):
        return f"a list or struct: {OWN_LAYOUT}, or write its words as a string column, or leave it out of the data"
    return f"TextPreprocessor(fields=({stem(field)!r},)) reads them; leave them out if the model need not see them"


def check_one_sample(members: Sequence[Member], uses: Uses) -> None:
    """Raise FieldError if several media each have a text of their own name: these are samples whose names have dots.

    Numbers are no such names: parts of a sample and their texts may be numbered.
    """
    texts = {_name_of(members[index]) for index in uses.plain}
    media = {_name_of(members[index]): members[index].field for part in uses.media.values() for index in part}
    fields = [field for name, field in media.items() if name in texts and name and not name.isdecimal()]
    if len(fields) > 1:
        raise FieldError(
            fields[0],
            f"{', '.join(map(shown, fields[:3]))} each have a text of their own under one key, which ends at the first "
            "dot of a file's name: if these are several samples, rename the files so that their names have no other "
            "dot; if they are one, number them: 0.jpg, 0.txt, 1.jpg, 1.txt",
        )


def _name_of(member: Member) -> str:
    return member.field.rpartition(".")[0]


def unplaced(
    media: Mapping[str, tuple[int, ...]], segments: Sequence[Segment], where: str, recipe: Recipe
) -> list[str]:
    """Check media against placeholders. Return the modalities without placeholders: their media come first."""
    marks = [segment.modality for segment in segments if isinstance(segment, Placeholder)]
    if not marks:
        return [name for name, indices in media.items() if indices]
    for name in sorted(set(marks)):
        mark = recipe.slots[name].mark
        if name not in media:
            raise FieldError(where, f"{mark} placeholder, but the recipe has no {name} preprocessor")
        count, wanted = len(media[name]), marks.count(name)
        if count < wanted:
            way_out = f"where the mark is text, {_unmarked(name)}"
            if isinstance(recipe.text.template, JinjaTemplate):
                way_out = "its bytes are a field or column of the sample, as no URL or path is opened"
            if recipe.record is not None:
                way_out += f"; Recipe.record must leave the placeholder out where a sample has no {name}"
            raise FieldError(
                where, f"{mark} placeholder {count + 1} of {wanted} has no {name}: the sample holds {count}; {way_out}"
            )
        if count > wanted:
            raise FieldError(where, f"{count} {_plural(name, recipe)} but {wanted} {mark} placeholders")
    return [name for name, indices in media.items() if indices and name not in marks]


def check_marks(
    segments: Iterable[Segment], said: Callable[[], Any] | None, where: str, recipe: Recipe, *, beside_media: bool
) -> None:
    """Raise FieldError for a mark of media, of any tool, that is left in the text.

    Left alone are added tokens that stand for no part of media, and `<image>` where the recipe says that it is text.

    Args:
        said: returns the values that a chat is from: other marks in its text are its template's. None for other texts.
    """
    placeholders = recipe.rules.words.slots.values()
    plain = [f"<{name}>" for name, slot in recipe.slots.items() if not slot.mark]
    for segment in segments:
        for mark in media_marks(segment.text, beside_media=beside_media) if isinstance(segment, TextSegment) else ():
            is_token = recipe.text.is_added_token(mark) and not is_part(mark) and mark not in placeholders
            if (
                is_token
                or mark in plain
                or (said is not None and not any(mark in phrase for phrase in phrases(said())))
            ):
                continue
            if (own := dict(recipe.rules.words.marks).get(mark)) is not None:  # next to items that place its parts
                raise FieldError(where, holds_mark(own, mark))
            raise FieldError(
                where,
                f"{shown(mark)} is no placeholder here, and the model would read it as text: "
                f'{_way_to_read(mark, recipe)}; leave it out, or TextPreprocessor(marks="keep") keeps it',
            )


def _way_to_read(mark: str, recipe: Recipe) -> str:
    name = next((name for name in recipe.modalities if name in words_of_media(mark) and recipe.slots[name].mark), None)
    if name is None:
        return "write what it stands for in its place, in the data or by Recipe(record=...)"
    own = f"<{name}>"
    if name in BUILTINS and recipe.slots[name].mark == own != mark and not any(map(str.isdigit, mark)):
        return f"TextPreprocessor({name}_placeholder={mark!r}) reads it"
    own = own if own in dict(recipe.rules.words.marks) else str(recipe.slots[name].mark)
    return f"write {own} for it, in the data or by Recipe(record=...)"


def check_named(named: Mapping[str, list[str]], members: Sequence[Member], recipe: Recipe, *, exactly: bool) -> None:
    for modality, names in named.items():
        if modality not in recipe.modalities:
            continue
        kind = recipe.kinds.index(modality)
        count = sum(member.kind == kind for member in members)
        if count < len(names) or (exactly and count > len(names)):
            what = "conversation" if exactly else "record"
            raise FieldError(
                modality,
                f"the {what} names {len(names)} ({', '.join(map(shown, names[:3]))}), the sample holds "
                f"{count or 'none'}",
            )


def check_named_columns(
    named: Iterable[int], members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> None:
    """Check columns of paths: media are the row's own cells, and no path is opened."""
    for index in named:
        name = members[index].field.lower().removesuffix(WORDS_SUFFIX)
        value = {name: json_or_text(members[index], texts[index], recipe)}
        check_named(named_in(value, recipe.rules.words), members, recipe, exactly=False)


def check_media_order(document: Document, members: Sequence[Member], uses: Uses) -> None:
    """Raise FieldError if a conversation names the sample's own members in another order than that of their slots."""
    for said in (document.named, document.placed):
        for modality, names in said.items():
            own = uses.media.get(modality, ())
            if len(own) < 2 or len(own) != len(names):
                continue
            fields = [members[index].field.lower() for index in own]
            known = {*fields}
            named = [_own_field(name, known) for name in names]
            if None not in named and named != fields:
                raise FieldError(
                    modality,
                    f"the conversation names {', '.join(map(shown, names[:3]))}, and media fill their places in the "
                    f"order of the fields: {', '.join(fields[:3])}; number the fields as they are named (0.jpg, 1.jpg)",
                )


def _own_field(name: str, fields: Collection[str]) -> str | None:
    """The field of a name: the name itself, its basename, or (as members are split) the part after its first dot."""
    base = name.lower().rpartition("/")[2]
    return next((field for field in (name.lower(), base, base.partition(".")[2]) if field in fields), None)


def _plural(name: str, recipe: Recipe) -> str:
    return recipe.modalities[name].plural or f"{name} parts"


def _unmarked(name: str) -> str:
    """Say how to turn its mark into plain text."""
    return (
        f'TextPreprocessor({name}_placeholder="")' if name in BUILTINS else 'give the modality slot = od.Slot(mark="")'
    )
