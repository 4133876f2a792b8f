"""Members and texts of a sample -> its spans in order: text with token ids, and slots of media.

The indexer and the decoder both go through here, so what the index says is what decoding yields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.conversation import Document, read_document, split_placeholders
from orchdata.loaders.decode_error import DecodeError
from orchdata.loaders.errors import FieldError
from orchdata.loaders.members import Layout, Member, layout_of
from orchdata.loaders.modality import AUDIO, IMAGE, MODALITIES
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.template import Placeholder, Segment, TextSegment, render
from orchdata.loaders.text import TextPreprocessor, decode_utf8

__all__ = ["MediaSlot", "Member", "Span", "TextSpan", "compose", "compose_with_source", "text_members"]

_PLURAL: Final = {IMAGE: "images", AUDIO: "audio clips"}


class TextSpan(NamedTuple):
    """Token ids int32 (num_tokens,), and whether they carry loss."""

    token_ids: NDArray[np.int32]
    loss: bool


class MediaSlot(NamedTuple):
    """The place of an image or clip: its modality, and its index in the sample's members."""

    modality: int
    member: int


Span = TextSpan | MediaSlot


def text_members(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Indices of the members whose bytes `compose` needs: JSON, and the preferred plain text."""
    held = layout_of(members, recipe.text.fields)
    return sorted(held.json + held.plain)


def compose(members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe) -> list[Span]:
    """The spans of a sample in order.

    A conversation in JSON goes before plain text, plain text before a JSON "text" or "caption"; other JSON is
    metadata. Media take the places of their placeholders in field order, numbered fields by number; without any
    placeholder of their modality they come first, images before audio.

    Args:
        texts: payloads of `text_members`.

    Raises:
        FieldError: no usable field, text that cannot be read, media that do not match their placeholders.
    """
    return compose_with_source(members, texts, recipe)[0]


def compose_with_source(
    members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> tuple[list[Span], list[int]]:
    """`compose`, and the text members the spans come from."""
    held = layout_of(members, recipe.text.fields)
    media: dict[int, tuple[int, ...]] = {}
    if recipe.image is not None:
        media[IMAGE] = held.image
    if recipe.audio is not None:
        media[AUDIO] = held.audio
    used, segments = _segments(members, held, texts, recipe)
    if not used and not any(media.values()):
        raise FieldError("*", _nothing_usable(members, recipe))
    where = members[used[0]].field if used else "*"
    leading = _match(media, segments, where, recipe)
    writer = _SpanWriter(recipe.text, where)
    writer.special(recipe.text.bos_token_id)
    for modality in leading:
        for member in media[modality]:
            writer.media(modality, member)
    queues = {modality: iter(found) for modality, found in media.items() if modality not in leading}
    for segment in segments:
        if isinstance(segment, Placeholder):
            writer.media(segment.modality, next(queues[segment.modality]))
        else:
            writer.text(segment)
    return writer.close(), used


class _SpanWriter:
    """Joins neighbouring text of equal loss before tokenizing it."""

    def __init__(self, pre: TextPreprocessor, where: str) -> None:
        self._pre = pre
        self._where = where
        self._spans: list[Span] = []
        self._pending: list[str] = []
        self._loss = False

    def text(self, segment: TextSegment) -> None:
        if not segment.text:
            return
        if segment.loss != self._loss:
            self._flush()
            self._loss = segment.loss
        self._pending.append(segment.text)

    def media(self, modality: int, member: int) -> None:
        self._flush()
        start, end = self._pre.around(modality)
        self.special(start)
        self._spans.append(MediaSlot(modality, member))
        self.special(end)

    def special(self, token_id: int | None, loss: bool = False) -> None:
        if token_id is not None:
            self._spans.append(TextSpan(np.array([token_id], np.int32), loss))

    def close(self) -> list[Span]:
        self._flush()
        last = self._spans[-1] if self._spans else None
        self.special(self._pre.eos_token_id, isinstance(last, TextSpan) and last.loss)
        return self._spans

    def _flush(self) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        try:
            token_ids = self._pre.encode(text)
        except DecodeError as error:
            raise error.at(self._where) from error.__cause__
        if len(token_ids):
            self._spans.append(TextSpan(token_ids, self._loss))


def _segments(
    members: Sequence[Member], held: Layout, texts: Mapping[int, bytes | memoryview], recipe: Recipe
) -> tuple[list[int], list[Segment]]:
    """The sample's text: the members it is from (none: no text), and its segments."""
    pre = recipe.text
    captions: list[tuple[int, str]] = []
    for index in held.json:
        document = _document(members[index], texts[index], recipe)
        if document.turns is not None:
            _check_named(document, members, recipe)
            return [index], list(render(document.turns, pre.template))
        if document.text is not None:
            captions.append((index, document.text))
    chosen = [(index, _plain(members[index], texts[index], recipe)) for index in held.plain] or captions[:1]
    pieces = [piece for _, text in chosen for piece in split_placeholders(text, pre)]
    segments: list[Segment] = [TextSegment(piece, True) if isinstance(piece, str) else piece for piece in pieces]
    return [index for index, _ in chosen], segments


def _match(media: Mapping[int, tuple[int, ...]], segments: Iterable[Segment], where: str, recipe: Recipe) -> list[int]:
    """Check media against placeholders; the modalities that have none of them, whose media come first."""
    marks = [segment.modality for segment in segments if isinstance(segment, Placeholder)]
    if not marks:
        return [modality for modality in (IMAGE, AUDIO) if media.get(modality)]
    for modality in set(marks):
        mark, name = recipe.text.placeholder(modality), MODALITIES[modality]
        if modality not in media:
            raise FieldError(where, f"{mark} placeholder, but the recipe has no {name} preprocessor")
        found, wanted = len(media[modality]), marks.count(modality)
        if found < wanted:
            raise FieldError(
                where, f"{mark} placeholder {found + 1} of {wanted} has no {name}: the sample holds {found}"
            )
        if found > wanted:
            raise FieldError(where, f"{found} {_PLURAL[modality]} but {wanted} {mark} placeholders")
    return [modality for modality in (IMAGE, AUDIO) if media.get(modality) and modality not in marks]


def _check_named(document: Document, members: Sequence[Member], recipe: Recipe) -> None:
    for modality, names in document.named.items():
        asked = recipe.image if modality == IMAGE else recipe.audio
        found = sum(member.kind == modality for member in members)
        if asked is not None and found != len(names):
            held = f"holds {found}" if found else "holds none"
            raise FieldError(
                MODALITIES[modality],
                f"the conversation names {len(names)} ({', '.join(map(repr, names[:3]))}), the sample {held}",
            )


def _document(member: Member, payload: bytes | memoryview, recipe: Recipe) -> Document:
    _check_text(member, payload, recipe)
    try:
        return read_document(payload, recipe.text, lines=member.field.removesuffix(".gz").endswith("jsonl"))
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__


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
    asked = [name for name, pre in (("image", recipe.image), ("audio", recipe.audio)) if pre is not None]
    texts = ", ".join(("json", *recipe.text.fields))
    return f"no usable field among: {held}; the recipe asks for {', '.join([*asked, 'text'])} (fields {texts})"
