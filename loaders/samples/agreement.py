"""Checks of a sample: its words are read, its clips are no longer than it says, its media are those that its texts
name, in their places, and no mark is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import NAMES_EDGE, bare_name, is_edge, why_not_whole
from orchdata.loaders.modalities.builtin import BUILTINS, TEXT
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Fields, Member, json_value, stem, uses_of
from orchdata.loaders.text.conversation import WORDS_SUFFIX, Document, is_whole, parse_json, why_unread
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    CHAT_KEYS,
    HARMLESS,
    Chat,
    check_record,
    has_strings,
    is_wrong,
    kind_of,
    phrases,
    says,
    shown,
)
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.template import (
    NOT_DECODED,
    Placeholder,
    Segment,
    TextSegment,
    holds_mark,
    is_part,
    media_marks,
    words_of_media,
)
from orchdata.loaders.unread_names import is_empty

NO_RECORD: Final = "Recipe.record returned a record that cannot be used"
RENAMED: Final = "ShardDataset(columns={old name: new name}) renames a field"
SEVERAL_TEXTS: Final = (
    "Recipe(record=...) reads all; a key ends at the first dot of a file's name: if they are several samples, rename "
    "the files without further dots"
)
LAST_DOT: Final = ', or pass ShardDataset(key="last_dot"), --key last_dot'
"""Follows SEVERAL_TEXTS if all samples of the shard then have the same fields."""
OWN_LAYOUT: Final = "Recipe(record=...), a function of yours, reads data in a layout of its own (docs/layouts.md)"


def check_context(chat: Chat, context: Sequence[int], fields: Fields) -> None:
    """Raise FieldError if fields that belong to the conversation (a column of tools) say more than its turns."""
    record = {stem(fields.name(index)): fields.json_or_text(index) for index in context}
    try:
        check_record(record, (), chat.texts)
    except DecodeError as error:
        raise error.at(", ".join(map(fields.name, context))) from None


def check_unread(documents: Mapping[int, Document], used: Collection[int], fields: Fields) -> None:
    """Raise FieldError if a sample without a text to learn has words that are neither read nor kept."""
    members, texts, recipe, uses = fields
    for index in uses.json:
        document = documents[index]
        record = json_value(members[index].field, texts[index])
        if isinstance(record, dict):
            read = document.text if index in used else None
            record = {key: value for key, value in record.items() if key.lower() not in recipe.keep and value != read}
        if index in uses.kept or (document.is_chat and not (isinstance(record, dict) and {*record} & {*CHAT_KEYS})):
            continue  # turns alone
        reason = why_unread(record, recipe.rules, is_chat=document.is_chat)
        if reason is not None:
            said = f"{NO_RECORD}: {reason}" if recipe.record is not None else f"{reason}; {RENAMED}, and {OWN_LAYOUT}"
            raise FieldError(members[index].field, said)
    json = {*uses.json, *used}
    for index in uses.chat_context:
        if index not in json and says(fields.json_or_text(index)):
            raise FieldError(members[index].field, "belongs to a conversation, and the sample has none")
    spare = [index for index in uses.spare if index in texts]
    others = [index for index in (*uses.other_text, *spare) if index not in json and index not in uses.kept]
    unread = [members[index].field for index in others if _has_words(fields, index)]
    if unread:
        field, *more = (name.removesuffix(WORDS_SUFFIX) for name in unread)
        kept = tuple(stem(name) for name in (field, *more))
        filled = [at for at in others if stem(members[at].field) not in HARMLESS and not is_empty(texts[at])]
        if unread[0].endswith(WORDS_SUFFIX) and not more:
            way_out = f"a list or struct: {OWN_LAYOUT}, or write its words as a string column, or leave it out"
        elif more or len(filled) != 1 or not is_whole(unread[0]):  # an answer that is a number is not alone
            too = f"{', '.join(map(repr, more))} too: " if more else ""
            way_out = f"{too}{OWN_LAYOUT}, or write what is to be learned as one chat, a list of turns under messages"
        else:
            chosen = f"TextPreprocessor(fields=({stem(unread[0])!r},))"
            way_out = f"{chosen} reads them; leave them out if the model need not see them"
        raise FieldError(
            field,
            f"has the sample's only words and is not read: {way_out}; Recipe(keep={kept!r}) delivers what is not "
            "to be learned",
        )


def _has_words(fields: Fields, at: int) -> bool:
    """Whether an unread field contains words. Default text fields do not count: the recipe left them out on purpose."""
    name = stem(fields.name(at))
    if name.removesuffix(WORDS_SUFFIX) in HARMLESS or name.rpartition(".")[2] in TEXT_FIELDS:
        return False
    return has_strings(fields.json_or_text(at)) if name.endswith(WORDS_SUFFIX) else says(fields.text(at))


def check_unfit(unfit: Iterable[int], fields: Fields) -> None:
    """Raise FieldError for a column with the name of a text or chat, whose values are of another type."""
    for index in unfit:
        value = fields.json_or_text(index)
        if is_wrong(value):
            name = fields.name(index).removesuffix(WORDS_SUFFIX)
            raise FieldError(
                name,
                f"{kind_of(value)}, not a text: write the column as strings or turns, or rename it with columns=, or "
                f"{OWN_LAYOUT}",
            )


def check_one_text(fields: Fields, texts: Sequence[int]) -> None:
    """Raise FieldError for several texts of one name: one of them is the sample's, or they are of several samples."""
    if len(texts) > 1:
        names = [fields.name(index) for index in texts]
        chooses = f"TextPreprocessor(fields=({shown(names[0].removesuffix('.gz'))},)) chooses one, and "
        if len({name.removesuffix(".gz") for name in names}) < len(names):
            chooses = ""
        raise FieldError(
            names[1], f"{', '.join(map(shown, names[:3]))} are texts of one sample: {chooses}{SEVERAL_TEXTS}"
        )


def edges_of(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Return the indices of columns, and of fields of containers, that may name a stretch of the sample's clip."""
    if not any(has_length(name, recipe) for name, media in uses_of(members, recipe).media.items() if media):
        return []
    return [index for index, member in enumerate(members) if is_edge(bare_name(member.field), or_length=True)]


def check_whole(
    parts: Iterable[tuple[str, int]],
    items: Mapping[int, Mapping[str, Any]],
    record: Mapping[str, Any] | None,
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Raise FieldError for a clip that is longer than the stretch of it that an item of a turn, the user's record, or
    else the row names.
    """
    has_clips = any(has_length(name, recipe) for name, _ in parts)
    if not has_clips and not any(items.values()):
        return
    media: dict[str, list[int]] = {}
    for name, index in parts:
        media.setdefault(name, []).append(index)
    records = [] if not has_clips else [record] if record is not None else [*_records(members, texts)]
    for name, indices in media.items():
        modality, others = recipe.modalities[name], media.keys() - {name}
        keys = [key for key, its_modality in recipe.rules.words.records.items() if its_modality == name]
        for number, index in enumerate(indices):
            member = members[index]
            seconds = modality.seconds(member.header[: modality.num_facts] or (0,) * 5)
            reasons = [why_not_whole(items.get(index, {}), seconds, others, strict=True)]
            for value in records if seconds < math.inf else ():
                named = next((value[key] for key in keys if value.get(key)), None)
                named = named if isinstance(named, list) else [named]
                own = named[number] if number < len(named) and isinstance(named[number], dict) else {}
                reasons.append(why_not_whole(own, seconds))
                # A list of frames is what it is.
                is_listed = (
                    "frames" in own
                    or any(isinstance(each, list) for each in named)
                    or member.field.endswith("frames.json")
                )
                if len(indices) == 1 and not is_listed:
                    reasons.append(why_not_whole(value, seconds, others))
            for reason in filter(None, reasons):
                raise FieldError(member.field, reason)


def _records(members: Sequence[Member], texts: Mapping[int, bytes | memoryview]) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a sample that may name a stretch, and its row."""
    row: dict[str, Any] = {}
    for index, payload in texts.items():
        is_field = is_edge(name := bare_name(members[index].field), or_length=True)
        if is_field or (members[index].kind == TEXT and NAMES_EDGE.search(payload)):
            value = value_of(payload)
            if is_field:
                row[name] = value
            elif isinstance(value, dict):
                yield value
    yield row


def value_of(payload: bytes | memoryview) -> Any:
    """Return the JSON value of a field, or its text."""
    try:
        return parse_json(payload)
    except DecodeError:
        return bytes(payload).decode(errors="replace")


def has_length(name: str, recipe: Recipe) -> bool:
    return type(recipe.modalities[name]).seconds is not Modality.seconds


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
            is_rendered = isinstance(recipe.text.template, JinjaTemplate)
            unmarked = 'give the modality slot = od.Slot(mark="")'
            if name in BUILTINS:
                unmarked = f'TextPreprocessor({name}_placeholder="")'
            unmarked = "take it out of the data" if is_rendered else unmarked
            way_out = f"its bytes are a field or column of the sample; where the mark is text, {unmarked}"
            if recipe.record is not None:
                way_out += f"; Recipe.record must leave the placeholder out where a sample has no {name}"
            raise FieldError(
                where, f"{mark} placeholder {count + 1} of {wanted} has no {name}: the sample holds {count}; {way_out}"
            )
        if count > wanted:
            parts = recipe.modalities[name].plural or f"{name} parts"
            raise FieldError(where, f"{count} {parts} but {wanted} {mark} placeholders")
    return [name for name, indices in media.items() if indices and name not in marks]


def check_marks(
    segments: Iterable[Segment], said: Callable[[], Any] | None, where: str, recipe: Recipe, *, next_to_media: bool
) -> None:
    """Raise FieldError for a mark of media, of any tool, that is left in the text. Left alone are added tokens that
    stand for no part of media, and `<image>` where the recipe says that it is text. `said` returns the values that a
    chat is from: other marks in its text are its template's.
    """
    # Templates write the same text before and after each turn.
    marked = {
        segment.text: None
        for segment in segments
        if type(segment) is TextSegment and ("<" in segment.text or "[" in segment.text)
    }
    for mark in [mark for text in marked for mark in media_marks(text, next_to_media=next_to_media)]:
        placeholders = recipe.rules.words.slots.values()
        is_token = recipe.text.is_added_token(mark) and not is_part(mark) and mark not in placeholders
        if (
            is_token
            or any(mark == f"<{name}>" and not slot.mark for name, slot in recipe.slots.items())
            or (said is not None and not any(mark in phrase for phrase in phrases(said())))
        ):
            continue
        if (own := dict(recipe.rules.words.marks).get(mark)) is not None:  # next to items that place its parts
            raise FieldError(where, holds_mark(own, mark))
        name = next(
            (each for each in recipe.modalities if each in words_of_media(mark) and recipe.slots[each].mark), ""
        )
        written = f"<{name}>"
        if not name:
            read = "write what it stands for in its place, in the data or by Recipe(record=...)"
        elif name in BUILTINS and recipe.slots[name].mark == written != mark and not any(map(str.isdigit, mark)):
            read = f"TextPreprocessor({name}_placeholder={mark!r}) reads it"
        else:
            written = written if written in dict(recipe.rules.words.marks) else str(recipe.slots[name].mark)
            read = f"write {written} for it, in the data or by Recipe(record=...)"
        raise FieldError(
            where,
            f"{shown(mark)} is no placeholder here, and the model would read it as text: "
            f'{read}; leave it out, or TextPreprocessor(marks="keep") keeps it',
        )


def check_named(named: Mapping[str, list[str]], fields: Fields, *, exactly: bool) -> None:
    """Raise FieldError if a conversation or record names more media than the sample has, or not all of them."""
    for modality, names in named.items():
        if modality not in fields.recipe.modalities:
            continue
        kind = fields.recipe.kinds.index(modality)
        count = sum(member.kind == kind for member in fields.members)
        if count < len(names) or (exactly and count > len(names)):
            what = "conversation" if exactly else "record"
            raise FieldError(
                modality,
                f"the {what} names {len(names)} ({', '.join(map(shown, names[:3]))}), the sample holds "
                f"{count or 'none'}{'' if count else f'; files are read, not their decoded content: {NOT_DECODED}'}",
            )


def check_media_order(document: Document, fields: Fields) -> None:
    """Raise FieldError if a conversation names the sample's own members in another order than that of their slots."""
    for said in (document.named, {} if document.chat is None else document.chat.placed):
        for modality, names in said.items():
            own = [fields.name(index).lower() for index in fields.uses.media.get(modality, ())]
            if len(own) < 2 or len(own) != len(names):
                continue
            # Its field: the name itself, its basename, or (as members are split) the part after its first dot.
            named: list[str | None] = []
            for name in map(str.lower, names):
                base = name.rpartition("/")[2]
                named.append(next((field for field in (name, base, base.partition(".")[2]) if field in own), None))
            if None not in named and named != own:
                raise FieldError(
                    modality,
                    f"the conversation names {', '.join(map(shown, names[:3]))}, and media fill their places in the "
                    f"order of the fields: {', '.join(own[:3])}; number the fields as they are named (0.jpg, 1.jpg)",
                )
