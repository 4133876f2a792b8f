"""Checks that the media of a sample are those that its texts name, in their places, and that no mark is left over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from orchdata.loaders.errors import FieldError
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member, Uses
from orchdata.loaders.text.chat_keys import phrases, shown
from orchdata.loaders.text.conversation import Document
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.media_words import NOT_DECODED, holds_mark, is_part, media_marks, words_of_media
from orchdata.loaders.text.template import Placeholder, Segment, TextSegment


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
            unmarked = "take it out of the data" if is_rendered else _unmarked(name)
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
    """Raise FieldError for a mark of media, of any tool, that is left in the text.

    Left alone are added tokens that stand for no part of media, and `<image>` where the recipe says that it is text.

    Args:
        said: returns the values that a chat is from: other marks in its text are its template's. None for other texts.
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
                f"{count or 'none'}{'' if count else f'; files are read, not their decoded content: {NOT_DECODED}'}",
            )


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


def _unmarked(name: str) -> str:
    """Say how to turn its mark into plain text."""
    return (
        f'TextPreprocessor({name}_placeholder="")' if name in BUILTINS else 'give the modality slot = od.Slot(mark="")'
    )
