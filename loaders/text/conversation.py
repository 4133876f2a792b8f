"""JSON -> the content of a sample: a conversation, a text, or only metadata.

It reads a list of turns, a turn, or a dict with a list of them under "messages", "conversations" or "conversation".
A turn is {"role", "content"} (OpenAI, Qwen; content is a string or a list of {"type": "text" | "image" | "audio", ...})
or {"from", "value"} (LLaVA, ShareGPT; human and gpt are user and assistant). Otherwise it reads a dict's text, under
the first of the recipe's names of texts that says something.

Content that belongs to a conversation and would be lost is an error, see `chat_keys`.

Keys and columns with names for a sample's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.harmless_names import HARMLESS
from orchdata.loaders.text.chat_keys import (
    WAY_OUT,
    Repeating,
    check_item,
    check_record,
    check_turn,
    has_strings,
    is_chat_context,
    is_wrong,
    kind_of,
    says,
    says_nothing,
    shown,
)
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    CHAT_KEYS,
    PAIRS,
    SPEAKERS,
    Chat,
    chat_of_record,
    chat_of_turns,
    completion_of,
)
from orchdata.loaders.text.preprocessor import TEXT_FIELDS, decode_utf8
from orchdata.loaders.text.template import ChatTemplate, MediaWords, Placeholder, Turn
from orchdata.loaders.text.work import Work

_READ_KEYS: Final = (*CHAT_KEYS, *TEXT_FIELDS)
_HALVES: Final = frozenset("prompt completion response question answer instruction output query".split())
"""Words of names of which one alone is never a text."""
_MOST_KEYS: Final = 4
"""Keys with strings that are not read in an error."""
_FILE_NAMES: Final = ("file_name", "file_names")
_ARRAY: Final = "a sample is one of them, and a file that is an array of samples ends in .json"
_ROLE_KEYS: Final = ("role", "from")
CONTENT_KEYS: Final = ("content", "value")
_INT_DIGITS: Final = 640  # the minimum of Python's limit
_VIDEO_KEYS: Final = ("video", "videos")

Content = tuple[str | Placeholder, ...]


_NONE: Final[Mapping[str, list[str]]] = MappingProxyType({})


class Document(NamedTuple):
    """The content of one JSON member.

    Attributes:
        turns: a conversation, or None.
        chat: a conversation for a jinja template, or None.
        completion: a prompt and its completion, as plain text; or None.
        text: a plain text, or None.
        key: what the record has it under.
        named: modality -> names of media that belong to the sample.
        placed: modality -> names of media in the items of its turns, in their order.
        rest: the value if it is none of these, or names a video next to its text; for `why_unread`.
    """

    turns: list[Turn] | None = None
    chat: Chat | None = None
    completion: tuple[str, str] | None = None
    text: str | None = None
    key: str = ""
    named: Mapping[str, list[str]] = _NONE
    placed: Mapping[str, list[str]] = _NONE
    rest: Any = None

    @property
    def is_chat(self) -> bool:
        return self.turns is not None or self.chat is not None


class Rules(NamedTuple):
    """How to read records: the template, with its roles, the words for media, and the keys of plain text."""

    template: ChatTemplate | JinjaTemplate
    words: MediaWords
    text_keys: tuple[str, ...] = TEXT_FIELDS

    @classmethod
    def of(cls, template: ChatTemplate | JinjaTemplate, words: MediaWords, fields: Sequence[str]) -> Rules:
        """Return the rules of a recipe. Its text fields go before the default ones."""
        return cls(template, words, tuple(dict.fromkeys((*fields, *TEXT_FIELDS))))


def document_of(value: Any, rules: Rules) -> Document:
    """Return the content of a parsed value. Raises DecodeError for a conversation that cannot be read completely."""
    if isinstance(value, dict):
        if _is_turn(value) and _knows(value, rules.template):
            return _chat([value], rules)
        return _record(value, rules)
    if isinstance(value, list) and any(map(_is_turn, value)):
        return _chat(value, rules)
    return Document(rest=value)


def parse_json(payload: bytes | memoryview, *, lines: bool = False) -> Any:
    """Return the value of a JSON payload. Raises DecodeError."""
    text = decode_utf8(payload)
    try:
        if not lines:
            return _loads(text)
        values = [_loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None
    return values[0] if len(values) == 1 else values


def _loads(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        if text.startswith("\ufeff"):
            raise ValueError("it begins with two byte order marks") from None
        raise
    except ValueError:  # a number with more digits than Python parses as int
        return json.loads(text, object_pairs_hook=_object, parse_int=_number)


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < _INT_DIGITS else float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    return parsed if len(parsed) == len(pairs) else Repeating(pairs)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object)


def _record(value: dict[str, Any], rules: Rules) -> Document:
    if isinstance(value, Repeating) and not value.keys().isdisjoint((*CHAT_KEYS, *rules.text_keys)):
        raise DecodeError("a key comes twice in the record")
    document: Document | None = None
    for key in () if value.keys().isdisjoint(CHAT_KEYS) else CHAT_KEYS:
        if (turns := value.get(key)) is None:
            continue
        if isinstance(turns, list) and turns:
            chat = _chat(turns, rules)
            if document is not None and (document.turns, document.chat) != (chat.turns, chat.chat):
                raise DecodeError(f"two conversations that differ, the second under {key!r}")
            document = chat
        elif not isinstance(turns, list) and is_wrong(turns):
            raise DecodeError(_wrong(key, turns))
    if isinstance(rules.template, JinjaTemplate):
        rendered = _rendered_record(value, document, rules.template, rules.words)
        if rendered is not None:
            return rendered
    elif document is not None:
        check_record(value, (*_READ_KEYS, *rules.words.records), document.turns or (), Work())
        return document._replace(named=named_in(value, rules.words))
    found = _text_key(value, rules.text_keys)
    if found is None or _video_in(value) not in (None, *rules.words.records):
        return Document(rest=value, named=named_in(value, rules.words))
    return Document(text=value[found], key=found, named=named_in(value, rules.words))


def _text_key(record: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the first name with a text that says something, else with a blank one; None for no string."""
    blank: str | None = None
    for name in names:
        if (value := record.get(name)) is None:
            continue
        if isinstance(value, str):
            if value and not value.isspace():
                return name
            blank = name if blank is None else blank
        elif is_wrong(value):
            return None
    return blank


def _wrong(key: str, value: Any) -> str:
    """Return the error of a value that cannot be what its key names."""
    wanted = "a list of turns" if key in CHAT_KEYS else "a string"
    return (
        f"{key!r} is {kind_of(value)}, not {wanted}: write it as one in the data, or by Recipe(record=...), or leave "
        "the sample out"
    )


def document_of_fields(record: dict[str, Any], rules: Rules) -> Document | None:
    """Read the text fields of a record, such as columns of a row, under a jinja template; JSON in them is parsed."""
    known: dict[str, Any] = {}
    for key, text in record.items():
        known[key] = text
        if key not in ("instruction", "input", "output") and text[:1] in ("[", "{"):
            try:
                parsed = parse_json(text.encode())
            except (DecodeError, UnicodeEncodeError):
                continue
            if key not in ("prompt", "completion") or (isinstance(parsed, list) and any(map(_is_turn, parsed))):
                known[key] = parsed
    return _rendered_record(known, None, cast(JinjaTemplate, rules.template), rules.words)


def _rendered_record(
    record: dict[str, Any], document: Document | None, template: JinjaTemplate, words: MediaWords
) -> Document | None:
    """Read a record under a jinja template, which gets the context of the turns; None if the record has no turns."""
    named = named_in(record, words)
    if document is not None and document.chat is not None:
        context = {key: value for key, value in record.items() if key not in (*_READ_KEYS, *words.records)}
        return document._replace(chat=document.chat.with_context(context), named=named)
    chat = chat_of_record(record, template, words)
    if chat is not None:
        return Document(chat=chat, named=named)
    completion = completion_of(record)
    return None if completion is None else Document(completion=completion, named=named)


def _video_in(value: Mapping[str, Any]) -> str | None:
    """Return the key with which a record names a video."""
    if value.keys().isdisjoint(_VIDEO_KEYS):  # most records, and the fastest check
        return None
    return next((key for key in _VIDEO_KEYS if says(value.get(key))), None)


def why_unread(value: Any, rules: Rules, *, is_chat: bool = False) -> str | None:
    """Return why a JSON value without a text to learn has strings that no rule reads, or None.

    Args:
        is_chat: whether its turns are read.
    """
    if not isinstance(value, dict):
        what = "a bare string, not a record" if isinstance(value, str) else f"a list of records or strings: {_ARRAY}"
        return what if has_strings(value) else None
    reason = None if is_chat else _why_no_text(value, rules)
    if reason is not None:
        return reason
    read = (*rules.words.records, *(key for key in value if is_chat and (key in CHAT_KEYS or is_chat_context(key))))
    left = [key for key in value if key not in HARMLESS and key not in read and not key.endswith(_FILE_NAMES)]
    left = [key for key in left if not says_nothing(value[key])]
    keys = [key for key in left if has_strings(value[key])]
    if not keys:
        return None
    if len(left) == 1 and isinstance(value[keys[0]], str) and is_whole(keys[0]):
        way_out = f"columns={{{shown(keys[0])}: 'text'}} renames it; known keys of records are "
        way_out += ", ".join((*CHAT_KEYS, *rules.text_keys))
    else:
        way_out = "write what is to be learned as a chat, a list of turns under messages, or as prompt and completion"
    names = ", ".join(map(shown, keys[:_MOST_KEYS]))
    kept = f"Recipe(keep=({names},)) delivers what is not to be learned"
    return f"its words are under {names}, which no rule reads: {way_out}; {kept}"


def _why_no_text(record: Mapping[str, Any], rules: Rules) -> str | None:
    """Return why a record has the name of a text or chat, and neither."""
    video = _video_in(record)
    if video is not None and any(isinstance(record.get(key), str) for key in rules.text_keys):
        return f"it names a video under {video!r}, which is not read: {WAY_OUT}"
    for key in (*CHAT_KEYS, *rules.text_keys):
        value = record.get(key)
        if key in CHAT_KEYS and value == []:
            return "the conversation has no turns"
        if not isinstance(value, str) and is_wrong(value):
            return _wrong(key, value)
    if says(record.get("role")) and says(record.get("content")):
        return "role and content are no turn"
    # A prompt and its answer, which only a model's own template reads, and as strings.
    for pair in PAIRS:
        if not any(says_nothing(record.get(key)) for key in pair):
            wrong = next((key for key in pair if not isinstance(record[key], str)), None)
            if wrong is not None:
                return _wrong(wrong, record[wrong])
            return f"{' and '.join(pair)} are read under a model's own template, ChatTemplate.from_jinja"
    return None


def is_whole(name: str) -> bool:
    """Whether the words under a name may be all that is learned, unlike a question or an answer."""
    return names_words(name) and _HALVES.isdisjoint(
        word.removesuffix("s") for word in re.split(r"[^a-z]+", name.lower())
    )


def split_placeholders(text: str, words: MediaWords, placed: Collection[str] = ()) -> Content:
    """Return `text` cut at its marks, except those of the modalities in `placed`, without empty stretches."""
    marks = words.marks
    if placed:
        marks = tuple((mark, name) for mark, name in marks if name not in placed)
    for mark, _ in marks:
        if mark in text:
            break
    else:
        return (text,) if text else ()
    pattern, name_of = _pattern(marks)
    pieces = pattern.split(text)
    return tuple(Placeholder(name_of[piece]) if index % 2 else piece for index, piece in enumerate(pieces) if piece)


@lru_cache(maxsize=16)
def _pattern(marks: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    name_of = dict(marks)
    # Longest first: a mark may begin with another one.
    longest = sorted(name_of, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})"), name_of


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and (isinstance(value.get("role"), str) or isinstance(value.get("from"), str))


def _knows(turn: Mapping[str, Any], template: ChatTemplate | JinjaTemplate) -> bool:
    role = _first(turn, _ROLE_KEYS)
    return isinstance(role, str) and template.knows(SPEAKERS.get(role, role)) and _first(turn, CONTENT_KEYS) is not None


def _chat(value: list[Any], rules: Rules) -> Document:
    """Read a conversation, and the names of media in the items of its turns."""
    words = rules.words
    if isinstance(rules.template, JinjaTemplate):
        chat = chat_of_turns(value, rules.template, words)
        _check_order(value, words)
        return Document(chat=chat, placed=_placed(value, words))
    work = Work()
    turns = [
        _plain_turn(item, rules.template) or _checked_turn(f"turn {number}", item, rules, rules.template, work)
        for number, item in enumerate(value, 1)
    ]
    placed = {piece.modality for turn in turns for piece in turn.content if isinstance(piece, Placeholder)}
    names = _NONE
    if placed:  # such a modality has items, so its marks in the text are plain text
        _check_order(value, words)
        names = _placed(value, words)
    if any(name not in placed for _, name in words.marks):
        turns = [Turn(turn.role, _split_all(turn.content, words, placed)) for turn in turns]
    return Document(turns=turns, placed=names)


def _split_all(content: Content, words: MediaWords, placed: Collection[str]) -> Content:
    if len(content) == 1 and isinstance(content[0], str):
        return split_placeholders(content[0], words, placed)
    return tuple(
        part
        for piece in content
        for part in ((piece,) if isinstance(piece, Placeholder) else split_placeholders(piece, words, placed))
    )


def _placed(turns: list[dict[str, Any]], words: MediaWords) -> dict[str, list[str]]:
    """Return modality -> names in its items of media, in order; no entry if one of its items has no name."""
    named: dict[str, list[str]] = {}
    for _, kind, item in _media_items(turns, words):
        value = item.get(kind)
        name = value.get("url") if isinstance(value, dict) else value
        named.setdefault(words.items[kind], []).append(name if isinstance(name, str) else "")
    return {modality: names for modality, names in named.items() if all(names)}


def _media_items(turns: list[dict[str, Any]], words: MediaWords) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number of the turn, type, item) of each item of media."""
    for number, turn in enumerate(turns, 1):
        content = _first(turn, CONTENT_KEYS)
        for item in content if isinstance(content, list) else ():
            kind = _kind(item, words) if isinstance(item, dict) else "text"
            if kind in words.items:
                yield number, kind, item


def _plain_turn(item: Any, template: ChatTemplate) -> Turn | None:
    """Return the turn if it has only a known role and a string with content, as most do; else None."""
    if type(item) is not dict or len(item) != 2:
        return None
    role, content = item.get("role"), item.get("content")
    if role is None:
        role, content = item.get("from"), item.get("value")
    if type(role) is not str or type(content) is not str or not content or content.isspace():
        return None
    role = SPEAKERS.get(role, role)
    return Turn(role, (content,)) if template.knows(role) else None


def _checked_turn(where: str, item: Any, rules: Rules, template: ChatTemplate, work: Work) -> Turn:
    if not isinstance(item, dict):
        raise DecodeError(f"{where} is a {type(item).__name__}, not a dict with role and content")
    if isinstance(item, Repeating):
        raise DecodeError(f"{where} has a key twice")
    role = _first(item, _ROLE_KEYS)
    if not isinstance(role, str):
        raise DecodeError(f"{where} has no role: its keys are {_keys(item)}")
    role, written = SPEAKERS.get(role, role), role
    if not template.knows(role):
        known = ", ".join(dict.fromkeys((*template.roles, *template.loss_roles)))
        raise DecodeError(f"{where} has the role {shown(role)}; known are {known}: see ChatTemplate.roles")
    content, loss = _first(item, CONTENT_KEYS), template.carries_loss(role)
    turn = Turn(role, () if content is None else _content(where, content, rules.words))
    if len(item) > 2 or content is None:
        own, media = (*_ROLE_KEYS, *CONTENT_KEYS), rules.words.records
        check_turn(f"{where} ({written})", item, own, role, turn.text, loss, media, work)
        if _differ(item, _ROLE_KEYS) or _differ(item, CONTENT_KEYS):
            raise DecodeError(f"{where} says one thing under role and content, another under from and value")
    if content is None:
        raise DecodeError(f"{where} ({written}) has no content: its keys are {_keys(item)}")
    if loss and not any(isinstance(piece, Placeholder) or piece.strip() for piece in turn.content):
        raise DecodeError(f"{where} ({written}) says nothing: it would be learned as an empty answer")
    return turn


def _keys(item: Mapping[str, Any]) -> str:
    return ", ".join(shown(key)[1:-1] for key in list(item)[:8]) or "none"


def _first(item: Mapping[str, Any], keys: tuple[str, str]) -> Any:
    """Return the first value that is not null: `datasets` fills the fields of a struct with nulls."""
    value = item.get(keys[0])
    return item.get(keys[1]) if value is None else value


def _differ(item: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    values = [item[key] for key in keys if item.get(key) is not None]
    if len(values) < 2:
        return False
    return not all(isinstance(one, str) for one in values) or len({SPEAKERS.get(one, one) for one in values}) > 1


def _content(where: str, content: Any, words: MediaWords) -> Content:
    if isinstance(content, str):
        return (content,)
    if isinstance(content, list):
        return tuple(_item(f"the content of {where}", item, words) for item in content)
    raise DecodeError(f"the content of {where} is a {type(content).__name__}, not a string or a list")


def _item(where: str, item: Any, words: MediaWords) -> str | Placeholder:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise DecodeError(f"{where} holds a {type(item).__name__}, not a string or a dict")
    if isinstance(item, Repeating):
        raise DecodeError(f"{where} has an item with a key twice")
    kind, keys = _kind(item, words), ("text", *words.items)
    used = [key for key in keys if says(item.get(key))]
    if kind != "text" and (not isinstance(kind, str) or kind not in words.items):
        known = ", ".join(keys)
        given = shown(kind) if isinstance(kind, str) else f"a {type(kind).__name__}"
        raise DecodeError(f"{where} has an item of type {given}; known are {known}")
    lost = [key for key in used if key != kind and (kind == "text" or words.items.get(key) != words.items[kind])]
    if lost:
        raise DecodeError(f"{where} has an item of type {kind!r} that holds {lost[0]!r} too: give each its own item")
    check_item(f"{where}, in an item of type {kind!r},", item, ("type", *keys), media=kind != "text")
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise DecodeError(f"{where} has a text item without text")
        return str(item["text"])
    words.check_single(where, kind, item)
    return Placeholder.of(words.items[kind], kind, item)


def _kind(item: Mapping[str, Any], words: MediaWords) -> Any:
    """Return the type of an item. Qwen-VL's older form has none: {"image": ...} or {"text": ...}."""
    kind = item.get("type")
    keys = ("text", *words.items)
    return next((key for key in keys if item.get(key) is not None), None) if kind is None else kind


def _check_order(turns: list[dict[str, Any]], words: MediaWords) -> None:
    """Check that the `index` in items of media, if any, counts up: placeholders are filled in order."""
    counts = dict.fromkeys(words.items.values(), 0)
    for number, kind, item in _media_items(turns, words):
        index, modality = item.get("index"), words.items[kind]
        if isinstance(index, int) and index != counts[modality]:
            raise DecodeError(
                f"the content of turn {number} places {kind} {index} where number {counts[modality]} follows: media "
                "fill their places in the order of the fields"
            )
        counts[modality] += 1


def named_in(record: Mapping[str, Any], words: MediaWords) -> dict[str, list[str]]:
    """Return modality -> media that a LLaVA-style record names. No name is opened: media are the sample's members."""
    named: dict[str, list[str]] = {}
    if record.keys().isdisjoint(words.records):
        return named
    for key, modality in words.records.items():
        value = record.get(key)
        names = [each for each in (value if isinstance(value, list) else [value]) if not says_nothing(each)]
        if names:
            named[modality] = [name if isinstance(name, str) else kind_of(name) for name in names]
    return named


WORDS_SUFFIX: Final = ".words"
"""After the name of a Parquet column of lists or structs with words: JSON that is no chat, and is only inspected."""

_NOUNS: Final = (
    "text caption transcript transcription sentence utterance question answer instruction output prompt completion "
    "response query dialog dialogue qa content conversation"
)
_LAST: Final = frozenset(
    (*_NOUNS.split(), *(noun + "s" for noun in _NOUNS.split()), "txt", "queries", "chosen", "rejected")
)
_OF_LABELS: Final = frozenset("label class category id file path url type mime".split())
_KEY_CHARACTERS: Final = 64


@lru_cache(maxsize=4096)
def names_words(key: str) -> bool:
    """Whether a key names words: `question`, `TEXT`, `raw_transcription`, `text_list`; not `text_id`, `class_text`."""
    parts = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key[:_KEY_CHARACTERS])]
    if parts[1:] and parts[-1] in ("list", "raw"):
        parts.pop()
    return bool(parts) and parts[-1] in _LAST and not (parts[1:] and parts[0] in _OF_LABELS)
