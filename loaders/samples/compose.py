"""Members and texts of a sample -> its spans in order: text with token ids, and slots of media.

The indexer and the decoder both use this module, so decoding yields what the index says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.field_names import VALUE, is_edge, says_edge
from orchdata.loaders.modalities.modality import outer_of
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import ADDED_FIELDS
from orchdata.loaders.samples.agreement import (
    NO_RECORD,
    OWN_LAYOUT,
    SEVERAL_TEXTS,
    check_context,
    check_marks,
    check_media_order,
    check_named,
    check_one_text,
    check_unfit,
    check_unread,
    has_length,
    unplaced,
    value_of,
)
from orchdata.loaders.samples.members import Fields, Member, Payloads, is_made, named_modality, stem, uses_of
from orchdata.loaders.samples.record import MadeSample, made_sample
from orchdata.loaders.samples.spans import Placed, SizeOf, Span, WholeWriter, spans_in_stretches
from orchdata.loaders.shards.named_media import FILE_NAMES
from orchdata.loaders.text.conversation import (
    WORDS_SUFFIX,
    Document,
    document_of,
    document_of_fields,
    named_in,
    parse_json,
    why_unread,
)
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    CHAT_KEYS,
    PAIR_KEYS,
    is_chat_context,
    is_record,
    shown,
    split_placeholders,
)
from orchdata.loaders.text.rendering import render_chat
from orchdata.loaders.text.template import Placeholder, Segment, TextSegment, render
from orchdata.loaders.unread_names import REJECTED, is_empty, name_of_member, names_of_record

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
        segments, is_chat, record = _made_segments(made, fields)
        used, records = list(range(len(members))), [record]
    else:
        used, segments, is_chat, records = _segments(fields)
    media, made_record = fields.uses.media, None if made is None else made.record
    has_media = any(media.values())
    if not used and not has_media:
        raise FieldError("*", _nothing_usable(fields))
    where = members[used[0]].field if used and made is None else "*"
    leading = unplaced(media, segments, where, recipe)
    if recipe.text.marks == "refuse":

        def said() -> Any:  # the values that a chat is from
            return [fields.json_or_text(at) for at in used] if made is None else made.record

        check_marks(segments, said if is_chat else None, where, recipe, next_to_media=has_media)
    if not has_media:  # then no placeholder is left
        texts_alone = cast("list[Placed]", segments)
        return Composition(texts_alone, [], used, is_chat, where, {}, made_record, records)
    parts = [(modality, member) for modality in leading for member in media[modality]]
    ordered: list[Placed] = [*parts]
    queues = {modality: iter(indices) for modality, indices in media.items() if modality not in leading}
    items: dict[int, Mapping[str, Any]] = {}
    for segment in segments:
        if isinstance(segment, Placeholder):
            index = next(queues[segment.modality])
            parts.append((segment.modality, index))
            ordered.append(parts[-1])
            items[index] = segment.about
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
    has_one_clip = sum(has_length(name, recipe) for name, _ in parts) == 1
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
    used, document, records = _record_of_fields(fields)
    if document is None and (uses.json or uses.other_text):
        for index in uses.json:
            values[index], documents[index] = _document(fields, index)
        for index in uses.other_text:
            value, documents[index] = _chat_only(fields, index)
            if documents[index].is_chat:
                values[index] = value
        found = _only({index: each.chat for index, each in documents.items() if each.is_chat}, "conversation", fields)
        if found is None:  # a prompt with its completion
            found = next((index for index, each in documents.items() if each.completion is not None), None)
        if found is not None:
            used, document = [found], documents[found]
    # A member with plain text, or else the text in JSON.
    if document is None:
        if len(uses.plain) > 1:
            check_one_text(fields, uses.plain)
        check_unfit(uses.unfit, fields)
        for each in documents.values():
            missing = {name: names for name, names in each.named.items() if not uses.media.get(name)}
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


def _made_segments(made: MadeSample, fields: Fields) -> tuple[list[Segment], bool, ReadRecord]:
    """Return the segments of the user's record, whether it is a chat, and the record."""
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
    return segments, document.is_chat, record


def _segments_of(document: Document, used: list[int], fields: Fields) -> list[Segment]:
    """Return the segments of what was read. `used` gets the fields that a template renders with a chat."""
    rules, modalities, media = fields.recipe.rules, fields.recipe.modalities, fields.uses.media
    chat, template = document.chat, rules.template
    if chat is None:
        texts = [*zip(document.completion or (), (False, True), strict=False)]
        if document.completion is None and document.text is not None:
            if isinstance(template, JinjaTemplate) and template.pairs:
                raise FieldError(
                    fields.name(used[0]) if used else "*",
                    "plain text, and the model reads a prompt and then its completion: "
                    '{"prompt": ..., "completion": ...}',
                )
            texts = [(document.text, True)]
        pieces = [(piece, loss) for text, loss in texts for piece in split_placeholders(text, rules.words.marks)]
        return [TextSegment(piece, loss) if isinstance(piece, str) else piece for piece, loss in pieces]
    # A chat: its media are those of the sample, in their order.
    context = [index for index in fields.uses.chat_context if index not in {*used}]
    check_named(document.named, fields, exactly=True)
    check_media_order(document, fields)
    if not isinstance(template, JinjaTemplate):
        if context:
            check_context(chat, context, fields)
        return list(render(chat.messages, template))
    # Render it under a jinja template, which gets the fields of its context.
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
    """Read a record with fields as keys, such as the columns of a row: alpaca, or prompt and completion."""
    uses, recipe = fields.uses, fields.recipe
    if not isinstance(recipe.text.template, JinjaTemplate) or uses.json:
        return [], None, []
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
