"""Chats of text and media alone: one rendering is enough if the outline of their shape is cached.

shape of a chat --a chat of that shape with placeholder words--> outline: what the template writes around the texts
outline, texts of a chat --> its rendering, and where loss begins and ends
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import JinjaTemplate, Message, Spans
from orchdata.loaders.text.loss_spans import loss_spans
from orchdata.loaders.text.messages import Chat, items_of
from orchdata.loaders.text.rendering.forms import NO_INPUTS, Slots, adapted_turn, forms_of
from orchdata.loaders.text.template import Placeholder
from orchdata.loaders.text.work import TooMuchWork, Work

_SHORT: Final = 64
"""Maximum number of turns, and of texts, of a chat with an outline that is cached for chats of its shape."""

Shape = tuple[tuple[str, bool, tuple[str | bool, ...]], ...]
"""For each turn: its role, whether its content is a list, and for each item its modality or whether its text is empty.
"""

Bounds = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""Start and end of each span with loss, as a piece of an outline and an offset in it."""


def known_spans(
    chat: Chat, messages: list[Message], template: JinjaTemplate, slots: Slots, text: str, work: Work
) -> Spans | None:
    """Return the spans with loss if the rendering is the outline of the chat's shape, filled with the chat's texts."""
    if chat.inputs != NO_INPUTS:
        return None
    shape: list[tuple[str, bool, tuple[str | bool, ...]]] = []
    said: list[str] = []
    for message, adapted in zip(chat.messages, messages, strict=True):
        items = items_of(message.get("content"))
        if message.keys() - {"role", "content"} or any(
            isinstance(item, dict) and item.keys() != {"type", "text"} for item in items
        ):
            return None
        words = [None if isinstance(item, Placeholder) else item["text"] for item in items]
        kinds = tuple(item.modality if word is None else bool(word) for item, word in zip(items, words, strict=True))
        shape.append((message["role"], isinstance(adapted.get("content"), list), kinds))
        said.extend(word for word in words if word)
    is_kept = len(shape) <= _SHORT and len(said) <= _SHORT  # other chats hardly share a longer shape
    key = template, slots, tuple(shape)
    outline = _kept_outline(*key) if is_kept else _outline(*key, work)
    starts = None if outline is None else outline.starts_in(said, text)
    if outline is None or starts is None:
        return None
    spans = _kept_spans(*key, chat.trained) if is_kept else outline.spans(template, chat.trained, work)
    return None if spans is None else [(starts[2 * a] + at, starts[2 * b] + to) for (a, at), (b, to) in spans]


class _Outline(NamedTuple):
    """What a template writes around the texts of chats of one shape, measured with placeholder words.

    Attributes:
        messages, text, generated: a chat of that shape, and its rendering.
        pieces: start and end of the text before, between and after the words.
        order: index in the chat of each word of the rendering.
    """

    messages: list[Message]
    text: str
    generated: Spans
    pieces: list[tuple[int, int]]
    order: tuple[int, ...]

    def starts_in(self, said: list[str], text: str) -> list[int] | None:
        """Return the starts of pieces and words, in turns, in a rendering of a chat with the texts `said`, whole or
        stripped of blanks; None if the rendering is not these pieces around these texts.
        """
        pieces = [self.text[start:end] for start, end in self.pieces]
        for words in (said, [word.strip() for word in said]):
            filled = [words[index] for index in self.order]
            parts = [part for pair in zip(pieces, [*filled, ""], strict=True) for part in pair]
            if "".join(parts) == text:
                return [0, *accumulate(map(len, parts))]
        return None

    def spans(self, template: JinjaTemplate, trained: tuple[bool, ...], work: Work) -> Bounds | None:
        """Return where loss begins and ends; None if that is not known, or is inside a word."""
        try:
            spans = loss_spans(self.messages, trained, template, NO_INPUTS, self.text, self.generated, work)
        except TooMuchWork:
            raise
        except DecodeError:
            return None
        ends = [end for _, end in self.pieces]
        bounds = [self._bound(at, ends) for span in spans for at in span]
        known = [bound for bound in bounds if bound is not None]
        return tuple(zip(known[::2], known[1::2], strict=True)) if len(known) == len(bounds) else None

    def _bound(self, at: int, ends: list[int]) -> tuple[int, int] | None:
        number = bisect_left(ends, at)
        return (number, at - self.pieces[number][0]) if self.pieces[number][0] <= at else None


@lru_cache(maxsize=4096)
def _kept_outline(template: JinjaTemplate, slots: Slots, shape: Shape) -> _Outline | None:
    return _outline(template, slots, shape, Work())


@lru_cache(maxsize=4096)
def _kept_spans(template: JinjaTemplate, slots: Slots, shape: Shape, trained: tuple[bool, ...]) -> Bounds | None:
    outline = _kept_outline(template, slots, shape)
    return None if outline is None else outline.spans(template, trained, Work())


def _outline(template: JinjaTemplate, slots: Slots, shape: Shape, work: Work) -> _Outline | None:
    """Return the outline of chats of a shape; None if the template does not render all of them."""
    marks, forms = dict(slots), forms_of(template, slots)
    # Build a chat of this shape with a numbered word as each text.
    messages: list[Message] = []
    num_texts = 0
    for role, listed, kinds in shape:
        items: list[Any] = []
        for kind in kinds:
            if isinstance(kind, str):
                items.append(Placeholder(kind))
            elif kind:
                items.append({"type": "text", "text": f"Zw{num_texts}wZ"})
                num_texts += 1
        one = not listed and all(isinstance(item, dict) for item in items)
        content = "".join(item["text"] for item in items) if one else items
        messages.append(adapted_turn({"role": role, "content": content}, forms, marks))
    try:
        text, generated = template.render(messages, NO_INPUTS, work=work)
    except TooMuchWork:
        raise
    except DecodeError:
        return None
    # Locate the words in its rendering: each must come once.
    words = list(re.finditer(r"Zw(\d+)wZ", text))
    order = tuple(int(word[1]) for word in words)
    if sorted(order) != list(range(num_texts)):
        return None
    bounds = [0, *(end for word in words for end in word.span()), len(text)]
    return _Outline(messages, text, generated, list(zip(bounds[::2], bounds[1::2], strict=True)), order)
