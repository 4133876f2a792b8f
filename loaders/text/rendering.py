"""A chat under a model's own template -> its segments: text, each stretch with or without loss, and places of media.

    chat --adapt--> messages --template--> text --+-- places: where the marks of media stand
                                                  +-- loss: `{% generation %}`, else by comparing prefixes

Nothing is lost in silence: what a turn says and the template leaves out is an error, found by rendering the chat once
more with a word of our own in everything that it says. All of it follows from template and sample alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.chat_keys import phrases, says, shown, speaks
from orchdata.loaders.text.jinja import REASONING, TRAINED_ROLE, Inputs, JinjaTemplate, Message, Spans
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
_NO_INPUTS: Final = Inputs()

Slots = tuple[tuple[str, str], ...]
"""(modality, mark that stands for a part of it in the text)."""


Shape = tuple[tuple[str, bool, tuple[str | bool, ...]], ...]
"""Of each turn the role, whether its content is a list, and of each item a modality, or whether its text holds any."""


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
    text, generated = template.render(messages, chat.inputs)
    marks = {mark: name for name, mark in slots}
    places = _places(text, marks)
    _check_places(Counter(chat.places), Counter(name for _, _, name in places), words.slots)
    _check_rest(chat, template, text)
    spans = _known_spans(chat, messages, template, slots, text)
    if spans is None:
        _check_said(chat, messages, template, slots, text, words.records)
        spans = loss_spans(messages, chat.trained, template, chat.inputs, text, generated)
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


def _rendered(template: JinjaTemplate, messages: Sequence[Message], inputs: Inputs = _NO_INPUTS) -> str:
    """A rendering; "" where the template refuses it."""
    try:
        return template.render(messages, inputs)[0]
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
        turn: of the message, -1 beside them.
        key: of the message, or beside.
        path: to the string, from the message or from the inputs.
    """

    turn: int
    key: str
    path: tuple[Any, ...]
    text: str


def _check_rest(chat: Chat, template: JinjaTemplate, text: str) -> None:
    """Raise DecodeError for what stands beside the turns and is not shown to the template."""
    ignored = template.ignore_keys
    if any(key == "chosen" and all(_is_said(phrase, text) for phrase in phrases(value)) for key, value in chat.rest):
        ignored = (*ignored, "chosen", "rejected")  # the chat is the one preferred
    for key, value in chat.rest:
        if key not in ignored and not all(_is_said(phrase, text) for phrase in phrases(value)):
            raise _lost("the conversation", key)


def _check_said(
    chat: Chat,
    messages: list[Message],
    template: JinjaTemplate,
    slots: Slots,
    text: str,
    records: Mapping[str, str],
) -> None:
    ignored = template.ignore_keys
    _check_thoughts(chat, template, slots)
    leaves = [leaf for leaf in _leaves(chat.inputs, messages, records) if leaf.key not in ignored]
    number = next(n for n in range(len(text) + 2) if f"Zq{n}x" not in text)
    told = [f"Zq{number}x{n}qZ" for n in range(len(leaves))]
    found = _rendered(template, *_with_words(messages, chat.inputs, zip(leaves, told, strict=True)))
    missing = [leaf for leaf, word in zip(leaves, told, strict=True) if word not in found]
    tools = [leaf for leaf in leaves if leaf.key == "tools" and leaf.turn < 0]
    shown_tools = any(leaf not in missing for leaf in tools)  # what a template shows of them is its own
    for leaf in missing:
        if shown_tools and leaf in tools:
            continue
        own = text if leaf.key == _NAME else _text_of(chat.messages[leaf.turn]) if leaf.turn >= 0 else ""
        if leaf.key != "content" and _is_said(leaf.text.strip(), own):
            continue
        if leaf.key in REASONING and _renders_reasoning(template, slots):
            continue  # of earlier turns it is left out on purpose
        alone = _rendered(template, *_with_words(messages, chat.inputs, [(leaf, told[0])]))
        if alone == text:
            where = "the conversation" if leaf.turn < 0 else f"turn {leaf.turn + 1} ({messages[leaf.turn]['role']})"
            raise _lost(where, leaf.key)


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


def _is_said(phrase: str, text: str) -> bool:
    if phrase not in text:
        return False
    if len(phrase) >= _PHRASE_CHARACTERS:
        return True
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None


def _text_of(message: Mapping[str, Any]) -> str:
    items = items_of(message.get("content"))
    return "".join(str(item.get("text", "")) for item in items if isinstance(item, dict))


# Chats that hold nothing but words and media: one rendering tells all, where the frame around their words is known.


def _known_spans(chat: Chat, messages: list[Message], template: JinjaTemplate, slots: Slots, text: str) -> Spans | None:
    """What of a rendering carries loss, where it is the frame of the chat's shape around all that the chat says."""
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
    frame = _frame(template, slots, tuple(shape), chat.trained)
    return None if frame is None else frame.spans_in(said, text)


class _Frame(NamedTuple):
    """What a template writes around the words of chats of one shape.

    Attributes:
        pieces: before, between and behind the words.
        order: of the words, as places among all of the chat.
        spans: where loss begins and ends, each as a piece and a place in it.
    """

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    def spans_in(self, said: list[str], text: str) -> Spans | None:
        """Its spans in a rendering that is this frame around what a chat says, in full or without blanks around it."""
        for words in (said, [word.strip() for word in said]):
            filled = [words[place] for place in self.order]
            parts = [part for pair in zip(self.pieces, [*filled, ""], strict=True) for part in pair]
            if "".join(parts) == text:
                starts = [0, *accumulate(map(len, parts))]
                return [(starts[2 * a] + at, starts[2 * b] + to) for (a, at), (b, to) in self.spans]
        return None


@lru_cache(maxsize=4096)
def _frame(template: JinjaTemplate, slots: Slots, shape: Shape, trained: tuple[bool, ...]) -> _Frame | None:
    """The frame of chats of a shape; None where they are not rendered in full, or not told apart."""
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
        text, generated = template.render(messages, _NO_INPUTS)
        spans = loss_spans(messages, trained, template, _NO_INPUTS, text, generated)
    except DecodeError:
        return None
    words = list(re.finditer(r"Zw(\d+)wZ", text))
    order = tuple(int(word[1]) for word in words)
    if sorted(order) != list(range(told)):
        return None
    bounds = [0, *(end for word in words for end in word.span()), len(text)]
    pieces = list(zip(bounds[::2], bounds[1::2], strict=True))

    def place(at: int) -> tuple[int, int] | None:
        return next(((number, at - start) for number, (start, end) in enumerate(pieces) if start <= at <= end), None)

    found = [(place(start), place(end)) for start, end in spans]
    whole = tuple((begin, end) for begin, end in found if begin is not None and end is not None)
    return _Frame(tuple(text[a:b] for a, b in pieces), order, whole) if len(whole) == len(spans) else None


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


def _leaves(inputs: Inputs, messages: list[Message], records: Mapping[str, str]) -> Iterator[_Leaf]:
    """All strings that say something."""
    for turn, message in enumerate(messages):
        for key, value in message.items():
            if key == "content" or (key != "role" and key not in _PLUMBING and speaks(key, value, records)):
                yield from (_Leaf(turn, key, path, text) for path, text in _strings(value, (key,)))
    for key in Inputs._fields:
        for path, text in _strings(getattr(inputs, key), (key,)):
            yield _Leaf(-1, str(path[1]) if key == "variables" else key, path, text)


def _strings(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, str):
        if says(value):
            yield path, value
    elif isinstance(value, Mapping):
        for key, held in value.items():
            if key not in _PLUMBING:
                yield from _strings(held, (*path, key))
    elif isinstance(value, list):
        for index, held in enumerate(value):
            yield from _strings(held, (*path, index))


def _with_words(messages: list[Message], inputs: Inputs, told: Any) -> tuple[list[Message], Inputs]:
    """The chat with words behind some of its strings."""
    changed: list[Any] = list(messages)
    beside: Any = inputs._asdict()
    copied: dict[int, Any] = {}
    for leaf, word in told:
        text = leaf.text.rstrip()
        if leaf.turn >= 0:
            changed[leaf.turn] = _put(changed[leaf.turn], leaf.path, text + word + leaf.text[len(text) :], copied)
        else:
            beside = _put(beside, leaf.path, text + word + leaf.text[len(text) :], copied)
    return changed, Inputs(**beside)


def _put(value: Any, path: tuple[Any, ...], text: str, copied: dict[int, Any]) -> Any:
    """A copy with another string at a path; what was copied before is changed in place."""
    if not path:
        return text
    own = value if id(value) in copied else (dict(value) if isinstance(value, Mapping) else list(value))
    copied[id(own)] = own
    own[path[0]] = _put(own[path[0]], path[1:], text, copied)
    return own
