"""A chat under a model's own template -> its segments: stretches of text with or without loss, and placeholders of
media.

    chat --adapt--> messages --template--> text --+-- media: where their marks are
                                                  +-- loss: `{% generation %}`, else by comparing prefixes

Nothing is lost silently: if the template leaves out something that a turn says, the sample fails. To find this, the
chat is rendered once more with a marker word in everything that it says. The result depends on template and sample
alone. The rendered and searched characters of a chat are counted: a chat that needs too much work fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.chat_keys import phrases
from orchdata.loaders.text.jinja import JinjaTemplate, Spans
from orchdata.loaders.text.loss_spans import loss_spans
from orchdata.loaders.text.media_words import MediaWords, holds_mark
from orchdata.loaders.text.messages import Chat
from orchdata.loaders.text.rendering.completeness import check_rest, check_said
from orchdata.loaders.text.rendering.forms import Slots, adapted_turn, forms_of
from orchdata.loaders.text.rendering.outline import known_spans
from orchdata.loaders.text.template import Placeholder, Segment, TextSegment
from orchdata.loaders.text.work import Work


def render_chat(chat: Chat, template: JinjaTemplate, words: MediaWords) -> list[Segment]:
    """Return the segments of a chat, in order. Raises DecodeError if the template does not render all of it."""
    slots = tuple(words.slots.items())
    # Render the chat, and check that all its media are in the text.
    _check_marks(chat, slots)
    forms = forms_of(template, slots)
    messages = [adapted_turn(message, forms, words.slots) for message in chat.messages]
    work = Work()
    text, generated = template.render(messages, chat.inputs, work=work)
    marks = {mark: name for name, mark in slots}
    media = _find_media(text, marks)
    _check_media(
        Counter(item.modality for item in chat.placeholders), Counter(name for _, _, name in media), words.slots
    )
    check_rest(chat, template, text, work)
    # Find the spans with loss: by a cached outline, or else after a check that nothing is lost.
    spans = known_spans(chat, messages, template, slots, text, work)
    if spans is None:
        check_said(chat, messages, template, slots, text, words.records, work)
        spans = loss_spans(messages, chat.trained, template, chat.inputs, text, generated, work)
    return list(_segments(text, spans, media))


def _segments(text: str, spans: Spans, media: list[tuple[int, int, str]]) -> Iterator[Segment]:
    """Cut the text at its media, and where loss begins and ends."""
    changes = iter([*((end, index % 2 == 0) for index, end in enumerate(at for span in spans for at in span))])
    cursor, loss = 0, False
    upcoming = next(changes, None)
    for start, end, name in [*media, (len(text), len(text), "")]:
        while upcoming is not None and upcoming[0] <= start:
            if upcoming[0] > cursor:
                yield TextSegment(text[cursor : upcoming[0]], loss)
                cursor = upcoming[0]
            loss = upcoming[1]
            upcoming = next(changes, None)
        if start > cursor:
            yield TextSegment(text[cursor:start], loss)
        if name:
            yield Placeholder(name)
        cursor = end


def _find_media(text: str, marks: Mapping[str, str]) -> list[tuple[int, int, str]]:
    """Return (start, end, modality) of each mark in a rendering."""
    if not any(mark in text for mark in marks):
        return []
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return [(*match.span(), marks[match[0]]) for match in re.finditer(pattern, text)]


def _check_marks(chat: Chat, slots: Slots) -> None:
    values: list[Any] = [chat.inputs.tools, chat.inputs.documents, dict(chat.inputs.variables)]
    for message in chat.messages:
        values.extend(message.values())
    for phrase in phrases(values):
        for name, mark in slots:
            if mark in phrase:
                raise DecodeError(holds_mark(name, mark))


def _check_media(wanted: Counter[str], rendered: Counter[str], marks: Mapping[str, str]) -> None:
    for name in sorted(wanted.keys() | rendered.keys()):
        if wanted[name] != rendered[name]:
            mark = marks.get(name, f"<{name}>")
            raise DecodeError(
                f"the chat places {wanted[name]} of {name}, and its chat template renders {mark} {rendered[name]} times"
            )
