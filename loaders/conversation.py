"""JSON -> what it says of a sample: a conversation, a text, or nothing but metadata.

Read are: a list of turns, or a dict with one under "messages" or "conversations"; a turn is {"role", "content"}
(OpenAI, Qwen; content a string or a list of {"type": "text" | "image" | "audio", ...}) or {"from", "value"} (LLaVA,
ShareGPT; human and gpt are user and assistant). Else a dict's "text" or "caption".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from orchdata.loaders.decode_error import DecodeError
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.template import Placeholder, Turn
from orchdata.loaders.text import TextPreprocessor, decode_utf8

_CONVERSATION_KEYS: Final = ("messages", "conversations", "conversation")
_TEXT_KEYS: Final = ("text", "caption")
_ROLES: Final = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_MEDIA_TYPES: Final = {
    "image": IMAGE,
    "image_url": IMAGE,
    "audio": AUDIO,
    "audio_url": AUDIO,
    "input_audio": AUDIO,
}
_NAMED: Final = {"image": IMAGE, "images": IMAGE, "audio": AUDIO, "audios": AUDIO}

Content = tuple[str | Placeholder, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """What one JSON member says.

    Attributes:
        turns: a conversation, or None.
        text: a plain text, or None.
        named: modality -> names of media it says belong to the sample.
    """

    turns: list[Turn] | None = None
    text: str | None = None
    named: Mapping[int, list[str]] = field(default_factory=dict)


def read_document(payload: bytes | memoryview, pre: TextPreprocessor, *, lines: bool = False) -> Document:
    """Parse one JSON member; with `lines` each line is JSON, and several of them are a list.

    Raises DecodeError for broken JSON or a conversation that cannot be read.
    """
    try:
        value = _parse(decode_utf8(payload), lines=lines)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None
    if isinstance(value, list):
        return Document(turns=_turns(value, pre)) if _looks_like_turns(value) else Document()
    if not isinstance(value, dict):
        return Document()
    for key in _CONVERSATION_KEYS:
        if isinstance(value.get(key), list):
            return Document(turns=_turns(value[key], pre), named=_named(value))
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str):
            return Document(text=value[key])
    return Document()


def _parse(text: str, *, lines: bool) -> Any:
    if not lines:
        return json.loads(text)
    values = [json.loads(line) for line in text.split("\n") if line.strip()]
    return values[0] if len(values) == 1 else values


def split_placeholders(text: str, pre: TextPreprocessor) -> Content:
    """`text` cut at its placeholders; empty stretches are left out."""
    pattern, modality_of = _pattern(pre.image_placeholder, pre.audio_placeholder)
    if pattern is None:
        return (text,)
    pieces = pattern.split(text)
    return tuple(Placeholder(modality_of[piece]) if index % 2 else piece for index, piece in enumerate(pieces) if piece)


@lru_cache(maxsize=16)
def _pattern(image: str, audio: str) -> tuple[re.Pattern[str] | None, dict[str, int]]:
    modality_of = {mark: modality for mark, modality in ((image, IMAGE), (audio, AUDIO)) if mark}
    # Longest first: one mark may begin with the other.
    marks = sorted(modality_of, key=len, reverse=True)
    return (re.compile(f"({'|'.join(map(re.escape, marks))})") if marks else None), modality_of


def _looks_like_turns(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], dict) and ("role" in value[0] or "from" in value[0])


def _turns(value: list[Any], pre: TextPreprocessor) -> list[Turn]:
    if not value:
        raise DecodeError("the conversation has no turns")
    turns = [_turn(number, item) for number, item in enumerate(value, 1)]
    if any(isinstance(piece, Placeholder) for turn in turns for piece in turn.content):
        return turns  # media have items of their own, so marks in the text are text
    return [Turn(turn.role, _split_all(turn.content, pre)) for turn in turns]


def _split_all(content: Content, pre: TextPreprocessor) -> Content:
    return tuple(part for piece in content for part in split_placeholders(str(piece), pre))


def _turn(number: int, item: Any) -> Turn:
    if not isinstance(item, dict):
        raise DecodeError(f"turn {number} is a {type(item).__name__}, not a dict with role and content")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str):
        raise DecodeError(f"turn {number} has no role: its keys are {', '.join(map(str, item)) or 'none'}")
    if "content" not in item and "value" not in item:
        raise DecodeError(f"turn {number} ({role}) has no content: its keys are {', '.join(map(str, item))}")
    content = item["content"] if "content" in item else item["value"]
    return Turn(_ROLES.get(role, role), _content(number, content))


def _content(number: int, content: Any) -> Content:
    if content is None:  # a turn of tool calls alone
        return ()
    if isinstance(content, str):
        return (content,)
    if isinstance(content, list):
        return tuple(_item(number, item) for item in content)
    raise DecodeError(f"the content of turn {number} is a {type(content).__name__}, not a string or a list")


def _item(number: int, item: Any) -> str | Placeholder:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise DecodeError(f"the content of turn {number} holds a {type(item).__name__}, not a string or a dict")
    kind = item.get("type")
    if kind is None:  # Qwen-VL's older form: {"image": ...} or {"text": ...}
        kind = next((key for key in ("text", *_MEDIA_TYPES) if key in item), None)
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise DecodeError(f"the content of turn {number} has a text item without text")
        return str(item["text"])
    if kind in _MEDIA_TYPES:
        return Placeholder(_MEDIA_TYPES[kind])
    known = ", ".join(("text", *_MEDIA_TYPES))
    raise DecodeError(f"the content of turn {number} has an item of type {kind!r}; known are {known}")


def _named(value: dict[str, Any]) -> dict[int, list[str]]:
    """Media that a LLaVA-style record names. Names are never opened: media are the sample's own members."""
    named: dict[int, list[str]] = {}
    for key, modality in _NAMED.items():
        held = value.get(key)
        names = [held] if isinstance(held, str) else held if isinstance(held, list) else []
        if names:
            named[modality] = [str(name) for name in names]
    return named
