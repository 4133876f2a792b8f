"""JSON -> a chat for a jinja template: its turns in the form of such templates, with their context.

Besides the forms of `conversation`, it reads ShareGPT with tools (from: function_call, observation), alpaca
(instruction, input, output, history), and prompt with completion, as lists of turns or as strings. The context of the
turns (`system`, `tools`, `documents`, `chat_template_kwargs`) goes to the template. `rendering` checks afterwards that
all of it was rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.chat_keys import Repeating, is_chat_context, kind_of, says, says_nothing, shown, trains
from orchdata.loaders.text.jinja import REASONING, Inputs, JinjaTemplate
from orchdata.loaders.text.template import MediaWords, Placeholder

CHAT_KEYS: Final = ("messages", "conversations", "conversation")
SPEAKERS: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""Roles of ShareGPT -> roles of templates."""
_ROLES: Final = SPEAKERS | {
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_NAMES: Final = {"from": "role", "value": "content"}
_CALL: Final = "function_call"
_PREFERENCE: Final = ("chosen", "rejected")
SYSTEM: Final = ("system", "system_prompt", "system_message", "system_instruction")
_CONTEXT: Final = (*SYSTEM, "tools", "documents", "chat_template_kwargs")
_ALPACA: Final = ("instruction", "output")
_PAIR: Final = ("prompt", "completion")
PAIRS: Final = (_PAIR, _ALPACA)
"""Keys of a prompt and of what is learned after it."""
PAIR_KEYS: Final = (*_PAIR, *_ALPACA, "input")
_VIDEO: Final = ("video", "video_url", "input_video")
_SAYS: Final = ("tool_calls", "function_call", *REASONING)
"""Keys with which a turn without content says something."""

Content = str | list[dict[str, Any] | Placeholder]


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation.

    Attributes:
        messages: turns in the form of a template, with the role, the content (a string, or a list of items of text and
            placeholders of media) and other keys.
        trained: for each turn, whether it carries loss if the template permits it.
        inputs: further inputs of the template.
        rest: further content next to the turns that belongs to them.
    """

    messages: tuple[Mapping[str, Any], ...]
    trained: tuple[bool, ...]
    inputs: Inputs = Inputs()
    rest: tuple[tuple[str, Any], ...] = ()

    @property
    def placeholders(self) -> list[Placeholder]:
        """Its placeholders, in order."""
        return [
            item
            for message in self.messages
            for item in items_of(message.get("content"))
            if isinstance(item, Placeholder)
        ]

    def leading(self, modalities: Iterable[str]) -> Chat:
        """Return the chat with further placeholders, at the start of the user's first turn. Raises DecodeError."""
        names = list(modalities)
        if not names:
            return self
        at = next((n for n, message in enumerate(self.messages) if message["role"] == "user"), None)
        if at is None:
            raise DecodeError(f"the chat has no place for {names[0]}, and no turn of a user to put it")
        added = [Placeholder(name) for name in names]
        message = {**self.messages[at], "content": [*added, *items_of(self.messages[at].get("content"))]}
        return replace(self, messages=(*self.messages[:at], message, *self.messages[at + 1 :]))

    def without(self, modalities: Collection[str]) -> Chat:
        """Return the chat without the placeholders of these modalities."""
        if not modalities or not any(item.modality in modalities for item in self.placeholders):
            return self
        messages = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                kept = [item for item in content if not (isinstance(item, Placeholder) and item.modality in modalities)]
                message = {**message, "content": kept}
            messages.append(message)
        return replace(self, messages=tuple(messages))

    def with_context(self, record: Mapping[str, Any]) -> Chat:
        """Return the chat with the context in its record. Raises DecodeError."""
        chat = self
        system = next((value for key in SYSTEM if says(value := record.get(key))), None)
        if system is not None:
            if not isinstance(system, str):
                raise DecodeError("'system' next to the turns is no string")
            first = self.messages[0] if self.messages and self.messages[0]["role"] == "system" else None
            if first is None:
                turn = {"role": "system", "content": system}
                chat = replace(chat, messages=(turn, *self.messages), trained=(False, *self.trained))
            elif first.get("content") != system:
                raise DecodeError("two system prompts that differ, one of them next to the turns")
        inputs = chat.inputs
        tools, documents = (
            _same(key, known, _listed(key, record.get(key)))
            for key, known in (("tools", inputs.tools), ("documents", inputs.documents))
        )
        inputs = Inputs(tools, documents, inputs.variables)
        variables = record.get("chat_template_kwargs")
        if isinstance(variables, Mapping):
            known = {key: value for key, value in variables.items() if value is not None}
            inputs = inputs._replace(variables={**inputs.variables, **known})
        rest = [(key, value) for key, value in record.items() if key not in _CONTEXT and value is not None]
        more = tuple((key, value) for key, value in rest if is_chat_context(key) and says(value))
        return replace(chat, inputs=inputs, rest=(*self.rest, *more))


def items_of(content: Any) -> list[Any]:
    """Return the items of a turn's content; a string is one item of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def _same(key: str, known: list[Any] | None, other: list[Any] | None) -> list[Any] | None:
    if known is not None and other not in (None, known):
        raise DecodeError(f"two {key} that differ, one of them next to the turns")
    return other if known is None else known


def _listed(key: str, value: Any) -> list[Any] | None:
    """Return a list, which may be JSON in a string, or hold such strings. Raises DecodeError."""
    if not says(value):
        return None
    value = _parsed(key, value) if isinstance(value, str) else value
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise DecodeError(f"{key!r} next to the turns is a {type(value).__name__}, not a list")
    if key == "tools":  # a string of documents is a text
        parsed = [_parsed(key, one) if isinstance(one, str) else one for one in value]
        value = [tool for one in parsed for tool in (one if isinstance(one, list) else [one])]
        if any(isinstance(tool, str) for tool in value):
            raise DecodeError("'tools' next to the turns holds JSON in JSON: write each tool as an object")
    return value or None


def _parsed(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DecodeError(f"{key!r} next to the turns is a string that is no JSON") from None


def chat_of_turns(value: list[Any], template: JinjaTemplate, words: MediaWords) -> Chat:
    """Return the chat of a list of turns. Raises DecodeError."""
    turns = [_turn(number, item, template, words) for number, item in enumerate(value, 1)]
    placed = {item.modality for turn, _ in turns for item in items_of(turn.get("content")) if is_placeholder(item)}
    marks = {f"<{name}>": name for name in words.slots if name not in placed}
    if marks:
        pattern = re.compile(f"({'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})")
        for turn, _ in turns:
            turn["content"] = _split(turn.get("content"), pattern, marks)
            if turn["content"] is None:
                del turn["content"]
    return Chat(tuple(turn for turn, _ in turns), tuple(trained for _, trained in turns))


def is_placeholder(item: Any) -> bool:
    return isinstance(item, Placeholder)


def chat_of_record(value: Mapping[str, Any], template: JinjaTemplate, words: MediaWords) -> Chat | None:
    """Return the chat of a record with turns under other keys: alpaca, or prompt and completion; None for others.

    Raises DecodeError, also for a pair of preferred and rejected answers.
    """
    if any(says(value.get(key)) for key in _PREFERENCE):
        raise DecodeError(
            "a pair of answers, 'chosen' and 'rejected', which no batch of this library holds: keep the chat that the "
            'model is to learn, as {"messages": [...]}'
        )
    instruction, answer = (value.get(key) for key in _ALPACA)
    if isinstance(instruction, str) and isinstance(answer, str):
        return _alpaca(value, template, words)
    prompt, completion = (value.get(key) for key in _PAIR)
    if template.pairs and isinstance(prompt, str) and isinstance(completion, str):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return chat_of_turns(turns, template, words).with_context(_without(value, *_PAIR))
    if isinstance(prompt, list) and isinstance(completion, list):
        chat = chat_of_turns([*prompt, *completion], template, words)
        asked = (False,) * len(prompt)
        return replace(chat, trained=(*asked, *chat.trained[len(prompt) :])).with_context(_without(value, *_PAIR))
    return None


def is_record(names: Collection[str]) -> bool:
    """Whether these keys, or fields of a sample, form such a record."""
    return any(wanted <= {*names} for wanted in ({*_ALPACA}, {*_PAIR}, {*_PREFERENCE}))


def completion_of(value: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a prompt and its completion as plain text."""
    prompt, completion = (value.get(key) for key in _PAIR)
    return (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None


def _alpaca(value: Mapping[str, Any], template: JinjaTemplate, words: MediaWords) -> Chat:
    given = value.get("input")
    if not (isinstance(given, str) or says_nothing(given)):
        raise DecodeError(f"'input' is {kind_of(given)}, not a string")
    asked = "\n".join(text for text in (value["instruction"], given) if isinstance(text, str) and says(text))
    turns = [asked, value["output"]]
    history = value.get("history")
    if not says_nothing(history):
        known = isinstance(history, list) and all(
            isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in history
        )
        if not known:
            raise DecodeError("'history' is no list of pairs of strings")
        turns = [one for pair in history or () for one in pair] + turns
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    rest = _without(value, *_ALPACA, "input", "history", "text")
    return chat_of_turns(messages, template, words).with_context(rest)


def _without(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _turn(number: int, item: Any, template: JinjaTemplate, words: MediaWords) -> tuple[dict[str, Any], bool]:
    where = f"turn {number}"
    if not isinstance(item, dict):
        raise DecodeError(f"{where} is a {type(item).__name__}, not a dict with role and content")
    if isinstance(item, Repeating):
        raise DecodeError(f"{where} has a key twice")
    # Find the role and the content, under either pair of names.
    turn = {key: value for key, value in item.items() if value is not None}
    theirs, spoken = turn.pop("from", None), turn.pop("value", None)
    written = turn.pop("role", theirs)
    if not isinstance(written, str):
        raise DecodeError(f"{where} has no role: its keys are {', '.join(map(shown, list(item)[:8])) or 'none'}")
    role = _ROLES.get(written, written) if theirs is not None or written not in template.roles else written
    if not template.knows(role):
        known = ", ".join(template.roles)
        raise DecodeError(
            f"{where} has the role {shown(written)}; known are {known}: see `roles` of ChatTemplate.from_jinja"
        )
    # Read the content, and the calls of functions.
    content = turn.pop("content", spoken)
    if (theirs not in (None, written) and _ROLES.get(str(theirs), theirs) != role) or spoken not in (None, content):
        raise DecodeError(f"{where} says one thing under role and content, another under from and value")
    read: dict[str, Any] = {"role": role}
    if written == _CALL and isinstance(content, str):
        read |= {"content": "", "tool_calls": _calls(where, content)}
    elif content is not None:
        read["content"] = _content(where, content, words)
    # In the order of the data: a template may show it.
    names = (key for key, value in item.items() if value is not None)
    ordered = dict.fromkeys(_NAMES.get(name, name) for name in names) | turn | read
    trained = trains(f"{where} ({written})", turn, (), template.carries_loss(role))
    if trained and not _says(ordered):
        raise DecodeError(f"{where} ({written}) says nothing: it would be learned as an empty answer")
    return ordered, trained


def _says(turn: Mapping[str, Any]) -> bool:
    content = items_of(turn.get("content"))
    spoken = any(isinstance(item, Placeholder) or str(item.get("text", "?")).strip() for item in content)
    return spoken or any(turn.get(key) for key in _SAYS)


def _calls(where: str, text: str) -> list[dict[str, Any]]:
    """Return the function calls in ShareGPT's JSON, which is one call or a list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DecodeError(f"{where} (function_call) is no JSON") from None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DecodeError(f"{where} (function_call) names no function")
    return [{"type": "function", "function": call} for call in calls]


def _content(where: str, content: Any, words: MediaWords) -> Content:
    if isinstance(content, str):
        return content
    if isinstance(content, dict) and isinstance(content.get("type"), str):
        content = [content]
    if not isinstance(content, list):
        raise DecodeError(f"the content of {where} is a {type(content).__name__}, not a string or a list")
    return [_item(f"the content of {where}", item, words) for item in content]


def _item(where: str, given: Any, words: MediaWords) -> dict[str, Any] | Placeholder:
    if isinstance(given, str):
        return {"type": "text", "text": given}
    if not isinstance(given, dict):
        raise DecodeError(f"{where} holds a {type(given).__name__}, not a string or a dict")
    if isinstance(given, Repeating):
        raise DecodeError(f"{where} has an item with a key twice")
    item: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    kind = item.get("type")
    if kind is None:  # Qwen-VL's older form
        kind = next((key for key in ("text", *words.items) if key in item), None)
    # An item of media stands for one whole part.
    if isinstance(kind, str) and kind in words.items:
        words.check_single(where, kind, item)
        if says(item.get("text")):
            raise DecodeError(f"{where} has an item of type {kind!r} that holds 'text' too: give each its own item")
        return Placeholder.of(words.items[kind], kind, item)
    known = [name for name in words.slots if str(kind).endswith((f"_{name}", f"_{name}_url"))]
    if known and isinstance(kind, str) and kind not in _VIDEO:
        raise DecodeError(
            f"{where} has an item of type {shown(kind)}, which is not read: write it as {{'type': {known[0]!r}, "
            f"{known[0]!r}: ...}}"
        )
    if isinstance(kind, str) and kind in _VIDEO:
        raise DecodeError(f"{where} has an item of type {kind!r}, and videos are not read: leave such samples out")
    # An item of text; other items go to the template unchanged.
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise DecodeError(f"{where} has a text item without text")
        lost = next((key for key in words.items if says(item.get(key))), None)
        if lost is not None:
            raise DecodeError(f"{where} has an item of type 'text' that holds {lost!r} too: give each its own item")
        return {**item, "type": "text"}
    if not isinstance(kind, str):
        raise DecodeError(f"{where} has an item without a type: its keys are {', '.join(map(shown, list(item)[:8]))}")
    return item


def _split(content: Any, pattern: re.Pattern[str], marks: Mapping[str, str]) -> Any:
    """Return the content with placeholders in place of marks."""
    items = [content] if isinstance(content, str) else content
    if not isinstance(items, list) or not any(pattern.search(_text(item)) for item in items):
        return content
    split: list[dict[str, Any] | Placeholder] = []
    for item in items:
        if not _text(item):
            split.append(item)
            continue
        pieces = pattern.split(_text(item))
        for index, piece in enumerate(pieces):
            if index % 2:
                split.append(Placeholder(marks[piece]))
            elif piece:
                split.append({"type": "text", "text": piece})
    return split


def _text(item: Any) -> str:
    if isinstance(item, str):
        return item
    return str(item.get("text", "")) if isinstance(item, dict) and item.get("type") == "text" else ""
