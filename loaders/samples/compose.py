"""Members and texts of a sample -> its spans in order: text with token ids, and slots of media.

The indexer and the decoder both use this module, so decoding yields what the index says. Checked is that the sample's
words are read, that its media are those that its texts name, in their places, and that no mark is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, cast

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import VALUE, is_edge, says_edge
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.modalities.modality import Modality, outer_of
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import ADDED_FIELDS
from orchdata.loaders.samples.members import (
    Fields,
    Member,
    Payloads,
    is_made,
    json_value,
    named_modality,
    stem,
    uses_of,
)
from orchdata.loaders.samples.record import MadeSample, made_sample
from orchdata.loaders.samples.spans import Placed, SizeOf, Span, WholeWriter, spans_in_stretches
from orchdata.loaders.shards.named_media import FILE_NAMES
from orchdata.loaders.text.conversation import (
    WORDS_SUFFIX,
    Document,
    document_of,
    document_of_fields,
    is_whole,
    named_in,
    parse_json,
    why_unread,
)
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    CHAT_KEYS,
    HARMLESS,
    PAIR_KEYS,
    Chat,
    check_record,
    has_strings,
    is_chat_context,
    is_record,
    is_wrong,
    kind_of,
    phrases,
    says,
    shown,
    split_placeholders,
)
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.rendering import render_chat
from orchdata.loaders.text.template import (
    NOT_DECODED,
    Placeholder,
    Segment,
    TextSegment,
    holds_mark,
    is_part,
    media_marks,
    render,
    words_of_media,
)
from orchdata.loaders.unread_names import REJECTED, is_empty, name_of_member, names_of_record

NO_RECORD: Final = "Recipe.record returned a record that cannot be used"
RENAMED: Final = "ShardDataset(columns={old name: new name}) renames a field"
SEVERAL_TEXTS: Final = (
    "Recipe(record=...) reads all; a key ends at the first dot of a file's name: if they are several samples, rename "
    "the files without further dots"
)
LAST_DOT: Final = ', or pass ShardDataset(key="last_dot"), --key last_dot'
"""Follows SEVERAL_TEXTS if all samples of the shard then have the same fields."""
OWN_LAYOUT: Final = "Recipe(record=...), a function of yours, reads data in a layout of its own (docs/layouts.md)"
_SHOWN_KEYS = 8
_MARK_BYTES = 16
"""A text of more bytes is no placeholder alone."""
_UNKNOWN = b"not read"


def text_members(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Indices of the members with bytes that are composed: JSON, the preferred plain text, the context of a chat."""
    uses = uses_of(members, recipe)
    is_short = uses.spare and sum(members[index].size for index in uses.plain) <= _MARK_BYTES
    return sorted({*uses.texts, *uses.spare}) if is_short else list(uses.texts)


class ReadRecord(NamedTuple):
    """A JSON value of a sample."""

    member: int | None  # None for a record of several members, or of the user's function
    value: Any
    document: Document | None  # what the sample's text was read from it; None: nothing


class Composition(NamedTuple):
    """A sample's text and media in order, before tokenizing."""

    segments: Sequence[Placed]
    parts: Sequence[tuple[str, int]]  # of the segments, those of media
    texts: list[int]  # indices of the members that the text comes from
    is_chat: bool  # a chat template made the text
    where: str  # field that errors of its text name
    items: Mapping[int, Mapping[str, Any]]  # index of a member -> what an item of a turn says about it
    record: Mapping[str, Any] | None  # made by the user's function
    records: list[ReadRecord]  # JSON in the sample

    def spans(self, recipe: Recipe, size_of: SizeOf) -> list[Span]:
        """Return all spans. `size_of` is called once for each part, in order."""
        if recipe.text.whole:
            return self.whole(recipe, size_of).close()
        return spans_in_stretches(self.segments, recipe, self.where, size_of)

    def whole(self, recipe: Recipe, size_of: SizeOf) -> WholeWriter:
        """Return all segments as one text, for a tokenizer that takes it in one call."""
        text = recipe.text
        if self.is_chat and isinstance(text.template, JinjaTemplate):  # which writes its start and its end itself
            adds = text.template.adds_special_tokens
            return WholeWriter(self.segments, recipe, self.where, size_of, adds, plain=False, closed=True)
        is_plain = not self.is_chat
        around = text.add_special_tokens and is_plain
        return WholeWriter(self.segments, recipe, self.where, size_of, lambda _: around, plain=is_plain)


def composition_of(
    members: Sequence[Member], texts: Payloads, recipe: Recipe, made: MadeSample | None = None
) -> Composition:
    """Return the text and media of a sample in order; `made` is what the user's function made. A conversation in JSON
    goes before plain text, plain text before a text in JSON; other JSON is metadata. Media fill their placeholders in
    field order, numbered fields by number. Media of a modality without any placeholder come first, in the recipe's
    order. Raises FieldError: no usable field, text that cannot be read, media that do not match their placeholders.
    """
    fields = Fields(members, texts, recipe, uses_of(members, recipe))
    if made is None and is_made(members, recipe):
        made = made_sample(fields)
    if made is not None:
        fields = fields._replace(uses=fields.uses._replace(media=made.media))
    used, segments, is_chat, records = _segments(fields) if made is None else _made_segments(made, fields)
    media, made_record = fields.uses.media, None if made is None else made.record
    has_media = any(media.values())
    if not used and not has_media:
        raise FieldError("*", _nothing_usable(fields))
    where = members[used[0]].field if used and made is None else "*"
    leading = unplaced(media, segments, where, recipe)
    if recipe.text.marks == "refuse":
        check_marks(segments, used, made_record, where, fields, is_chat=is_chat)
    if not has_media:  # then no placeholder is left
        return Composition(cast("list[Placed]", segments), [], used, is_chat, where, {}, made_record, records)
    parts = [(modality, member) for modality in leading for member in media[modality]]
    ordered: list[Placed] = [*parts]
    queues = {modality: iter(indices) for modality, indices in media.items() if modality not in leading}
    items: dict[int, Mapping[str, Any]] = {}
    for segment in segments:
        if isinstance(segment, Placeholder):
            parts.append((segment.modality, next(queues[segment.modality])))
            ordered.append(parts[-1])
            items[parts[-1][1]] = segment.about
        else:
            ordered.append(segment)
    return Composition(ordered, parts, used, is_chat, where, items, made_record, records)


def unread_in(
    composition: Composition, members: Sequence[Member], payloads: Payloads, recipe: Recipe
) -> tuple[str, ...]:
    """Return the names of what a sample has and its composition does not use: members, columns, and keys of JSON. What
    `Recipe.keep` or a count needs is among them.
    """
    if len(members) == len(composition.texts) == 1 and not composition.records:
        return ()
    found: dict[str, None] = {}
    parts = composition.parts
    has = {modality for modality, _ in parts} if parts else ()
    used: set[int | None] = {*composition.texts, *[member for _, member in parts]} if parts else {*composition.texts}
    has_one_clip = bool(parts) and sum(has_length(name, recipe) for name, _ in parts) == 1
    for at, value, document in composition.records:
        if at in composition.texts and document is not None and document.rest is not None:
            continue  # it belongs to the chat
        name = "" if at is None else name_of_member(members[at].field)
        # The keys that are read with the media of the sample.
        read: list[str] = []
        if parts and isinstance(value, dict):
            named = {name for name, member in parts if members[member].field.partition(".")[0] == name}
            read = [key for key in value if FILE_NAMES.fullmatch(key)] if named and named.isdisjoint(value) else []
            read += [key for key, each in value.items() if says_edge(key, each)] if has_one_clip else []
        names = names_of_record(value, document, recipe.rules, name, read, has)
        used.add(at)
        are_all = len(used) == len(members) and None not in used and not composition.is_chat
        if len(members) == 1 or (are_all and len(composition.records) == 1):
            return names
        found |= dict.fromkeys(names)
    if len(used) == len(members) and None not in used and not composition.is_chat:
        return tuple(found)
    for index, member in enumerate(members):
        if index in used and not (composition.is_chat and member.field.startswith(REJECTED)):
            continue
        name = name_of_member(member.field)
        if member.field.endswith(VALUE) and not is_edge(name, or_length=True):
            continue
        if not member.size or outer_of(member.field)[1]:
            continue
        if index in payloads and has_one_clip and says_edge(name, value_of(payloads[index])):
            continue
        if recipe.rules.words.records.get(name) in has or f"{name}s" in found:  # checked, or named by a key
            continue
        is_list = member.size <= 2 and member.field.endswith(WORDS_SUFFIX) and not any(member.header)
        if is_list or is_empty(payloads.get(index, _UNKNOWN)):
            continue
        if not (composition.is_chat and name != REJECTED and index in payloads and is_chat_context(name)):
            found[name] = None
    return tuple(found)


def _segments(fields: Fields) -> tuple[list[int], list[Segment], bool, list[ReadRecord]]:
    """Return the members that the sample's text is from (none: no text), its segments, whether it is a chat, and all
    JSON.
    """
    uses, recipe = fields.uses, fields.recipe
    for index in uses.media_paths:  # media are the row's own cells, and no path is opened
        value = {named_modality(fields.name(index), recipe) or "": fields.json_or_text(index)}
        check_named(named_in(value, recipe.rules.words), fields, exactly=False)
    if uses.unfit:
        check_unfit([index for index in uses.unfit if fields.name(index).partition(".")[0] in CHAT_KEYS], fields)
    # A conversation: in fields of the sample together, or in one of its members.
    values: dict[int, Any] = {}
    documents: dict[int, Document] = {}
    records: list[ReadRecord] = []
    used: list[int] = []
    document = None
    if isinstance(recipe.text.template, JinjaTemplate) and not uses.json:
        used, document, records = _record_of_fields(fields)
    if document is None and (uses.json or uses.other_text):
        for index in uses.json:
            values[index], documents[index] = _document(fields, index)
        for index in uses.other_text:
            value, documents[index] = _chat_only(fields, index)
            if documents[index].is_chat:
                values[index] = value
        chats = {at: each.chat for at, each in documents.items() if each.chat}
        found = _only(chats, "conversation", fields) if chats else None
        if found is None:  # a prompt with its completion
            found = next((at for at, each in documents.items() if each.completion is not None), None)
        if found is not None:
            used, document = [found], documents[found]
    # A member with plain text, or else the text in JSON.
    if document is None:
        if len(uses.plain) > 1:
            check_one_text(fields, uses.plain)
        if uses.unfit:
            check_unfit(uses.unfit, fields)
        for named in [each.named for each in documents.values() if each.named]:
            missing = {name: names for name, names in named.items() if not uses.media.get(name)}
            check_named(missing, fields, exactly=False)
        texts: dict[int, str | None] = {index: fields.text(index) for index in uses.plain}
        if not texts:
            texts = {index: each.text for index, each in documents.items() if each.text is not None}
            if (found := _only(texts, "text", fields)) is not None:
                check_named(documents[found].named, fields, exactly=False)
        used = [*texts][:1]
        document = Document(text=texts[used[0]] if used else None)
    segments = _segments_of(document, used, fields)
    if document.completion is None and not _learns(segments):
        check_unread(documents, used, fields)
    read = [ReadRecord(index, value, documents[index] if index in used else None) for index, value in values.items()]
    return used, segments, document.is_chat, records or read


def _learns(segments: Sequence[Segment]) -> bool:
    return any(isinstance(each, TextSegment) and each.loss and each.text.strip() for each in segments)


def _made_segments(made: MadeSample, fields: Fields) -> tuple[list[int], list[Segment], bool, list[ReadRecord]]:
    """As `_segments`, of the user's record; it is from all members."""
    recipe = fields.recipe
    try:
        document = document_of(made.record, recipe.rules)
    except DecodeError as error:
        raise error.at("*") from error.__cause__
    record = ReadRecord(None, made.record, document)
    if not document.is_chat:
        check_named(document.named, fields, exactly=False)
    segments = _segments_of(document, [], fields)
    is_text = not document.is_chat and document.completion is None
    if is_text and (document.text is None or not _learns(segments)):
        left = {key: item for key, item in made.record.items() if key != ADDED_FIELDS and item != document.text}
        reason = why_unread(left, recipe.rules) or (document.text is None and "it has neither a text nor a chat")
        if reason:
            raise FieldError("*", f"{NO_RECORD}: {reason}")
    return [*range(len(fields.members))], segments, document.is_chat, [record]


def _segments_of(document: Document, used: list[int], fields: Fields) -> list[Segment]:
    """Return the segments of what was read. `used` gets the fields that a template renders with a chat."""
    rules, chat = fields.recipe.rules, document.chat
    template = rules.template
    if chat is None:
        texts: Iterable[tuple[str, bool]] = ()
        if document.completion is not None:
            texts = zip(document.completion, (False, True), strict=True)
        elif document.text is not None:
            if isinstance(template, JinjaTemplate) and template.pairs:
                raise FieldError(
                    fields.name(used[0]) if used else "*",
                    'plain text; the model reads a prompt and then its completion: {"prompt": ..., "completion": ...}',
                )
            texts = ((document.text, True),)
        return [
            TextSegment(piece, loss) if isinstance(piece, str) else piece
            for text, loss in texts
            for piece in split_placeholders(text, rules.words.marks)
        ]
    # A chat: its media are those of the sample, in their order.
    context = [index for index in fields.uses.chat_context if index not in {*used}]
    check_named(document.named, fields, exactly=True)
    check_media_order(document, fields)
    if not isinstance(template, JinjaTemplate):
        if context:
            check_context(chat, context, fields)
        return list(render(chat.messages, template))
    return _rendered(chat, template, used, context, fields)


def _rendered(
    chat: Chat, template: JinjaTemplate, used: list[int], context: Sequence[int], fields: Fields
) -> list[Segment]:
    """Return the segments of a chat under a jinja template, which gets the fields of its context."""
    rules, modalities, media = fields.recipe.rules, fields.recipe.modalities, fields.uses.media
    used += context
    try:
        chat = chat.with_context({stem(fields.name(at)): fields.json_or_text(at) for at in context})
        chat = chat.without({name for name, modality in modalities.items() if not modality.places})
        placed = {item.modality for item in chat.placeholders}
        unplaced = [name for name in media if name in rules.words.slots and modalities[name].places]
        chat = chat.leading(name for name in unplaced if name not in placed for _ in media[name])
        rendered = render_chat(chat, template, rules.words)
        slots = chat.placeholders[::-1]
        given = {name: [each for each in slots if each.modality == name] for name in rules.words.slots}
        return [given[each.modality].pop() if isinstance(each, Placeholder) else each for each in rendered]
    except DecodeError as error:
        raise error.at(", ".join(map(fields.name, used))) from error.__cause__


def _record_of_fields(fields: Fields) -> tuple[list[int], Document | None, list[ReadRecord]]:
    """Read a record with fields as keys, such as the columns of a row, under a jinja template: alpaca, or prompt and
    completion.
    """
    uses, recipe = fields.uses, fields.recipe
    indices = sorted({*uses.other_text, *uses.chat_context})
    names = {stem(fields.name(index)): index for index in indices}
    if not is_record(names):
        return [], None, []
    check_unfit([at for name, at in names.items() if name.removesuffix(WORDS_SUFFIX) in {*PAIR_KEYS} - {name}], fields)
    if len(names) < len(indices):
        check_one_text(fields, indices)
    record: dict[str, Any] = {name: fields.text(at) for name, at in names.items()}
    try:
        document = document_of_fields(record, recipe.rules)
    except DecodeError as error:
        raise error.at(", ".join(map(fields.name, names.values()))) from None
    if document is None:
        return [], None, []
    return sorted(names.values()), document, [ReadRecord(None, record, document)]


def _only(found: Mapping[int, Any], what: str, fields: Fields) -> int | None:
    """Return the member with the sample's conversation, or text. Those of one suffix may be of two samples."""
    indices = [*found]
    for index in indices[1:]:
        one, other = fields.name(indices[0]), fields.name(index)
        if one.rpartition(".")[2] == other.rpartition(".")[2] or found[index] != found[indices[0]]:
            raise FieldError(other, f"a second {what}, besides that of {one}: {SEVERAL_TEXTS}")
    return indices[0] if indices else None


def _document(fields: Fields, at: int) -> tuple[Any, Document]:
    payload, name = fields.checked(at), fields.name(at)
    try:
        value = parse_json(payload, lines=name.removesuffix(".gz").endswith("jsonl"))
        return value, document_of(value, fields.recipe.rules)
    except DecodeError as error:
        raise error.at(name) from error.__cause__


def _chat_only(fields: Fields, at: int) -> tuple[Any, Document]:
    """Return value and document of a text under any name if it is a chat, else an empty document."""
    member, payload = fields.members[at], fields.texts[at]
    value, document = None, Document()
    if member.error is None and not is_chat_context(stem(member.field)) and bytes(payload[:1]) in (b"[", b"{"):
        try:
            parse_json(payload)
        except DecodeError:
            return value, document
        value, document = _document(fields, at)
    return value, document if document.is_chat else Document()


def _nothing_usable(fields: Fields) -> str:
    members, recipe = fields.members, fields.recipe
    if recipe.record is not None and not is_made(members, recipe):
        return f"{NO_RECORD}: it has neither a text nor a chat"
    records = [fields.json_or_text(index) for index in fields.uses.json]
    keys = [shown(key) for record in records if isinstance(record, dict) for key in record][:_SHOWN_KEYS]
    found = (", ".join(member.field for member in members) or "none") + (f" (keys {', '.join(keys)})" if keys else "")
    known = f"{', '.join([*recipe.modalities, 'text'])} (fields {', '.join(('json', *recipe.text.fields))})"
    return f"no usable field among: {found}; the recipe reads {known}; columns= renames fields, and {OWN_LAYOUT}"


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
    marks = Counter(found) if (found := [each.modality for each in segments if isinstance(each, Placeholder)]) else {}
    for name, wanted in sorted(marks.items()):
        mark = recipe.slots[name].mark
        if name not in media:
            raise FieldError(where, f"{mark} placeholder, but the recipe has no {name} preprocessor")
        count = len(media[name])
        if count < wanted:
            raise FieldError(
                where,
                f"{mark} placeholder {count + 1} of {wanted} has no {name}: the sample holds {count}; its bytes are a "
                f'field or column of the sample; where the mark is text, TextPreprocessor({name}_placeholder=""), or '
                f'od.Slot(mark="") of the modality, says so; Recipe.record must leave the placeholder out where a '
                f"sample has no {name}",
            )
        if count > wanted:
            parts = recipe.modalities[name].plural or f"{name} parts"
            raise FieldError(where, f"{count} {parts} but {wanted} {mark} placeholders")
    return [name for name, indices in media.items() if indices and name not in marks]


def check_marks(
    segments: Iterable[Segment], used: Sequence[int], record: Any, where: str, fields: Fields, *, is_chat: bool
) -> None:
    """Raise FieldError for a mark of media, of any tool, that is left in the text. Left alone are added tokens that
    stand for no part of media, `<image>` where the recipe says that it is text, and what a chat is not from (the user's
    record, or the `used` fields): other marks in its text are its template's.
    """
    # Templates write the same text before and after each turn.
    texts = dict.fromkeys([each.text for each in segments if type(each) is TextSegment])
    recipe, has_media = fields.recipe, any(fields.uses.media.values())
    marks = [media_marks(text, next_to_media=has_media) for text in texts if "<" in text or "[" in text]
    if not any(marks):
        return
    words, slots = recipe.rules.words, recipe.slots
    own = dict(words.marks)
    for mark in chain.from_iterable(marks):
        is_token = recipe.text.is_added_token(mark) and not is_part(mark) and mark not in words.slots.values()
        is_text = any(mark == f"<{name}>" and not slot.mark for name, slot in slots.items())
        if is_token or is_text:
            continue
        if is_chat and mark not in "\n".join(phrases(record or [fields.json_or_text(at) for at in used])):
            continue
        if mark in own:  # next to items that place its parts
            raise FieldError(where, holds_mark(own[mark], mark))
        name = next((each for each in recipe.modalities if each in words_of_media(mark) and slots[each].mark), "")
        written = slots[name].mark if name else "what it stands for"
        read = f"write {written} in its place, in the data or by Recipe(record=...)"
        if name in BUILTINS and written == f"<{name}>" and not any(map(str.isdigit, mark)):
            read = f"TextPreprocessor({name}_placeholder={mark!r}) reads it"
        raise FieldError(
            where,
            f"{shown(mark)} is no placeholder here, and the model would read it as text: {read}; leave it out, or "
            'TextPreprocessor(marks="keep") keeps it',
        )


def check_named(named: Mapping[str, list[str]], fields: Fields, *, exactly: bool) -> None:
    """Raise FieldError if a conversation or record names more media than the sample has, or not all of them."""
    for modality, names in named.items():
        if modality not in fields.recipe.modalities:
            continue
        kind = fields.recipe.kinds.index(modality)
        count = sum(member.kind == kind for member in fields.members)
        if count < len(names) or (exactly and count > len(names)):
            none = "" if count else f"none; files are read, not their decoded content: {NOT_DECODED}"
            raise FieldError(
                modality,
                f"the {'conversation' if exactly else 'record'} names {len(names)} "
                f"({', '.join(map(shown, names[:3]))}), the sample holds {none or count}",
            )


def check_media_order(document: Document, fields: Fields) -> None:
    """Raise FieldError if a conversation names the sample's own members in another order than that of their slots."""
    placed = {} if document.chat is None else document.chat.placed
    for modality, names in [*document.named.items(), *placed.items()]:
        own = [fields.name(index).lower() for index in fields.uses.media.get(modality, ())]
        if not 1 < len(own) == len(names):
            continue
        # Its field: the name itself, its basename, or (as members are split) the part after its first dot.
        named: list[str | None] = []
        for name in map(str.lower, names):
            base = name.rpartition("/")[2]
            named.append(next((field for field in (name, base, base.partition(".")[2]) if field in own), None))
        if None not in named and named != own:
            raise FieldError(
                modality,
                f"the conversation names {', '.join(map(shown, names[:3]))}, and media fill their places in the order "
                f"of the fields: {', '.join(own[:3])}; number the fields as they are named (0.jpg, 1.jpg)",
            )
