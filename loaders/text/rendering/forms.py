"""How a template takes content: strings or lists of items, and which items stand for media. It is tried once for each
template.

    template --small chats--> Forms;  message, Forms --> message in the form that the template takes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.chat_keys import shown
from orchdata.loaders.text.jinja import Inputs, JinjaTemplate, Message
from orchdata.loaders.text.template import Placeholder
from orchdata.loaders.text.work import TooMuchWork, Work

WORD: Final = "Zq0qZ"
NO_INPUTS: Final = Inputs()

Slots = tuple[tuple[str, str], ...]
"""(modality, mark of a part of it in the text)."""


class Forms(NamedTuple):
    """How a template renders content.

    Attributes:
        strings, typed: whether it takes strings, and lists of items.
        items: modality -> the item that it renders as the modality's mark.
        reads_arguments: whether it writes call arguments that are strings unchanged; otherwise JSON in a string is
            parsed into an object for it.
    """

    strings: bool
    typed: bool
    items: Mapping[str, Message]
    reads_arguments: bool


@lru_cache(maxsize=256)
def forms_of(template: JinjaTemplate, slots: Slots) -> Forms:
    plain = _probed(template, WORD)
    listed = _probed(template, [{"type": "text", "text": WORD}])
    strings, typed = WORD in plain, WORD in listed and _shows_items(listed) <= _shows_items(plain)
    items: dict[str, Message] = {}
    for name, mark in slots if typed else ():
        for item in ({"type": name}, {"type": name, name: ""}, {"type": f"{name}_url"}):
            if _probed(template, [item, {"type": "text", "text": WORD}]).count(mark) == 1:
                items[name] = item
                break
    arguments = json.dumps({"Zq1": "Zq2"})
    call = {"id": "call00000", "type": "function", "function": {"name": "Zq3", "arguments": arguments}}
    asked: Any = WORD if strings or not typed else [{"type": "text", "text": WORD}]
    calling = [{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return Forms(strings or not typed, typed, items, arguments in rendered_by(template, calling))


def _probed(template: JinjaTemplate, content: Any) -> str:
    return rendered_by(template, [{"role": "user", "content": content}])


def rendered_by(
    template: JinjaTemplate, messages: Sequence[Message], inputs: Inputs = NO_INPUTS, work: Work | None = None
) -> str:
    """Return a rendering; "" if the template rejects the chat."""
    try:
        return template.render(messages, inputs, work=work)[0]
    except TooMuchWork:
        raise
    except DecodeError:
        return ""


def _shows_items(text: str) -> int:
    """Count the items that a rendering shows as JSON, as a template for strings does with a list."""
    return text.count("'type'") + text.count('"type"')


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
