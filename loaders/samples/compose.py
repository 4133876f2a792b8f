"""Members and texts of a sample -> its spans in order: text with token ids, and slots of media.

The indexer and the decoder both go through here, so what the index says is what decoding yields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.members import Member, Uses, stem, uses_of
from orchdata.loaders.samples.spans import (
    MediaSlot,
    SizeOf,
    Span,
    SpanWriter,
    StretchWriter,
    TextSpan,
    WholeWriter,
    Window,
)
from orchdata.loaders.text.chat_keys import check_record, is_beside, says, shown
from orchdata.loaders.text.conversation import (
    Document,
    document_of_fields,
    named_in,
    parse_json,
    read_document,
    split_placeholders,
    why_unread,
)
from orchdata.loaders.text.jinja import JinjaTemplate, Work
from orchdata.loaders.text.messages import Chat, is_record
from orchdata.loaders.text.preprocessor import TEXT_FIELDS, decode_utf8
from orchdata.loaders.text.rendering import render_chat
from orchdata.loaders.text.template import ChatTemplate, Placeholder, Segment, TextSegment, Turn, render
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words

__all__ = [
    "MediaSlot",
    "Member",
    "Span",
    "TextSpan",
    "compose",
    "compose_piece",
    "compose_with_source",
    "text_members",
    "written",
]


def text_members(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Indices of the members whose bytes `compose` needs: JSON, the preferred plain text, what belongs to a chat."""
    return list(uses_of(members, recipe).texts)


def compose(
    members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe, size_of: SizeOf
) -> list[Span]:
    """The spans of a sample in order.

    A conversation in JSON goes before plain text, plain text before a JSON "text" or "caption"; other JSON is
    metadata. Media take the places of their placeholders in field order, numbered fields by number; without any
    placeholder of their modality they come first, in the recipe's order.

    Args:
        texts: payloads of `text_members`.
        size_of: asked once for each part.

    Raises:
        FieldError: no usable field, text that cannot be read, media that do not match their placeholders.
    """
    return compose_with_source(members, texts, recipe, size_of)[0]


def compose_with_source(
    members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe, size_of: SizeOf
) -> tuple[list[Span], list[int]]:
    """`compose`, and the text members the spans come from."""
    writer, used = written(members, texts, recipe, size_of)
    return writer.close(), used


def compose_piece(
    members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe, size_of: SizeOf, window: Window
) -> list[Span]:
    """The spans of a piece of a sample that can be tokenized alone, as `measure` has found. Raises as `compose`."""
    writer, _ = written(members, texts, recipe, size_of)
    assert isinstance(writer, WholeWriter)
    return writer.window(window)


def written(
    members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe, size_of: SizeOf
) -> tuple[SpanWriter, list[int]]:
    """A writer that was given the sample's text and media, and the text members that these come from."""
    held = uses_of(members, recipe)
    media = held.media
    used, segments, is_chat = _segments(members, held, texts, recipe)
    if not used and not any(media.values()):
        raise FieldError("*", _nothing_usable(members, recipe))
    where = members[used[0]].field if used else "*"
    leading = _match(media, segments, where, recipe)
    writer = _writer(recipe, where, size_of, is_chat=is_chat)
    for modality in leading:
        for member in media[modality]:
            writer.media(modality, member)
    queues = {modality: iter(found) for modality, found in media.items() if modality not in leading}
    for segment in segments:
        if isinstance(segment, Placeholder):
            writer.media(segment.modality, next(queues[segment.modality]))
        else:
            writer.text(segment)
    return writer, used


def _writer(recipe: Recipe, where: str, size_of: SizeOf, *, is_chat: bool) -> SpanWriter:
    text = recipe.text
    if not text.whole:
        return StretchWriter(recipe, where, size_of)
    if not is_chat:
        return WholeWriter(recipe, where, size_of, lambda _: text.add_special_tokens, plain=True)
    if isinstance(text.template, JinjaTemplate):  # which says itself how a chat begins and ends
        return WholeWriter(recipe, where, size_of, text.template.adds_special_tokens, plain=False, closed=True)
    return WholeWriter(recipe, where, size_of, lambda _: False, plain=False)


def _segments(
    members: Sequence[Member], held: Uses, texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> tuple[list[int], list[Segment], bool]:
    """The sample's text: the members it is from (none: no text), its segments, and whether it is a chat."""
    rules = recipe.rules
    if held.named:
        _check_named_columns(held.named, members, texts, recipe)
    documents: dict[int, Document] = {}
    used, document = _record_of_fields(held, members, texts, recipe)
    if document is None and (held.json or held.others):
        documents = {index: _document(members[index], texts[index], recipe) for index in held.json}
        for index in held.others:
            documents[index] = _chat_only(members[index], texts[index], recipe)
        chat = _conversation(documents, members)
        if chat is not None:
            used, document = [chat], documents[chat]
    if document is not None and document.is_chat:
        known = {*used}
        beside = [index for index in held.beside if index not in known]
        _check_named(document.named, members, recipe, exactly=True)
        _check_places(document, members, held)
        if document.chat is not None:
            return [*used, *beside], _rendered(document.chat, used, beside, held, members, texts, recipe), True
        turns = document.turns or []
        if beside:
            _check_beside(turns, beside, members, texts, recipe)
        return used, list(render(turns, cast(ChatTemplate, rules.template))), True
    if document is None:
        completions = [index for index, each in documents.items() if each.completion is not None]
        used, document = (completions[:1], documents[completions[0]]) if completions else ([], None)
    if document is not None and document.completion is not None:
        stretches = zip(document.completion, (False, True), strict=True)
        return used, [part for text, loss in stretches for part in _split(text, loss, recipe)], False
    chosen = [(index, _plain(members[index], texts[index], recipe)) for index in held.plain]
    if not chosen:
        chosen = _caption(documents, members, recipe)
    if not chosen:
        _check_unread(documents, held, members, texts, recipe)
    if chosen and isinstance(rules.template, JinjaTemplate) and rules.template.pairs:
        raise FieldError(
            members[chosen[0][0]].field,
            'plain text, and the model reads a prompt and then its completion: {"prompt": ..., "completion": ...}',
        )
    segments = [part for _, text in chosen for part in _split(text, True, recipe)]
    return [index for index, _ in chosen], segments, False


def _split(text: str, loss: bool, recipe: Recipe) -> list[Segment]:
    pieces = split_placeholders(text, recipe.rules.words)
    return [TextSegment(piece, loss) if isinstance(piece, str) else piece for piece in pieces]


def _rendered(
    chat: Chat,
    used: Sequence[int],
    beside: Sequence[int],
    held: Uses,
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> list[Segment]:
    """A chat under a jinja template, which is shown what stands in fields beside it."""
    rules = recipe.rules
    fields = [members[index].field for index in (*used, *beside)]
    try:
        chat = chat.beside(
            {stem(members[index].field): _value(members[index], texts[index], recipe) for index in beside}
        )
        chat = chat.without({name for name, modality in recipe.modalities.items() if not modality.places})
        unplaced = [name for name in held.media if name in rules.words.slots and recipe.modalities[name].places]
        placed = chat.places
        chat = chat.leading(name for name in unplaced if name not in placed for _ in held.media[name])
        return render_chat(chat, cast(JinjaTemplate, rules.template), rules.words)
    except DecodeError as error:
        raise error.at(", ".join(fields)) from error.__cause__


def _record_of_fields(
    held: Uses, members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> tuple[list[int], Document | None]:
    """A record whose keys are fields, as the columns of a row are: alpaca, or prompt and completion."""
    if not isinstance(recipe.text.template, JinjaTemplate) or held.json:
        return [], None
    names = {stem(members[index].field): index for index in (*held.others, *held.beside)}
    if not is_record(names):
        return [], None
    record: dict[str, Any] = {name: _plain(members[at], texts[at], recipe) for name, at in names.items()}
    try:
        document = document_of_fields(record, recipe.rules)
    except DecodeError as error:
        raise error.at(", ".join(members[at].field for at in names.values())) from None
    return sorted(names.values()), document


def _conversation(documents: Mapping[int, Document], members: Sequence[Member]) -> int | None:
    """The member that holds the sample's conversation."""
    chats = [index for index, document in documents.items() if document.is_chat]
    for other in chats[1:]:
        mine, theirs = documents[chats[0]], documents[other]
        if (mine.turns, mine.chat) != (theirs.turns, theirs.chat):
            raise FieldError(members[other].field, f"a second conversation, beside that of {members[chats[0]].field}")
    return chats[0] if chats else None


def _caption(documents: Mapping[int, Document], members: Sequence[Member], recipe: Recipe) -> list[tuple[int, str]]:
    """The text that JSON holds where nothing goes before it: (member, text) of at most one."""
    found = [(index, document.text) for index, document in documents.items() if document.text is not None]
    for index, text in found[1:]:
        if text != found[0][1]:
            raise FieldError(members[index].field, f"a second text, beside that of {members[found[0][0]].field}")
    for index, _ in found[:1]:
        _check_named(documents[index].named, members, recipe, exactly=False)
    return found[:1]


def _check_beside(
    turns: Sequence[Turn],
    beside: Iterable[int],
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Fields beside the conversation's that belong to it (a column of tools) must not say more than its turns do."""
    held: dict[str, Any] = {}
    for index in beside:
        held[stem(members[index].field)] = _value(members[index], texts[index], recipe)
    try:
        check_record(held, (), turns, Work())
    except DecodeError as error:
        raise error.at(", ".join(members[index].field for index in beside)) from None


def _value(member: Member, payload: bytes | memoryview, recipe: Recipe) -> Any:
    text = _plain(member, payload, recipe)
    try:
        return parse_json(text.encode())
    except (DecodeError, UnicodeEncodeError):
        return text


def _check_unread(
    documents: Mapping[int, Document],
    held: Uses,
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Words that are not read must not be missed in silence where the sample has no others."""
    for index, document in documents.items():
        reason = why_unread(document.rest)
        if reason is not None:
            raise FieldError(members[index].field, reason)
    json = {*held.json}
    for index in held.beside:
        if index not in json and says(_value(members[index], texts[index], recipe)):
            raise FieldError(members[index].field, "belongs to a conversation, and the sample has none")
    unread = [members[index].field for index in held.others if _holds_words(members[index], texts[index], recipe)]
    if unread:
        field, *more = (name.removesuffix(WORDS_SUFFIX) for name in unread)
        raise FieldError(field, f"holds the sample's only words and is not read: {_way_out(unread[0], more)}")


def _holds_words(member: Member, payload: bytes | memoryview, recipe: Recipe) -> bool:
    """Text of a field that the recipe does not read; what it reads unless told otherwise was left out on purpose."""
    name = stem(member.field)
    if name.endswith(WORDS_SUFFIX):
        return says(_value(member, payload, recipe))
    if name.rpartition(".")[2] in TEXT_FIELDS or not names_words(name):
        return False
    return says(_plain(member, payload, recipe))


def _way_out(field: str, more: Sequence[str]) -> str:
    """How words of a field are read, or those of several, of which plain text would be the first alone."""
    if more:
        return (
            f"{', '.join(map(repr, more))} too: write them as one chat, a list of turns under messages; leave them out "
            "if the model need not see them"
        )
    if field.endswith(WORDS_SUFFIX):
        return "a list or struct: write its words as a string column, or leave it out of the data"
    return f"TextPreprocessor(fields=({stem(field)!r},)) reads them; leave them out if the model need not see them"


def _match(media: Mapping[str, tuple[int, ...]], segments: Iterable[Segment], where: str, recipe: Recipe) -> list[str]:
    """Check media against placeholders; the modalities that have none of them, whose media come first."""
    marks = [segment.modality for segment in segments if isinstance(segment, Placeholder)]
    if not marks:
        return [name for name, found in media.items() if found]
    for name in sorted(set(marks)):
        mark = recipe.slots[name].mark
        if name not in media:
            raise FieldError(where, f"{mark} placeholder, but the recipe has no {name} preprocessor")
        found, wanted = len(media[name]), marks.count(name)
        if found < wanted:
            way_out = f"where the mark is text, {_unmarked(name)}"
            if isinstance(recipe.text.template, JinjaTemplate):
                way_out = "its bytes are a field or column of the sample, as no URL or path is opened"
            raise FieldError(
                where, f"{mark} placeholder {found + 1} of {wanted} has no {name}: the sample holds {found}; {way_out}"
            )
        if found > wanted:
            raise FieldError(where, f"{found} {_plural(name, recipe)} but {wanted} {mark} placeholders")
    return [name for name, found in media.items() if found and name not in marks]


def _check_named(named: Mapping[str, list[str]], members: Sequence[Member], recipe: Recipe, *, exactly: bool) -> None:
    for modality, names in named.items():
        if modality not in recipe.modalities:
            continue
        kind = recipe.kinds.index(modality)
        found = sum(member.kind == kind for member in members)
        if found < len(names) or (exactly and found > len(names)):
            held = f"holds {found}" if found else "holds none"
            what = "conversation" if exactly else "record"
            raise FieldError(
                modality,
                f"the {what} names {len(names)} ({', '.join(map(shown, names[:3]))}), the sample {held}",
            )


def _check_named_columns(
    named: Iterable[int], members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> None:
    """Columns of paths: media are the row's own cells, and no path is opened."""
    for index in named:
        name = members[index].field.lower().removesuffix(WORDS_SUFFIX)
        value = {name: _value(members[index], texts[index], recipe)}
        _check_named(named_in(value, recipe.rules.words), members, recipe, exactly=False)


def _check_places(document: Document, members: Sequence[Member], held: Uses) -> None:
    """Where a conversation names the sample's own members, it must name them in the order in which they fill places."""
    for said in (document.named, document.placed):
        for modality, names in said.items():
            own = held.media.get(modality, ())
            if len(own) < 2 or len(own) != len(names):
                continue
            fields = [members[index].field.lower() for index in own]
            known = {*fields}
            found = [_own_field(name, known) for name in names]
            if None not in found and found != fields:
                raise FieldError(
                    modality,
                    f"the conversation names {', '.join(map(shown, names[:3]))}, and media fill their places in the "
                    f"order of the fields: {', '.join(fields[:3])}; number the fields as they are named (0.jpg, 1.jpg)",
                )


def _own_field(name: str, fields: Collection[str]) -> str | None:
    """The field that a name stands for: itself, its basename, or (as members are split) what follows its first dot."""
    base = name.lower().rpartition("/")[2]
    return next((field for field in (name.lower(), base, base.partition(".")[2]) if field in fields), None)


def _document(member: Member, payload: bytes | memoryview, recipe: Recipe) -> Document:
    _check_text(member, payload, recipe)
    try:
        return read_document(payload, recipe.rules, lines=member.field.removesuffix(".gz").endswith("jsonl"))
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__


def _chat_only(member: Member, payload: bytes | memoryview, recipe: Recipe) -> Document:
    """What a text under any name says if it is a chat, else nothing."""
    document = Document()
    if member.error is None and not is_beside(stem(member.field)) and bytes(payload[:1]) in (b"[", b"{"):
        try:
            parse_json(payload)
        except DecodeError:
            return document
        document = _document(member, payload, recipe)
    return document if document.is_chat else Document()


def _plain(member: Member, payload: bytes | memoryview, recipe: Recipe) -> str:
    _check_text(member, payload, recipe)
    try:
        return decode_utf8(payload)
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__


def _check_text(member: Member, payload: bytes | memoryview, recipe: Recipe) -> None:
    if member.error is not None:
        raise FieldError(member.field, member.error)
    limit = recipe.limits.text_bytes
    if len(payload) > limit:
        raise FieldError(member.field, f"{len(payload)} bytes of text, above the limit text_bytes={limit}")


def _nothing_usable(members: Sequence[Member], recipe: Recipe) -> str:
    held = ", ".join(member.field for member in members) or "none"
    texts = ", ".join(("json", *recipe.text.fields))
    return (
        f"no usable field among: {held}; the recipe asks for {', '.join([*recipe.modalities, 'text'])} (fields {texts})"
    )


def _plural(name: str, recipe: Recipe) -> str:
    return recipe.modalities[name].plural or f"{name} parts"


def _unmarked(name: str) -> str:
    """How its mark becomes plain text."""
    return (
        f'TextPreprocessor({name}_placeholder="")' if name in BUILTINS else 'give the modality slot = od.Slot(mark="")'
    )
