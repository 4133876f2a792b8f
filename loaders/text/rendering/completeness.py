"""Checks that a template renders all that a chat says: nothing is lost silently.

The chat is rendered once more, with a marker word after everything that it says. A word that is missing in this
rendering belongs to a string that the template leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.chat_keys import phrases, says, shown, speaks
from orchdata.loaders.text.jinja import REASONING, TRAINED_ROLE, Inputs, JinjaTemplate, Message
from orchdata.loaders.text.messages import Chat, items_of
from orchdata.loaders.text.rendering.forms import WORD, Slots, adapted_turn, forms_of, rendered_by
from orchdata.loaders.text.work import Work

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
    """A string of a chat.

    Attributes:
        number: its number among strings with words, from 0.
        turn: index of the message, -1 for content next to the turns.
        key: key of the message, or of the content next to the turns.
    """

    number: int
    turn: int
    key: str
    text: str


class _Said:
    """The phrases in a text.

    Args:
        work: counts the work for the chat, searches included.
    """

    def __init__(self, text: str, work: Work) -> None:
        self._text = text
        self._work = work
        self._known: dict[str, bool] = {}

    def __contains__(self, phrase: str) -> bool:
        known = self._known.get(phrase)
        if known is None:
            known = self._known[phrase] = self._says(phrase)
        return known

    def _says(self, phrase: str) -> bool:
        """Whether the text contains a long phrase, or a short one as whole words."""
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


def check_rest(chat: Chat, template: JinjaTemplate, text: str, work: Work) -> None:
    """Raise DecodeError for content next to the turns that is not given to the template."""
    ignored, said = template.ignore_keys, _Said(text, work)
    if any(key == "chosen" and all(phrase in said for phrase in phrases(value)) for key, value in chat.rest):
        ignored = (*ignored, "chosen", "rejected")  # the chat is the preferred one
    for key, value in chat.rest:
        if key not in ignored and not all(phrase in said for phrase in phrases(value)):
            raise _lost("the conversation", key)


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
    number = _number_not_in(text)
    leaves: list[_Leaf] = []

    def word(leaf: _Leaf) -> str:
        leaves.append(leaf)
        return f"Zq{number}x{leaf.number}qZ"

    ignored = template.ignore_keys
    rendering = rendered_by(template, *_with_words(messages, chat.inputs, records, ignored, word), work)
    rendered = {int(each) for each in re.findall(rf"Zq{number}x([0-9]+)qZ", rendering)}
    missing = [leaf for leaf in leaves if leaf.number not in rendered]
    shows_tools = any(_is_of_tools(leaf) and leaf.number in rendered for leaf in leaves)
    # A string without its word is lost, unless the text contains it elsewhere or depends on it.
    anywhere = _Said(text, work)
    of_turns = {
        turn: _Said(_text_of(chat.messages[turn]), work) for turn in {leaf.turn for leaf in missing} - {_CONTEXT}
    }
    for leaf in missing:
        if _is_of_tools(leaf) and shows_tools:  # the template decides how much of them it shows
            continue
        own = anywhere if leaf.key == _NAME else of_turns.get(leaf.turn)
        if own is not None and leaf.key != "content" and leaf.text.strip() in own:
            continue
        if leaf.key in REASONING and _renders_reasoning(template, slots):
            continue  # templates leave out that of earlier turns on purpose
        alone = _with_words(messages, chat.inputs, records, ignored, partial(_word_of_one, leaf.number, number))
        if rendered_by(template, *alone, work) == text:
            where = "the conversation" if leaf.turn < 0 else f"turn {leaf.turn + 1} ({messages[leaf.turn]['role']})"
            raise _lost(where, leaf.key)


def _word_of_one(only: int, number: int, leaf: _Leaf) -> str:
    """The word for a string if only the string numbered `only` gets one."""
    return f"Zq{number}x0qZ" if leaf.number == only else ""


def _is_of_tools(leaf: _Leaf) -> bool:
    return leaf.key == "tools" and leaf.turn == _CONTEXT


def _number_not_in(text: str) -> int:
    """Return a number for marker words that are not in the chat."""
    used = set(re.findall(r"Zq(\d+)x", text))
    return next(number for number in range(len(used) + 1) if str(number) not in used)


def _check_thoughts(chat: Chat, template: JinjaTemplate, slots: Slots) -> None:
    """Raise DecodeError for reasoning in an answer's content if the template renders it for no answer."""
    start, end = _THOUGHT
    if start in template.ignore_keys:
        return
    for turn, message in enumerate(chat.messages):
        thought, mark, _ = _text_of(message).rpartition(end)
        if message["role"] == TRAINED_ROLE and mark and says(thought.replace(start, "")):
            if not _renders_thoughts(template, slots):
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


def _text_of(message: Mapping[str, Any]) -> str:
    items = items_of(message.get("content"))
    return "".join(str(item.get("text", "")) for item in items if isinstance(item, dict))


@lru_cache(maxsize=256)
def _renders_reasoning(template: JinjaTemplate, slots: Slots) -> bool:
    marks, forms = dict(slots), forms_of(template, slots)
    turns = [{"role": "user", "content": "Zq1qZ"}, {"role": "assistant", "content": "Zq2qZ", REASONING[0]: WORD}]
    return WORD in rendered_by(template, [adapted_turn(turn, forms, marks) for turn in turns])


@lru_cache(maxsize=256)
def _renders_thoughts(template: JinjaTemplate, slots: Slots) -> bool:
    marks, forms = dict(slots), forms_of(template, slots)
    start, end = _THOUGHT
    answer = f"{start}\n{WORD}\n{end}\n\nZq2qZ"
    turns = [{"role": "user", "content": "Zq1qZ"}, {"role": TRAINED_ROLE, "content": answer}]
    text = rendered_by(template, [adapted_turn(turn, forms, marks) for turn in turns])
    return not text or WORD in text


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

    changed = [
        {key: marked(value, turn, key) if _speaks(key, value, records) else value for key, value in message.items()}
        for turn, message in enumerate(messages)
    ]
    tools, documents = marked(inputs.tools, _CONTEXT, "tools"), marked(inputs.documents, _CONTEXT, "documents")
    variables = {
        key: value if key in _PLUMBING else marked(value, _CONTEXT, key) for key, value in inputs.variables.items()
    }
    return changed, Inputs(tools, documents, variables)


def _speaks(key: str, value: Any, records: Mapping[str, str]) -> bool:
    return key == "content" or (key != "role" and key not in _PLUMBING and speaks(key, value, records))


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
