"""JSON -> the content of a sample: a conversation (see `messages`), a text, or only metadata.

A list of turns, a turn, or a dict with a list of them under "messages", "conversations" or "conversation"; otherwise a
dict's text, under the first of the recipe's names of texts that says something. Content that belongs to a conversation
and would be lost is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import JinjaTemplate
from orchdata.loaders.text.messages import (
    CHAT_KEYS,
    CONTENT_KEYS,
    HARMLESS,
    PAIRS,
    ROLE_KEYS,
    SPEAKERS,
    WAY_OUT,
    Chat,
    Repeating,
    Template,
    chat_of_record,
    chat_of_turns,
    check_record,
    completion_of,
    has_strings,
    is_chat_context,
    is_wrong,
    kind_of,
    says,
    says_nothing,
    shown,
)
from orchdata.loaders.text.preprocessor import TEXT_FIELDS, decode_utf8
from orchdata.loaders.text.template import MediaWords

_READ_KEYS: Final = (*CHAT_KEYS, *TEXT_FIELDS)
_HALVES: Final = frozenset("prompt completion response question answer instruction output query".split())
"""Words of names of which one alone is never a text."""
_MOST_KEYS: Final = 4
"""Keys with strings that are not read in an error."""
_FILE_NAMES: Final = ("file_name", "file_names")
_ARRAY: Final = "a sample is one of them, and a file that is an array of samples ends in .json"
_TURN_KEYS: Final = (ROLE_KEYS, CONTENT_KEYS)  # null in place of the first, where `datasets` fills structs
_INT_DIGITS: Final = 640  # the minimum of Python's limit
_VIDEO_KEYS: Final = ("video", "videos")


class Document(NamedTuple):
    """The content of one JSON member."""

    chat: Chat | None = None
    completion: tuple[str, str] | None = None  # a prompt and its completion, as plain text
    text: str | None = None  # plain
    key: str = ""  # under which a record has the text
    named: Mapping[str, list[str]] = {}  # modality -> names of media that belong to the sample
    rest: Any = None  # the value if it is none of these, or names a video next to its text; for `why_unread`

    @property
    def is_chat(self) -> bool:
        return self.chat is not None


class Rules(NamedTuple):
    """How to read records: the template, with its roles, the words for media, and the keys of plain text."""

    template: Template
    words: MediaWords
    text_keys: tuple[str, ...] = TEXT_FIELDS


def document_of(value: Any, rules: Rules) -> Document:
    """Return the content of a parsed value. Raises DecodeError for a conversation that cannot be read completely."""
    if isinstance(value, dict):
        if _is_turn(value):
            role, content = (
                next((value[key] for key in keys if value.get(key) is not None), None) for keys in _TURN_KEYS
            )
            if isinstance(role, str) and rules.template.knows(SPEAKERS.get(role, role)) and content is not None:
                return Document(chat=chat_of_turns([value], rules.template, rules.words))
        return _record(value, rules)
    if isinstance(value, list) and any(map(_is_turn, value)):
        return Document(chat=chat_of_turns(value, rules.template, rules.words))
    return Document(rest=value)


def parse_json(payload: bytes | memoryview, *, lines: bool = False) -> Any:
    """Return the value of a JSON payload. Raises DecodeError."""
    text = decode_utf8(payload)
    values = []
    for each in [line for line in text.split("\n") if line.strip()] if lines else [text]:
        try:
            try:
                values.append(_DECODER.decode(each))
            except json.JSONDecodeError:
                raise
            except ValueError:  # a number with more digits than Python parses as int
                values.append(json.loads(each, object_pairs_hook=_object, parse_int=_number))
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not valid JSON: {error}") from None
    return values[0] if len(values) == 1 else values


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < _INT_DIGITS else float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    return parsed if len(parsed) == len(pairs) else Repeating(pairs)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object)


def _record(value: dict[str, Any], rules: Rules) -> Document:
    if isinstance(value, Repeating) and not value.keys().isdisjoint((*CHAT_KEYS, *rules.text_keys)):
        raise DecodeError("a key comes twice in the record")
    chat: Chat | None = None
    for key in () if value.keys().isdisjoint(CHAT_KEYS) else CHAT_KEYS:
        if (turns := value.get(key)) is None:
            continue
        if isinstance(turns, list) and turns:
            other = chat_of_turns(turns, rules.template, rules.words)
            if chat not in (None, other):
                raise DecodeError(f"two conversations that differ, the second under {key!r}")
            chat = other
        elif not isinstance(turns, list) and is_wrong(turns):
            raise DecodeError(_wrong(key, turns))
    if isinstance(rules.template, JinjaTemplate):
        rendered = _rendered_record(value, chat, rules.template, rules.words)
        if rendered is not None:
            return rendered
    elif chat is not None:
        check_record(value, (*_READ_KEYS, *rules.words.records), chat.texts)
        return Document(chat=chat, named=named_in(value, rules.words))
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
    record: dict[str, Any], chat: Chat | None, template: JinjaTemplate, words: MediaWords
) -> Document | None:
    """Read a record under a jinja template, which gets the context of the turns; None if the record has no turns."""
    named = named_in(record, words)
    if chat is not None:
        context = {key: value for key, value in record.items() if key not in (*_READ_KEYS, *words.records)}
        chat = chat.with_context(context)
    else:
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
    """Return why a JSON value without a text to learn has strings that no rule reads, or None."""
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


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and (isinstance(value.get("role"), str) or isinstance(value.get("from"), str))


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
