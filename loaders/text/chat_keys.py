"""Keys of chats with content that no template renders: a sample with one fails, because it would be read without it.

There are three kinds of keys next to a turn's role and content, or next to a conversation:

    words        tool calls, reasoning, a system prompt, ...: an error if the value says something that no turn says
    loss flags   weight, train, loss, mask of a turn: an error if the value differs from what the template does
    all others   ids, sources, scores, times, ...: metadata, never inspected

Null, blank and empty values say nothing: `datasets` fills the fields of a struct with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import Work

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
_BLANK: Final = frozenset(("", "[]", "{}", "null", "none", "nan"))
_FLAGS: Final = frozenset("on off yes no true false minimal low medium high auto default".split())
_ROLES: Final = frozenset("user assistant system human gpt".split())
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


class Spoken:
    """Texts that are searched for phrases; searches count as work."""

    def __init__(self, texts: Collection[str], work: Work) -> None:
        self._texts = texts
        self._work = work
        self._known: dict[str, bool] = {}

    def has(self, phrase: str) -> bool:
        """Whether a phrase is all of a text, or a long one is contained in it."""
        if phrase in self._whole or len(phrase) < _PHRASE_CHARACTERS:
            return phrase in self._whole
        known = self._known.get(phrase)
        if known is None:
            self._work.add(sum(map(len, self._texts)))
            known = self._known[phrase] = any(phrase in text for text in self._texts)
        return known

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(text.strip() for text in self._texts)


def check_turn(
    where: str,
    turn: Mapping[str, Any],
    role: str,
    text: str,
    loss: bool,
    media: Collection[str],
    work: Work,
) -> None:
    """Raise DecodeError for a key of a turn, besides those that are read, that would be lost.

    `text` is the turn's, `loss` whether the template lets it carry loss; `media` are keys that name media.
    """
    said = Spoken((text, role), work)
    for key, value in turn.items():
        if is_loss_flag(key):
            _check_loss(where, key, value, loss)
        elif speaks(key, value, media):
            _check_said(where, key, value, said)


def speaks(key: str, value: Any, media: Collection[str]) -> bool:
    """Whether a key of a turn, besides role and content, says something that belongs to the chat."""
    words, name = _split(key)
    if words & _LOSS or not says(value):
        return False
    return name in _OF_TURN or name in media or bool(words & _WORDS and not is_flag(value))


def trains(where: str, turn: Mapping[str, Any], loss: bool) -> bool:
    """Whether a turn carries loss by its own flags, which may only remove the `loss` of its role.

    Raises DecodeError for a flag that requests loss for another role, or for a part of a turn.
    """
    trained = loss
    for key in filter(is_loss_flag, turn):
        if loss and _flag(turn[key]) in _values(key, learned=False):
            trained = False
        else:
            _check_loss(where, key, turn[key], loss)
    return trained


def check_item(where: str, item: Mapping[str, Any], own: Collection[str], *, media: bool) -> None:
    """Raise DecodeError for a key of an item of a turn's content that would be lost."""
    for key, value in item.items():
        if key in own:
            continue
        words, name = _split(key)
        if (words & _WORDS and not is_flag(value)) or (media and name in _OF_MEDIA):
            _check_said(where, key, value, Spoken((), Work()))


def is_loss_flag(key: str) -> bool:
    """Whether a key of a turn says whether it is learned: it is followed, or an error."""
    return not _LOSS.isdisjoint(_split(key)[0])


def is_chat_context(key: str) -> bool:
    """Whether a key, or a field, next to the conversation says something that belongs to it."""
    words, name = _split(key)
    return bool(words & _WORDS) or name in _OF_RECORD


def check_record(record: Mapping[str, Any], own: Collection[str], texts_of: Callable[[], list[str]]) -> None:
    """Raise DecodeError for a key next to a conversation that would be lost: that says more than the turns' texts."""
    context = [key for key, value in record.items() if is_chat_context(key) and value is not None and key not in own]
    if not context:
        return
    said = Spoken(texts_of(), Work())
    chosen = record.get("chosen")
    settled = _PREFERENCE if says(chosen) and _is_said(chosen, said) else ()  # the conversation is the preferred one
    for key in context:
        if key not in settled and not (is_flag(record[key]) and _split(key)[0] & _WORDS):
            _check_said("the conversation", key, record[key], said)


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


def _check_said(where: str, key: str, value: Any, said: Spoken) -> None:
    if says(value) and not _is_said(value, said):
        raise DecodeError(f"{where} has {shown(key)}, which no template renders: {WAY_OUT}")


def is_flag(value: Any) -> bool:
    """Whether a value is a setting of a generation and has no content: `reasoning: "on"`, `thinking_budget: "1024"`."""
    return isinstance(value, str) and (value.strip().lower() in _FLAGS or value.strip().isdecimal())


def _is_said(value: Any, said: Spoken) -> bool:
    return all(said.has(phrase) for phrase in phrases(value) if phrase not in _ROLES)


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


def _split(key: str) -> tuple[frozenset[str], str]:
    """Return the words of a key, and its letters in lower case: "toolCalls" has ("tool", "calls") and "toolcalls"."""
    return _split_short(key[:_KEY_CHARACTERS])  # what is cached is short


@lru_cache(maxsize=4096)
def _split_short(key: str) -> tuple[frozenset[str], str]:
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)]
    return frozenset(words), "".join(words)
