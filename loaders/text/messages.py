"""JSON -> a chat: its turns in the form of templates, with placeholders for media, and their context.

A turn is {"role", "content"} (OpenAI, Qwen; content is a string or a list of {"type": "text" | "image" | "audio", ...})
or {"from", "value"} (LLaVA, ShareGPT; human and gpt are user and assistant). Under a plain template a turn is its role
and content. Keys next to them, or next to a conversation, are of three kinds: words (tool calls, reasoning, a system
prompt) are an error if they say something that no turn says, loss flags (weight, train, mask) if they differ from what
the template does; all others are metadata, never inspected. Null, blank and empty values say nothing: `datasets` fills
the fields of a struct with them. A jinja template gets all keys of a turn, and the context of the turns (`system`,
`tools`, `documents`, `chat_template_kwargs`); `rendering` checks afterwards that all of it was rendered. Under such a
template there are more forms: ShareGPT with tools (from: function_call, observation), alpaca (instruction, input,
output, history), and prompt with completion, as lists of turns or as strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import REASONING, Inputs, JinjaTemplate, Message, Work
from orchdata.loaders.text.template import ChatTemplate, MediaWords, Placeholder, items_of, text_of

# Words of keys, in any position: reasoning_content, toolCalls, thinking_blocks, ...
_WORDS: Final = frozenset(
    "tool tools toolcall toolcalls function functions functioncall reasoning think thinking thought thoughts rationale "
    "refusal".split()
)
# Whole keys, in lower case, letters only.
_OF_TURN: Final = frozenset(
    "name text video videos parts documents attachments files system prompt response "
    "completion chosen rejected channel recipient".split()
)
_OF_RECORD: Final = frozenset(
    "system systemprompt systemmessage systeminstruction systeminstructions developer documents video videos "
    "chosen rejected chattemplatekwargs custominstructions instructions history".split()
)
_OF_MEDIA: Final = frozenset("text caption transcript transcription alt alttext description".split())
_PREFERENCE: Final = ("chosen", "rejected")
_LOSS: Final = frozenset("weight train trainable training loss learn learnable mask masked".split())
_NEGATIONS: Final = frozenset(
    "no not non without ignore ignored skip skipped exclude excluded disable disabled off masked".split()
)
_ON: Final = ("1", "1.0", "true")
_OFF: Final = ("0", "0.0", "false")
_BLANK: Final = frozenset(("", "[]", "{}", "null", "none", "nan"))  # say nothing: `datasets` fills structs with them
_FLAGS: Final = frozenset("on off yes no true false minimal low medium high auto default".split())
_ROLE_WORDS: Final = frozenset("user assistant system human gpt".split())
# A phrase of this length counts as said if a turn contains it; a shorter one must be all of a turn.
_PHRASE_CHARACTERS: Final = 16
_KEY_CHARACTERS: Final = 64
HARMLESS: Final = frozenset(
    (
        *("id", "_id", "uid", "uuid", "idx", "index", "key", "__key__", "sample_id", "question_id"),
        *("url", "__url__", "__index_level_0__", "width", "height", "original_width", "original_height", "exif"),
        *("sha256", "sha1", "md5", "hash", "status", "error_message", "license", "source", "split"),
        *("dataset", "dataset_name", "subset", "created_at", "date", "version", "author", "messages[].tool_call_id"),
    )
)
"""Names of fields that say how a sample is stored or where it is from, compared whole. No name of a part, a weight, a
mask, a label, a file or a text is among them."""
WAY_OUT: Final = (
    "leave it out of the data if the model need not see it, or take the model's own template, ChatTemplate.from_jinja"
)

CHAT_KEYS: Final = ("messages", "conversations", "conversation")
CONTENT_KEYS: Final = ("content", "value")
ROLE_KEYS: Final = ("role", "from")
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
SYSTEM: Final = ("system", "system_prompt", "system_message", "system_instruction")
_CONTEXT: Final = (*SYSTEM, "tools", "documents", "chat_template_kwargs")
ALPACA: Final = ("instruction", "output")
PAIR: Final = ("prompt", "completion")
PAIRS: Final = (PAIR, ALPACA)
"""Keys of a prompt and of what is learned after it."""
PAIR_KEYS: Final = (*PAIR, *ALPACA, "input")
_VIDEO: Final = ("video", "video_url", "input_video")
_SAYS: Final = ("tool_calls", "function_call", *REASONING)
"""Keys with which a turn without content says something."""

Template = ChatTemplate | JinjaTemplate
Marks = tuple[tuple[str, str], ...]
"""(text, modality): a part goes where the text is."""


class Repeating(dict[str, Any]):
    """A JSON object with a duplicate key: one of its values is lost."""


def says(value: Any) -> bool:
    """Whether a JSON value contains words."""
    if isinstance(value, str):
        return value.strip().lower() not in _BLANK
    return isinstance(value, (dict, list)) and any(True for _ in phrases(value))


def says_nothing(value: Any) -> bool:
    """Whether a JSON value is null, false, blank, or lists and dicts of nothing else: `datasets` fills structs."""
    if isinstance(value, str):
        return not says(value)
    return all(leaf is None or leaf is False or (isinstance(leaf, str) and not says(leaf)) for leaf in _leaves(value))


def is_wrong(value: Any) -> bool:
    """Whether a JSON value that is no string says something where a text is read."""
    return value is False or not says_nothing(value)


def has_strings(value: Any) -> bool:
    """Whether a JSON value has strings that say something, but those under harmless names."""
    return any(isinstance(leaf, str) and says(leaf) for leaf in _leaves(value, HARMLESS))


def phrases(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value that say something, without keys."""
    return (leaf.strip() for leaf in _leaves(value) if isinstance(leaf, str) and leaf.strip().lower() not in _BLANK)


def _leaves(value: Any, without: Collection[str] = ()) -> Iterator[Any]:
    """Yield the values in a JSON value that are no lists and dicts, but those under some keys."""
    pending = [value]  # no recursion: the depth depends on the data
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(each for key, each in item.items() if key not in without)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        else:
            yield item


class _Spoken:
    """Texts that are searched for phrases; searches count as work."""

    def __init__(self, texts: Collection[str], work: Work) -> None:
        self._texts = texts
        self._work = work
        self._found: set[str] = set()  # long phrases, each of which is searched once

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(text.strip() for text in self._texts)

    def has_all(self, value: Any) -> bool:
        """Whether each phrase in a JSON value is all of a text, or a long one contained in it."""
        for phrase in phrases(value):
            if phrase in _ROLE_WORDS or phrase in self._whole or phrase in self._found:
                continue
            if len(phrase) < _PHRASE_CHARACTERS:
                return False
            self._work.add(sum(map(len, self._texts)))
            if not any(phrase in text for text in self._texts):
                return False
            self._found.add(phrase)
        return True

    def check(self, where: str, key: str, value: Any) -> None:
        if says(value) and not self.has_all(value):
            raise DecodeError(f"{where} has {shown(key)}, which no template renders: {WAY_OUT}")


def speaks(key: str, value: Any, media: Collection[str]) -> bool:
    """Whether a key of a turn, besides role and content, says something that belongs to the chat."""
    words, name = _split(key)
    if words & _LOSS or not says(value):
        return False
    return name in _OF_TURN or name in media or bool(words & _WORDS and not is_flag(value))


def _trains(where: str, turn: Mapping[str, Any], loss: bool) -> bool:
    """Whether a turn carries loss by its own flags, which may only remove the `loss` of its role."""
    trained = loss
    for key in filter(is_loss_flag, turn):
        if loss and _flag(turn[key]) in _values(key, learned=False):
            trained = False
        else:
            _check_loss(where, key, turn[key], loss)
    return trained


def is_loss_flag(key: str) -> bool:
    """Whether a key of a turn says whether it is learned: it is followed, or an error."""
    return not _LOSS.isdisjoint(_split(key)[0])


def _flag(value: Any) -> str:
    return str(value).strip().lower() if isinstance(value, str | int | float) else "?"


def _values(key: str, *, learned: bool) -> tuple[str, ...]:
    """Return the values of a loss flag by which its turn is learned, or not; none if the flag can mean either: a mask
    that is no loss mask, and several negations.
    """
    words, name = _split(key)
    negations = len(words & _NEGATIONS)
    if negations > 1 or ("mask" in words and not 0 <= name.find("loss") < name.find("mask")):
        return ()
    return _ON if learned != (negations == 1) else _OFF


def _check_loss(where: str, key: str, value: Any, loss: bool) -> None:
    """Raise DecodeError for a loss flag that differs from what the template does."""
    if _flag(value) in (*_BLANK, *_values(key, learned=loss)):
        return
    carries = "carries" if loss else "carries no"
    raise DecodeError(
        f"{where} has {shown(key)}, a loss flag, which is not followed: by the template a turn of its role "
        f"{carries} loss"
    )


def is_chat_context(key: str) -> bool:
    """Whether a key, or a field, next to the conversation says something that belongs to it."""
    words, name = _split(key)
    return bool(words & _WORDS) or name in _OF_RECORD


def check_record(record: Mapping[str, Any], own: Collection[str], texts_of: Callable[[], list[str]]) -> None:
    """Raise DecodeError for a key next to a conversation that would be lost: that says more than the turns' texts."""
    context = [key for key, value in record.items() if is_chat_context(key) and value is not None and key not in own]
    if not context:
        return
    said = _Spoken(texts_of(), Work())
    chosen = record.get("chosen")
    settled = _PREFERENCE if says(chosen) and said.has_all(chosen) else ()  # the conversation is the preferred one
    for key in context:
        if key not in settled and not (is_flag(record[key]) and _split(key)[0] & _WORDS):
            said.check("the conversation", key, record[key])


def kind_of(value: Any) -> str:
    """What a JSON value is, in words, for an error: "a dict", "the int 5", "NaN"."""
    if value != value:
        return "NaN"
    if isinstance(value, int | float):
        return f"the {type(value).__name__} {value}"[:80]
    return f"a {type(value).__name__}"


def shown(name: str) -> str:
    """A string from the data, shortened for an error."""
    return repr(name if len(name) <= 60 else name[:60] + "...")


def is_flag(value: Any) -> bool:
    """Whether a value is a setting of a generation and has no content: `reasoning: "on"`, `thinking_budget: "1024"`."""
    return isinstance(value, str) and (value.strip().lower() in _FLAGS or value.strip().isdecimal())


def _split(key: str) -> tuple[frozenset[str], str]:
    """Return the words of a key, and its letters in lower case: "toolCalls" has ("tool", "calls") and "toolcalls"."""
    return _split_short(key[:_KEY_CHARACTERS])  # what is cached is short


@lru_cache(maxsize=4096)
def _split_short(key: str) -> tuple[frozenset[str], str]:
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)]
    return frozenset(words), "".join(words)


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: turns with the role, the content (a string, or a list of items of text and placeholders of
    media), and under a jinja template other keys.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]  # for each turn: it carries loss if the template permits it
    inputs: Inputs = Inputs()
    rest: tuple[tuple[str, Any], ...] = ()  # further content next to the turns that belongs to them
    # Modality -> names of media in the items of its turns, in their order; none if an item has no name.
    placed: Mapping[str, list[str]] = field(default_factory=dict, compare=False)

    def texts(self) -> list[str]:
        """The text of each turn."""
        return [text_of(message) for message in self.messages]

    @property
    def placeholders(self) -> list[Placeholder]:
        """Its placeholders, in order."""
        items = [item for message in self.messages for item in items_of(message.get("content"))]
        return [item for item in items if isinstance(item, Placeholder)]

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
        for key, known in (("tools", inputs.tools), ("documents", inputs.documents)):
            other = _listed(key, record.get(key))
            if known is not None and other not in (None, known):
                raise DecodeError(f"two {key} that differ, one of them next to the turns")
            if other is not None:
                inputs = Inputs(**{**inputs._asdict(), key: other})
        variables = record.get("chat_template_kwargs")
        if isinstance(variables, Mapping):
            given = {key: value for key, value in variables.items() if value is not None}
            inputs = inputs._replace(variables={**inputs.variables, **given})
        rest = [(key, value) for key, value in record.items() if key not in _CONTEXT and is_chat_context(key)]
        return replace(chat, inputs=inputs, rest=(*self.rest, *(each for each in rest if says(each[1]))))


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


def chat_of_turns(value: list[Any], template: Template, words: MediaWords) -> Chat:
    """Return the chat of a list of turns. Raises DecodeError for what no template renders, or no one can place."""
    media: dict[str, list[Any]] = {}  # modality -> names in its items
    work = Work()
    turns = [
        _plain_turn(item, template) or _turn(f"turn {number}", item, template, words, media, work)
        for number, item in enumerate(value, 1)
    ]
    # Marks in strings are placeholders, but of modalities with items.
    marks = words.marks
    if isinstance(template, JinjaTemplate):
        marks = tuple((f"<{name}>", name) for name in words.slots)
    marks = tuple([(mark, name) for mark, name in marks if name not in media])
    for turn, _ in turns:
        if turn.get("content"):
            turn["content"] = _placed(turn["content"], marks)
    placed = {name: names for name, names in media.items() if all(isinstance(each, str) and each for each in names)}
    return Chat(tuple([turn for turn, _ in turns]), tuple([trained for _, trained in turns]), placed=placed)


def _plain_turn(item: Any, template: Template) -> tuple[dict[str, Any], bool] | None:
    """Return a turn of a plain template with a known role and a string with content alone, as most are; else None."""
    if type(item) is not dict or len(item) != 2 or isinstance(template, JinjaTemplate):
        return None
    role, content = item.get("role"), item.get("content")
    if role is None:
        role, content = item.get("from"), item.get("value")
    if type(role) is not str or type(content) is not str or not content or content.isspace():
        return None
    role = SPEAKERS.get(role, role)
    return ({"role": role, "content": content}, template.carries_loss(role)) if template.knows(role) else None


def _turn(
    where: str, item: Any, template: Template, words: MediaWords, media: dict[str, list[Any]], work: Work
) -> tuple[dict[str, Any], bool]:
    """Return a turn, and whether it carries loss. `media` gets the names in its items."""
    if not isinstance(item, dict):
        raise DecodeError(f"{where} is a {type(item).__name__}, not a dict with role and content")
    if isinstance(item, Repeating):
        raise DecodeError(f"{where} has a key twice")
    # Find the role and the content, under either pair of names. `datasets` fills the fields of a struct with nulls.
    is_jinja = isinstance(template, JinjaTemplate)
    turn = {key: value for key, value in item.items() if value is not None}
    theirs, spoken = turn.pop("from", None), turn.pop("value", None)
    written = turn.pop("role", theirs)
    if not isinstance(written, str):
        raise DecodeError(f"{where} has no role: its keys are {_keys(item)}")
    roles = _ROLES if is_jinja else SPEAKERS
    is_ours = is_jinja and theirs is None and written in template.roles
    role = written if is_ours else roles.get(written, written)
    if not template.knows(role):
        known = ", ".join(dict.fromkeys((*template.roles, *getattr(template, "loss_roles", ()))))
        way_out = "`roles` of ChatTemplate.from_jinja" if is_jinja else "ChatTemplate.roles"
        raise DecodeError(f"{where} has the role {shown(written)}; known are {known}: see {way_out}")
    content = turn.pop("content", spoken)
    if (theirs not in (None, written) and roles.get(str(theirs), theirs) != role) or spoken not in (None, content):
        raise DecodeError(f"{where} says one thing under role and content, another under from and value")
    # Read the content, and the calls of functions.
    read: dict[str, Any] = {"role": role}
    if is_jinja and written == _CALL and isinstance(content, str):
        read |= {"content": "", "tool_calls": _calls(where, content)}
    elif content is not None:
        read["content"] = _content(where, content, template, words, media)
    # Other keys go to a jinja template, in the order of the data: it may show it. No plain template renders them.
    loss, who = template.carries_loss(role), f"{where} ({written})"
    if is_jinja:
        trained = _trains(who, turn, loss)
        read = dict.fromkeys(_NAMES.get(key, key) for key, value in item.items() if value is not None) | turn | read
    else:
        trained = loss
        said = _Spoken((text_of(read), role), work)
        for key, value in turn.items():
            if is_loss_flag(key):
                _check_loss(who, key, value, loss)
            elif speaks(key, value, words.records):
                said.check(who, key, value)
        if content is None:
            raise DecodeError(f"{who} has no content: its keys are {_keys(item)}")
    if trained and not _says(read):
        raise DecodeError(f"{who} says nothing: it would be learned as an empty answer")
    return read, trained


def _keys(item: Mapping[str, Any]) -> str:
    return ", ".join(map(shown, list(item)[:8])) or "none"


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


def _content(
    where: str, content: Any, template: Template, words: MediaWords, media: dict[str, list[Any]]
) -> str | list[dict[str, Any] | Placeholder]:
    if isinstance(content, str):
        return content
    is_jinja = isinstance(template, JinjaTemplate)
    if is_jinja and isinstance(content, dict) and isinstance(content.get("type"), str):
        content = [content]
    if not isinstance(content, list):
        raise DecodeError(f"the content of {where} is a {type(content).__name__}, not a string or a list")
    items = [_item(f"the content of {where}", item, words, media, is_jinja=is_jinja) for item in content]
    # Under a plain template, one text says the same as a string.
    if not is_jinja and len(items) == 1 and isinstance(items[0], dict):
        return str(items[0]["text"])
    return items


def _item(
    where: str, given: Any, words: MediaWords, media: dict[str, list[Any]], *, is_jinja: bool
) -> dict[str, Any] | Placeholder:
    if isinstance(given, str):
        return {"type": "text", "text": given}
    if type(given) is dict and len(given) == 2 and given.get("type") == "text" and type(given.get("text")) is str:
        return given  # as most are
    if not isinstance(given, dict):
        raise DecodeError(f"{where} holds a {type(given).__name__}, not a string or a dict")
    if isinstance(given, Repeating):
        raise DecodeError(f"{where} has an item with a key twice")
    item: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    # Its type. Qwen-VL's older form has none: {"image": ...} or {"text": ...}.
    keys = ("text", *words.items)
    kind = item["type"] if "type" in item else next((key for key in keys if key in item), None)
    modality = words.items.get(kind) if isinstance(kind, str) else None
    if not isinstance(kind, str) or (modality is None and kind != "text"):
        return _item_of_template(where, kind, item, words, is_jinja=is_jinja)
    # It stands for one whole part, or for one text, and nothing else in it is lost.
    for key in ("text",) if is_jinja and modality else keys:
        if key in item and key != kind and words.items.get(key) != modality and says(item[key]):
            raise DecodeError(f"{where} has an item of type {kind!r} that holds {key!r} too: give each its own item")
    for key, value in () if is_jinja else item.items():
        key_words, name = _split(key)
        is_lost = (key_words & _WORDS and not is_flag(value)) or (modality is not None and name in _OF_MEDIA)
        if key not in ("type", *keys) and is_lost:
            _Spoken((), Work()).check(f"{where}, in an item of type {kind!r},", key, value)
    if modality is not None:
        value, index = item.get(kind), item.get("index")
        if isinstance(value, list) and len(value) > 1 and modality not in words.listed:
            raise DecodeError(f"{where} has an item of type {kind!r} that holds {len(value)}: give each its own item")
        names = media.setdefault(modality, [])
        if isinstance(index, int) and index != len(names):
            raise DecodeError(
                f"{where} places {kind} {index} where number {len(names)} follows: media fill their places in the "
                "order of the fields"
            )
        names.append(value.get("url") if isinstance(value, dict) else value)
        return Placeholder.of(modality, kind, item)
    if not isinstance(item.get("text"), str):
        raise DecodeError(f"{where} has a text item without text")
    return {**item, "type": "text"} if is_jinja else {"type": "text", "text": item["text"]}


def _item_of_template(where: str, kind: Any, item: dict[str, Any], words: MediaWords, *, is_jinja: bool) -> Message:
    """Return an item that is neither text nor media, which a jinja template gets unchanged. Raises DecodeError."""
    if not is_jinja:
        given = shown(kind) if isinstance(kind, str) else f"a {type(kind).__name__}"
        raise DecodeError(f"{where} has an item of type {given}; known are {', '.join(('text', *words.items))}")
    if not isinstance(kind, str):
        raise DecodeError(f"{where} has an item without a type: its keys are {_keys(item)}")
    if kind in _VIDEO:
        raise DecodeError(f"{where} has an item of type {kind!r}, and videos are not read: leave such samples out")
    known = next((name for name in words.slots if kind.endswith((f"_{name}", f"_{name}_url"))), None)
    if known is not None:
        raise DecodeError(
            f"{where} has an item of type {shown(kind)}, which is not read: write it as {{'type': {known!r}, "
            f"{known!r}: ...}}"
        )
    return item


def _placed(content: str | list[Any], marks: Marks) -> str | list[Any]:
    """Return the content with placeholders in place of marks."""
    items = items_of(content)
    texts = ["" if isinstance(each, Placeholder) or each["type"] != "text" else each["text"] for each in items]
    if not any(_holds(text, marks) for text in texts):
        return content
    split: list[Any] = []
    for item, text in zip(items, texts, strict=True):
        pieces = split_placeholders(text, marks)
        split += [{"type": "text", "text": each} if isinstance(each, str) else each for each in pieces] or [item]
    return split


def split_placeholders(text: str, marks: Marks) -> tuple[str | Placeholder, ...]:
    """Return `text` cut at its marks, without empty stretches."""
    if not _holds(text, marks):
        return (text,) if text else ()
    pattern, name_of = _pattern(marks)
    pieces = pattern.split(text)
    return tuple(Placeholder(name_of[piece]) if index % 2 else piece for index, piece in enumerate(pieces) if piece)


def _holds(text: str, marks: Marks) -> bool:
    for mark, _ in marks:
        if mark in text:
            return True
    return False


@lru_cache(maxsize=16)
def _pattern(marks: Marks) -> tuple[re.Pattern[str], dict[str, str]]:
    name_of = dict(marks)
    # Longest first: a mark may begin with another one.
    longest = sorted(name_of, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})"), name_of


def chat_of_record(value: Mapping[str, Any], template: JinjaTemplate, words: MediaWords) -> Chat | None:
    """Return the chat of a record with turns under other keys: alpaca, or prompt and completion; None for others.
    Raises DecodeError, also for a pair of preferred and rejected answers.
    """
    if any(says(value.get(key)) for key in _PREFERENCE):
        raise DecodeError(
            "a pair of answers, 'chosen' and 'rejected', which no batch of this library holds: keep the chat that the "
            'model is to learn, as {"messages": [...]}'
        )
    if all(isinstance(value.get(key), str) for key in ALPACA):
        given = value.get("input")
        if not (isinstance(given, str) or says_nothing(given)):
            raise DecodeError(f"'input' is {kind_of(given)}, not a string")
        asked = "\n".join(text for text in (value["instruction"], given) if isinstance(text, str) and says(text))
        said, history = [asked, value["output"]], value.get("history")
        if not says_nothing(history):
            known = isinstance(history, list) and all(
                isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in history
            )
            if not known:
                raise DecodeError("'history' is no list of pairs of strings")
            said = [one for pair in history or () for one in pair] + said
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        return chat_of_turns(turns, template, words).with_context(_without(value, *ALPACA, "input", "history", "text"))
    prompt, completion = (value.get(key) for key in PAIR)
    if template.pairs and isinstance(prompt, str) and isinstance(completion, str):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return chat_of_turns(turns, template, words).with_context(_without(value, *PAIR))
    if isinstance(prompt, list) and isinstance(completion, list):
        chat = chat_of_turns([*prompt, *completion], template, words)
        trained = (False,) * len(prompt) + chat.trained[len(prompt) :]
        return replace(chat, trained=trained).with_context(_without(value, *PAIR))
    return None


def is_record(names: Collection[str]) -> bool:
    """Whether these keys, or fields of a sample, form such a record."""
    return any({*wanted} <= {*names} for wanted in (*PAIRS, _PREFERENCE))


def completion_of(value: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a prompt and its completion as plain text."""
    prompt, completion = (value.get(key) for key in PAIR)
    return (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None


def _without(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}
