"""A chat under a model's own template -> its segments: stretches of text with or without loss, and placeholders.

    chat --adapted_turn--> messages --template--> text --+-- media: where their marks are
                                                         +-- loss: `{% generation %}`, else by comparing prefixes

Each template is tried once to see how it takes content (`Forms`). Nothing is lost silently: the chat is rendered once
more with a marker word after everything that it says, and a word that is missing then belongs to a string that the
template leaves out. One rendering is enough for chats of text and media alone, if the outline of their shape is cached:
what the template writes around the texts of such a chat. The result depends on template and sample alone.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import (
    REASONING,
    TRAINED_ROLE,
    Inputs,
    JinjaTemplate,
    Message,
    Spans,
    TooMuchWork,
    Work,
)
from orchdata.loaders.text.loss_spans import loss_spans
from orchdata.loaders.text.messages import Chat, phrases, says, shown, speaks
from orchdata.loaders.text.template import MediaWords, Placeholder, Segment, TextSegment, holds_mark, items_of, text_of

WORD: Final = "Zq0qZ"
NO_INPUTS: Final = Inputs()

Slots = tuple[tuple[str, str], ...]
"""(modality, mark of a part of it in the text)."""


class Forms(NamedTuple):
    """How a template renders content."""

    strings: bool  # it takes strings
    typed: bool  # it takes lists of items
    items: Mapping[str, Message]  # modality -> the item that it renders as the modality's mark
    reads_arguments: bool  # it writes call arguments that are strings unchanged; else JSON in them is parsed for it


@lru_cache(maxsize=256)
def forms_of(template: JinjaTemplate, slots: Slots) -> Forms:
    def probed(content: Any) -> str:
        return rendered_by(template, [{"role": "user", "content": content}])

    # A template for strings shows the items of a list as JSON.
    plain, listed = probed(WORD), probed([{"type": "text", "text": WORD}])
    shown_items, shown_plain = (text.count("'type'") + text.count('"type"') for text in (listed, plain))
    strings, typed = WORD in plain, WORD in listed and shown_items <= shown_plain
    items: dict[str, Message] = {}
    for name, mark in slots if typed else ():
        for item in ({"type": name}, {"type": name, name: ""}, {"type": f"{name}_url"}):
            if probed([item, {"type": "text", "text": WORD}]).count(mark) == 1:
                items[name] = item
                break
    arguments = json.dumps({"Zq1": "Zq2"})
    call = {"id": "call00000", "type": "function", "function": {"name": "Zq3", "arguments": arguments}}
    asked: Any = WORD if strings or not typed else [{"type": "text", "text": WORD}]
    calling = [{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return Forms(strings or not typed, typed, items, arguments in rendered_by(template, calling))


def rendered_by(
    template: JinjaTemplate, messages: Sequence[Message], inputs: Inputs = NO_INPUTS, work: Work | None = None
) -> str:
    """Return a rendering; "" if the template rejects the chat."""
    rendered = template.rendered(messages, inputs, work=work)
    return "" if rendered is None else rendered[0]


def adapted_turn(message: Mapping[str, Any], forms: Forms, marks: Mapping[str, str]) -> Message:
    """Return a turn in the form that the template takes."""
    adapted = dict(message)
    content = adapted.get("content")
    if isinstance(content, str):
        adapted["content"] = content if forms.strings else [{"type": "text", "text": content}]
    elif content is not None:
        adapted["content"] = _adapted_items(content, forms, marks)
    calls = adapted.get("tool_calls")
    if isinstance(calls, list) and not forms.reads_arguments:
        adapted["tool_calls"] = [_parsed(call) for call in calls]
    return adapted


def _adapted_items(content: list[Any], forms: Forms, marks: Mapping[str, str]) -> Any:
    placed = {item.modality for item in content if isinstance(item, Placeholder)}
    for name in placed:
        if name not in marks:
            raise DecodeError(f"the chat places {name}, and the recipe has no mark for it in texts")
    if forms.typed and (not placed or placed & forms.items.keys() or not forms.strings):
        written: Mapping[str, Message] = {
            name: forms.items.get(name, {"type": "text", "text": marks[name]}) for name in placed
        }
        return [dict(written[item.modality]) if isinstance(item, Placeholder) else item for item in content]
    other = next((item for item in content if not isinstance(item, Placeholder) and item.get("type") != "text"), None)
    if other is not None:
        raise DecodeError(f"an item of type {shown(str(other.get('type')))}, and the chat template takes strings alone")
    return "".join(marks[item.modality] if isinstance(item, Placeholder) else item["text"] for item in content)


def _parsed(call: Any) -> Any:
    """Return a call with arguments as an object, if they are JSON of one in a string."""
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _parsed(inner)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
    return call


_PLUMBING: Final = frozenset("id type index tool_call_id call_id".split())
"""Strings under these keys link the parts of a chat and say nothing."""
_THOUGHT: Final = ("<think>", "</think>")
"""Around reasoning inside the content; some templates cut it out."""
_NAME: Final = "name"
"""Key of the name of a tool that answers: its call contains the name too."""
_PHRASE_CHARACTERS: Final = 16
_WORD_ALONE: Final = re.compile(r"\w+")
_PATTERN_WORK: Final = 8
"""Cost of searching one character with a pattern, relative to a plain search."""
_CONTEXT: Final = -1
"""Turn number of content next to the turns."""


class _Leaf(NamedTuple):
    """A string of a chat."""

    number: int  # among strings with words, from 0
    turn: int  # index of the message, or _CONTEXT
    key: str  # of the message, or of the content next to the turns
    text: str


class _Said:
    """The phrases in a text; searches count as work."""

    def __init__(self, text: str, work: Work) -> None:
        self._text = text
        self._work = work
        self._known: dict[str, bool] = {}

    def __contains__(self, phrase: str) -> bool:
        """Whether the text contains a long phrase, or a short one as whole words."""
        if phrase not in self._known:
            if len(phrase) >= _PHRASE_CHARACTERS:
                self._work.add(len(self._text))
                self._known[phrase] = phrase in self._text
            elif _WORD_ALONE.fullmatch(phrase):
                self._known[phrase] = phrase in self._words
            else:
                self._work.add(_PATTERN_WORK * len(self._text))
                found = re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", self._text)
                self._known[phrase] = found is not None
        return self._known[phrase]

    @cached_property
    def _words(self) -> frozenset[str]:
        self._work.add(_PATTERN_WORK * len(self._text))
        return frozenset(_WORD_ALONE.findall(self._text))


def check_said(
    chat: Chat,
    messages: list[Message],
    template: JinjaTemplate,
    slots: Slots,
    text: str,
    records: Mapping[str, str],
    work: Work,
) -> None:
    """Raise DecodeError for content that the template does not render."""
    _check_thoughts(chat, template, slots)
    # Render the chat once more, with a numbered word after each string.
    used = set(re.findall(r"Zq(\d+)x", text))
    number = next(number for number in range(len(used) + 1) if str(number) not in used)
    leaves: list[_Leaf] = []

    def word(leaf: _Leaf) -> str:
        leaves.append(leaf)
        return f"Zq{number}x{leaf.number}qZ"

    def word_of(leaf: _Leaf, only: int) -> str:
        return f"Zq{number}x0qZ" if leaf.number == only else ""

    ignored = template.ignore_keys
    rendering = rendered_by(template, *_with_words(messages, chat.inputs, records, ignored, word), work)
    rendered = {int(each) for each in re.findall(rf"Zq{number}x([0-9]+)qZ", rendering)}
    missing = [leaf for leaf in leaves if leaf.number not in rendered]
    of_tools = {leaf.number for leaf in leaves if leaf.key == "tools" and leaf.turn == _CONTEXT}
    # A string without its word is lost, unless the text contains it elsewhere or depends on it.
    anywhere = _Said(text, work)
    of_turns = {
        turn: _Said(text_of(chat.messages[turn]), work) for turn in {leaf.turn for leaf in missing} - {_CONTEXT}
    }
    for leaf in missing:
        if leaf.number in of_tools and of_tools & rendered:  # the template decides how much of them it shows
            continue
        own = anywhere if leaf.key == _NAME else of_turns.get(leaf.turn)
        if own is not None and leaf.key != "content" and leaf.text.strip() in own:
            continue
        if leaf.key in REASONING and _renders(template, slots, in_content=False):
            continue  # templates leave out that of earlier turns on purpose
        alone = _with_words(messages, chat.inputs, records, ignored, partial(word_of, only=leaf.number))
        if rendered_by(template, *alone, work) == text:
            where = "the conversation" if leaf.turn < 0 else f"turn {leaf.turn + 1} ({messages[leaf.turn]['role']})"
            raise _lost(where, leaf.key)


def _check_thoughts(chat: Chat, template: JinjaTemplate, slots: Slots) -> None:
    """Raise DecodeError for reasoning in an answer's content if the template renders it for no answer."""
    start, end = _THOUGHT
    if start in template.ignore_keys:
        return
    for turn, message in enumerate(chat.messages):
        thought, mark, _ = text_of(message).rpartition(end)
        if message["role"] == TRAINED_ROLE and mark and says(thought.replace(start, "")):
            if not _renders(template, slots, in_content=True):
                raise _lost(f"turn {turn + 1} ({message['role']})", start)
            return


def _lost(where: str, key: str) -> DecodeError:
    way_out = f"or allow that with ChatTemplate.from_jinja(..., ignore_keys=({shown(key)},))"
    if key in ("content", "value"):  # to ignore this key would lose all content
        way_out = "or give the text of a template that renders it"
    return DecodeError(
        f"{where} has {shown(key)}, which the chat template does not render: leave it out of the data if the model "
        f"need not see it, {way_out}"
    )


@lru_cache(maxsize=256)
def _renders(template: JinjaTemplate, slots: Slots, *, in_content: bool) -> bool:
    """Whether a template renders the reasoning of the last answer: under a key of its own, or in its content."""
    marks, forms = dict(slots), forms_of(template, slots)
    start, end = _THOUGHT
    answer = {"content": f"{start}\n{WORD}\n{end}\n\nZq2qZ"} if in_content else {"content": "Zq2qZ", REASONING[0]: WORD}
    turns = [{"role": "user", "content": "Zq1qZ"}, {"role": TRAINED_ROLE, **answer}]
    text = rendered_by(template, [adapted_turn(turn, forms, marks) for turn in turns])
    return WORD in text or (in_content and not text)


def _with_words(
    messages: list[Message],
    inputs: Inputs,
    records: Mapping[str, str],
    ignored: Collection[str],
    word_for: Callable[[_Leaf], str],
) -> tuple[list[Message], Inputs]:
    """Return the chat with a word after each of its strings with content, except under ignored keys."""
    numbers = count()

    def marked(value: Any, turn: int, key: str) -> Any:
        if key in ignored:
            return value

        def mark(text: str) -> str:
            said = text.rstrip()
            return said + word_for(_Leaf(next(numbers), turn, key, text)) + text[len(said) :]

        return _marked(value, mark)

    def says_it(key: str, value: Any) -> bool:
        return key == "content" or (key != "role" and key not in _PLUMBING and speaks(key, value, records))

    changed = [
        {key: marked(value, turn, key) if says_it(key, value) else value for key, value in message.items()}
        for turn, message in enumerate(messages)
    ]
    tools, documents = marked(inputs.tools, _CONTEXT, "tools"), marked(inputs.documents, _CONTEXT, "documents")
    variables = {
        key: value if key in _PLUMBING else marked(value, _CONTEXT, key) for key, value in inputs.variables.items()
    }
    return changed, Inputs(tools, documents, variables)


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value in which the strings with content are marked, in order."""
    if isinstance(value, str):
        return mark(value) if says(value) else value
    if isinstance(value, Mapping):
        copied: dict[Any, Any] = {}
        for key, inner in value.items():
            copied[key] = inner if key in _PLUMBING else _marked(inner, mark)
        return copied
    if isinstance(value, list):
        items: list[Any] = []
        for inner in value:
            items.append(_marked(inner, mark))  # noqa: PERF401 - a comprehension is one more frame per level
        return items
    return value


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
    """What a template writes around the texts of chats of one shape, measured with placeholder words."""

    messages: list[Message]  # a chat of that shape, and its rendering
    text: str
    generated: Spans
    pieces: list[tuple[int, int]]  # start and end of the text before, between and after the words
    order: tuple[int, ...]  # index in the chat of each word of the rendering

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
    rendered = template.rendered(messages, NO_INPUTS, work=work)
    if rendered is None:
        return None
    text, generated = rendered
    # Locate the words in its rendering: each must come once.
    words = list(re.finditer(r"Zw(\d+)wZ", text))
    order = tuple(int(word[1]) for word in words)
    if sorted(order) != list(range(num_texts)):
        return None
    bounds = [0, *(end for word in words for end in word.span()), len(text)]
    return _Outline(messages, text, generated, list(zip(bounds[::2], bounds[1::2], strict=True)), order)


def render_chat(chat: Chat, template: JinjaTemplate, words: MediaWords) -> list[Segment]:
    """Return the segments of a chat, in order. Raises DecodeError if the template does not render all of it."""
    slots = tuple(words.slots.items())
    said = [chat.inputs.tools, chat.inputs.documents, dict(chat.inputs.variables)]
    for phrase in phrases([*said, *(value for message in chat.messages for value in message.values())]):
        for name, mark in slots:
            if mark in phrase:
                raise DecodeError(holds_mark(name, mark))
    # Render the chat, and check that all its media are in the text.
    forms = forms_of(template, slots)
    messages = [adapted_turn(message, forms, words.slots) for message in chat.messages]
    work = Work()
    text, generated = template.render(messages, chat.inputs, work=work)
    marks = {mark: name for name, mark in slots}
    media: list[tuple[int, int, str]] = []  # start, end and modality of each mark in the text
    if any(mark in text for mark in marks):
        pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
        media = [(*match.span(), marks[match[0]]) for match in re.finditer(pattern, text)]
    placed = Counter(item.modality for item in chat.placeholders)
    rendered = Counter(name for _, _, name in media)
    for name in sorted(placed.keys() | rendered.keys()):
        if placed[name] != rendered[name]:
            mark = words.slots.get(name, f"<{name}>")
            raise DecodeError(
                f"the chat places {placed[name]} of {name}, and its chat template renders {mark} {rendered[name]} times"
            )
    # Content next to the turns that is not given to the template must be in the text too.
    ignored, inside = template.ignore_keys, _Said(text, work)
    if any(key == "chosen" and all(phrase in inside for phrase in phrases(value)) for key, value in chat.rest):
        ignored = (*ignored, "chosen", "rejected")  # the chat is the preferred one
    for key, value in chat.rest:
        if key not in ignored and not all(phrase in inside for phrase in phrases(value)):
            raise _lost("the conversation", key)
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
