"""A chat under a model's own template -> its segments: text, each stretch with or without loss, and places of media.

    chat --adapt--> messages --template--> text --+-- places: where the marks of media stand
                                                  +-- loss: `{% generation %}`, else by comparing prefixes

Nothing is lost in silence: what a turn says and the template leaves out is an error, found by rendering the chat once
more with a word of our own in everything that it says. All of it follows from template and sample alone. What is
rendered and searched for a chat is counted: one that would take too much is refused.
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
from orchdata.loaders.text.chat_keys import phrases, says, shown, speaks
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
from orchdata.loaders.text.media_words import MediaWords, holds_mark
from orchdata.loaders.text.messages import Chat, items_of
from orchdata.loaders.text.template import Placeholder, Segment, TextSegment

_WORD: Final = "Zq0qZ"
_PLUMBING: Final = frozenset("id type index tool_call_id call_id".split())
"""Strings under these keys tie a chat together and say nothing."""
_THOUGHT: Final = ("<think>", "</think>")
"""Around reasoning that stands in the content, where some templates cut it out."""
_NAME: Final = "name"
"""Of a tool that answers: its call says it too."""
_PHRASE_CHARACTERS: Final = 16
_WORD_ALONE: Final = re.compile(r"\w+")
_PATTERN_WORK: Final = 8
"""A character that a pattern is looked for in, as against one of a plain search."""
_SHORT: Final = 64
"""Turns, and texts, of a chat whose outline is kept for others of its shape."""
_NO_INPUTS: Final = Inputs()
_BESIDE: Final = -1
"""The turn of what stands beside all turns."""

Slots = tuple[tuple[str, str], ...]
"""(modality, mark that stands for a part of it in the text)."""


Shape = tuple[tuple[str, bool, tuple[str | bool, ...]], ...]
"""Of each turn the role, whether its content is a list, and of each item a modality, or whether its text holds any."""

Places = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""Where loss begins and ends, each as a piece of an outline and a place in it."""


class Forms(NamedTuple):
    """What a template makes of content.

    Attributes:
        strings, typed: whether it takes strings, and lists of items.
        items: modality -> the item that it renders as the modality's mark.
        reads_arguments: whether it writes arguments of calls that are strings as they are; otherwise JSON in a string
            is given to it as the object.
    """

    strings: bool
    typed: bool
    items: Mapping[str, Message]
    reads_arguments: bool


def render_chat(chat: Chat, template: JinjaTemplate, words: MediaWords) -> list[Segment]:
    """The segments of a chat, in order. Raises DecodeError for one that the template does not render in full."""
    slots = tuple(words.slots.items())
    _check_marks(chat, slots)
    forms = _forms(template, slots)
    messages = [_adapted(message, forms, words.slots) for message in chat.messages]
    work = Work()
    text, generated = template.render(messages, chat.inputs, work=work)
    marks = {mark: name for name, mark in slots}
    places = _places(text, marks)
    _check_places(Counter(chat.places), Counter(name for _, _, name in places), words.slots)
    _check_rest(chat, template, text, work)
    spans = _known_spans(chat, messages, template, slots, text, work)
    if spans is None:
        _check_said(chat, messages, template, slots, text, words.records, work)
        spans = loss_spans(messages, chat.trained, template, chat.inputs, text, generated, work)
    return list(_segments(text, spans, places))


def _segments(text: str, spans: Spans, places: list[tuple[int, int, str]]) -> Iterator[Segment]:
    """Text cut at its places and where loss begins and ends."""
    changes = iter([*((end, index % 2 == 0) for index, end in enumerate(at for span in spans for at in span))])
    cursor, loss = 0, False
    upcoming = next(changes, None)
    for start, end, name in [*places, (len(text), len(text), "")]:
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


def _places(text: str, marks: Mapping[str, str]) -> list[tuple[int, int, str]]:
    """(start, end, modality) of each mark in a rendering."""
    if not any(mark in text for mark in marks):
        return []
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return [(*found.span(), marks[found[0]]) for found in re.finditer(pattern, text)]


def _check_marks(chat: Chat, slots: Slots) -> None:
    held: list[Any] = [chat.inputs.tools, chat.inputs.documents, dict(chat.inputs.variables)]
    for message in chat.messages:
        held.extend(message.values())
    for phrase in phrases(held):
        for name, mark in slots:
            if mark in phrase:
                raise DecodeError(holds_mark(name, mark))


def _check_places(wanted: Counter[str], found: Counter[str], marks: Mapping[str, str]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        if wanted[name] != found[name]:
            mark = marks.get(name, f"<{name}>")
            raise DecodeError(
                f"the chat places {wanted[name]} of {name}, and its chat template renders {mark} {found[name]} times"
            )


# How a template wants content.


@lru_cache(maxsize=256)
def _forms(template: JinjaTemplate, slots: Slots) -> Forms:
    plain = _probed(template, _WORD)
    listed = _probed(template, [{"type": "text", "text": _WORD}])
    strings, typed = _WORD in plain, _WORD in listed and _shows_items(listed) <= _shows_items(plain)
    items: dict[str, Message] = {}
    for name, mark in slots if typed else ():
        for item in ({"type": name}, {"type": name, name: ""}, {"type": f"{name}_url"}):
            if _probed(template, [item, {"type": "text", "text": _WORD}]).count(mark) == 1:
                items[name] = item
                break
    arguments = json.dumps({"Zq1": "Zq2"})
    call = {"id": "call00000", "type": "function", "function": {"name": "Zq3", "arguments": arguments}}
    asked: Any = _WORD if strings or not typed else [{"type": "text", "text": _WORD}]
    calling = [{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return Forms(strings or not typed, typed, items, arguments in _rendered(template, calling))


def _probed(template: JinjaTemplate, content: Any) -> str:
    return _rendered(template, [{"role": "user", "content": content}])


def _rendered(
    template: JinjaTemplate, messages: Sequence[Message], inputs: Inputs = _NO_INPUTS, work: Work | None = None
) -> str:
    """A rendering; "" where the template refuses it."""
    try:
        return template.render(messages, inputs, work=work)[0]
    except TooMuchWork:
        raise
    except DecodeError:
        return ""


def _shows_items(text: str) -> int:
    """How often a rendering shows an item itself, as a template does that takes strings only."""
    return text.count("'type'") + text.count('"type"')


def _adapted(message: Mapping[str, Any], forms: Forms, marks: Mapping[str, str]) -> Message:
    """A turn as the template wants it."""
    found = dict(message)
    content = found.get("content")
    if isinstance(content, str):
        found["content"] = content if forms.strings else [{"type": "text", "text": content}]
    elif content is not None:
        found["content"] = _adapted_items(content, forms, marks)
    calls = found.get("tool_calls")
    if isinstance(calls, list) and not forms.reads_arguments:
        found["tool_calls"] = [_parsed(call) for call in calls]
    return found


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
    """A call whose arguments are an object, where they are one in a string."""
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _parsed(inner)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": found} if isinstance(found, dict) else call
    return call


# Whether everything that is said is rendered.


class _Leaf(NamedTuple):
    """A string of a chat.

    Attributes:
        number: of all that say something, counted from 0.
        turn: of the message, -1 beside them.
        key: of the message, or beside.
    """

    number: int
    turn: int
    key: str
    text: str


class _Said:
    """What a text says.

    Args:
        work: of the chat: each search is a part of it.
    """

    def __init__(self, text: str, work: Work) -> None:
        self._text = text
        self._work = work
        self._known: dict[str, bool] = {}

    def __contains__(self, phrase: str) -> bool:
        found = self._known.get(phrase)
        if found is None:
            found = self._known[phrase] = self._says(phrase)
        return found

    def _says(self, phrase: str) -> bool:
        """Whether a long phrase stands in the text, and a short one between what are no letters."""
        if len(phrase) >= _PHRASE_CHARACTERS:
            self._work.add(len(self._text))
            return phrase in self._text
        if _WORD_ALONE.fullmatch(phrase):
            return phrase in self._words
        self._work.add(_PATTERN_WORK * len(self._text))
        return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", self._text) is not None

    @cached_property
    def _words(self) -> frozenset[str]:
        self._work.add(_PATTERN_WORK * len(self._text))
        return frozenset(_WORD_ALONE.findall(self._text))


def _check_rest(chat: Chat, template: JinjaTemplate, text: str, work: Work) -> None:
    """Raise DecodeError for what stands beside the turns and is not shown to the template."""
    ignored, said = template.ignore_keys, _Said(text, work)
    if any(key == "chosen" and all(phrase in said for phrase in phrases(value)) for key, value in chat.rest):
        ignored = (*ignored, "chosen", "rejected")  # the chat is the one preferred
    for key, value in chat.rest:
        if key not in ignored and not all(phrase in said for phrase in phrases(value)):
            raise _lost("the conversation", key)


def _check_said(
    chat: Chat,
    messages: list[Message],
    template: JinjaTemplate,
    slots: Slots,
    text: str,
    records: Mapping[str, str],
    work: Work,
) -> None:
    _check_thoughts(chat, template, slots)
    number = _number_not_in(text)
    leaves: list[_Leaf] = []

    def word(leaf: _Leaf) -> str:
        leaves.append(leaf)
        return f"Zq{number}x{leaf.number}qZ"

    ignored = template.ignore_keys
    found = _rendered(template, *_with_words(messages, chat.inputs, records, ignored, word), work)
    told = {int(each) for each in re.findall(rf"Zq{number}x([0-9]+)qZ", found)}
    missing = [leaf for leaf in leaves if leaf.number not in told]
    shows_tools = any(_is_of_tools(leaf) and leaf.number in told for leaf in leaves)
    anywhere = _Said(text, work)
    of_turns = {
        turn: _Said(_text_of(chat.messages[turn]), work) for turn in {leaf.turn for leaf in missing} - {_BESIDE}
    }
    for leaf in missing:
        if _is_of_tools(leaf) and shows_tools:  # what a template shows of them is its own
            continue
        own = anywhere if leaf.key == _NAME else of_turns.get(leaf.turn)
        if own is not None and leaf.key != "content" and leaf.text.strip() in own:
            continue
        if leaf.key in REASONING and _renders_reasoning(template, slots):
            continue  # of earlier turns it is left out on purpose
        alone = _with_words(messages, chat.inputs, records, ignored, partial(_word_of_one, leaf.number, number))
        if _rendered(template, *alone, work) == text:
            where = "the conversation" if leaf.turn < 0 else f"turn {leaf.turn + 1} ({messages[leaf.turn]['role']})"
            raise _lost(where, leaf.key)


def _word_of_one(told: int, number: int, leaf: _Leaf) -> str:
    """The word for a string where the one numbered `told` alone gets one."""
    return f"Zq{number}x0qZ" if leaf.number == told else ""


def _is_of_tools(leaf: _Leaf) -> bool:
    return leaf.key == "tools" and leaf.turn == _BESIDE


def _number_not_in(text: str) -> int:
    """A number by which words of ours are told from what a chat says."""
    held = set(re.findall(r"Zq(\d+)x", text))
    return next(number for number in range(len(held) + 1) if str(number) not in held)


def _check_thoughts(chat: Chat, template: JinjaTemplate, slots: Slots) -> None:
    """Raise DecodeError for reasoning in an answer's content that the template renders of no answer."""
    start, end = _THOUGHT
    if start in template.ignore_keys:
        return
    for turn, message in enumerate(chat.messages):
        thought, found, _ = _text_of(message).rpartition(end)
        if message["role"] == TRAINED_ROLE and found and says(thought.replace(start, "")):
            if not _renders_thoughts(template, slots):
                raise _lost(f"turn {turn + 1} ({message['role']})", start)
            return


def _lost(where: str, key: str) -> DecodeError:
    way_out = f"or allow that with ChatTemplate.from_jinja(..., ignore_keys=({shown(key)},))"
    if key in ("content", "value"):  # to allow that would be to lose any of it
        way_out = "or give the text of a template that renders it"
    return DecodeError(
        f"{where} has {shown(key)}, which the chat template does not render: leave it out of the data if the model "
        f"need not see it, {way_out}"
    )


def _text_of(message: Mapping[str, Any]) -> str:
    items = items_of(message.get("content"))
    return "".join(str(item.get("text", "")) for item in items if isinstance(item, dict))


# Chats that hold nothing but words and media: one rendering tells all, where the outline of their shape is known.


def _known_spans(
    chat: Chat, messages: list[Message], template: JinjaTemplate, slots: Slots, text: str, work: Work
) -> Spans | None:
    """What of a rendering carries loss, where it is the outline of the chat's shape around all that the chat says."""
    if chat.inputs != _NO_INPUTS:
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
    is_kept = len(shape) <= _SHORT and len(said) <= _SHORT  # or it is hardly another's shape
    key = template, slots, tuple(shape)
    outline = _kept_outline(*key) if is_kept else _outline(*key, work)
    starts = None if outline is None else outline.starts_in(said, text)
    if outline is None or starts is None:
        return None
    spans = _kept_spans(*key, chat.trained) if is_kept else outline.spans(template, chat.trained, work)
    return None if spans is None else [(starts[2 * a] + at, starts[2 * b] + to) for (a, at), (b, to) in spans]


class _Outline(NamedTuple):
    """What a template writes around the words of chats of one shape, as seen around words of ours.

    Attributes:
        messages, text, generated: a chat of that shape, and its rendering.
        pieces: of the text, before, between and behind the words: where each begins and ends.
        order: of the words, as places among all of the chat.
    """

    messages: list[Message]
    text: str
    generated: Spans
    pieces: list[tuple[int, int]]
    order: tuple[int, ...]

    def starts_in(self, said: list[str], text: str) -> list[int] | None:
        """Where pieces and words begin, by turns, in a rendering that has these pieces around what a chat says, in full
        or without blanks around it; None in any other.
        """
        pieces = [self.text[start:end] for start, end in self.pieces]
        for words in (said, [word.strip() for word in said]):
            filled = [words[place] for place in self.order]
            parts = [part for pair in zip(pieces, [*filled, ""], strict=True) for part in pair]
            if "".join(parts) == text:
                return [0, *accumulate(map(len, parts))]
        return None

    def spans(self, template: JinjaTemplate, trained: tuple[bool, ...], work: Work) -> Places | None:
        """Where loss begins and ends; None where that cannot be told, or is inside of a word."""
        try:
            found = loss_spans(self.messages, trained, template, _NO_INPUTS, self.text, self.generated, work)
        except TooMuchWork:
            raise
        except DecodeError:
            return None
        ends = [end for _, end in self.pieces]
        places = [self._place(at, ends) for span in found for at in span]
        known = [place for place in places if place is not None]
        return tuple(zip(known[::2], known[1::2], strict=True)) if len(known) == len(places) else None

    def _place(self, at: int, ends: list[int]) -> tuple[int, int] | None:
        number = bisect_left(ends, at)
        return (number, at - self.pieces[number][0]) if self.pieces[number][0] <= at else None


@lru_cache(maxsize=4096)
def _kept_outline(template: JinjaTemplate, slots: Slots, shape: Shape) -> _Outline | None:
    return _outline(template, slots, shape, Work())


@lru_cache(maxsize=4096)
def _kept_spans(template: JinjaTemplate, slots: Slots, shape: Shape, trained: tuple[bool, ...]) -> Places | None:
    outline = _kept_outline(template, slots, shape)
    return None if outline is None else outline.spans(template, trained, Work())


def _outline(template: JinjaTemplate, slots: Slots, shape: Shape, work: Work) -> _Outline | None:
    """The outline of chats of a shape; None where the template does not render them in full."""
    marks, forms = dict(slots), _forms(template, slots)
    messages: list[Message] = []
    told = 0
    for role, listed, kinds in shape:
        items: list[Any] = []
        for kind in kinds:
            if isinstance(kind, str):
                items.append(Placeholder(kind))
            elif kind:
                items.append({"type": "text", "text": f"Zw{told}wZ"})
                told += 1
        one = not listed and all(isinstance(item, dict) for item in items)
        content = "".join(item["text"] for item in items) if one else items
        messages.append(_adapted({"role": role, "content": content}, forms, marks))
    try:
        text, generated = template.render(messages, _NO_INPUTS, work=work)
    except TooMuchWork:
        raise
    except DecodeError:
        return None
    words = list(re.finditer(r"Zw(\d+)wZ", text))
    order = tuple(int(word[1]) for word in words)
    if sorted(order) != list(range(told)):
        return None
    bounds = [0, *(end for word in words for end in word.span()), len(text)]
    return _Outline(messages, text, generated, list(zip(bounds[::2], bounds[1::2], strict=True)), order)


@lru_cache(maxsize=256)
def _renders_reasoning(template: JinjaTemplate, slots: Slots) -> bool:
    marks, forms = dict(slots), _forms(template, slots)
    turns = [{"role": "user", "content": "Zq1qZ"}, {"role": "assistant", "content": "Zq2qZ", REASONING[0]: _WORD}]
    return _WORD in _rendered(template, [_adapted(turn, forms, marks) for turn in turns])


@lru_cache(maxsize=256)
def _renders_thoughts(template: JinjaTemplate, slots: Slots) -> bool:
    marks, forms = dict(slots), _forms(template, slots)
    start, end = _THOUGHT
    answer = f"{start}\n{_WORD}\n{end}\n\nZq2qZ"
    turns = [{"role": "user", "content": "Zq1qZ"}, {"role": TRAINED_ROLE, "content": answer}]
    text = _rendered(template, [_adapted(turn, forms, marks) for turn in turns])
    return not text or _WORD in text


def _with_words(
    messages: list[Message],
    inputs: Inputs,
    records: Mapping[str, str],
    ignored: Collection[str],
    word_for: Callable[[_Leaf], str],
) -> tuple[list[Message], Inputs]:
    """The chat with a word behind each of its strings that say something, those under ignored keys apart."""
    numbers = count()

    def marked(value: Any, turn: int, key: str) -> Any:
        if key in ignored:
            return value

        def mark(text: str) -> str:
            said = text.rstrip()
            return said + word_for(_Leaf(next(numbers), turn, key, text)) + text[len(said) :]

        return _marked(value, mark)

    changed = [
        {key: marked(value, turn, key) if _speaks(key, value, records) else value for key, value in message.items()}
        for turn, message in enumerate(messages)
    ]
    tools, documents = marked(inputs.tools, _BESIDE, "tools"), marked(inputs.documents, _BESIDE, "documents")
    variables = {
        key: value if key in _PLUMBING else marked(value, _BESIDE, key) for key, value in inputs.variables.items()
    }
    return changed, Inputs(tools, documents, variables)


def _speaks(key: str, value: Any, records: Mapping[str, str]) -> bool:
    return key == "content" or (key != "role" and key not in _PLUMBING and speaks(key, value, records))


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """A copy of a JSON value whose strings that say something are marked, in order."""
    if isinstance(value, str):
        return mark(value) if says(value) else value
    if isinstance(value, Mapping):
        copied: dict[Any, Any] = {}
        for key, held in value.items():
            copied[key] = held if key in _PLUMBING else _marked(held, mark)
        return copied
    if isinstance(value, list):
        items: list[Any] = []
        for held in value:
            items.append(_marked(held, mark))  # noqa: PERF401 - a comprehension is one more frame a level
        return items
    return value
