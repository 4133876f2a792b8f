"""The chat template: turns of a conversation -> text segments, each with or without loss.

Segments are tokenized separately (neighbours of equal loss as one), so the loss mask is exact for every tokenizer: no
token covers both what the model reads and what it must write.

How texts refer to media: a table that the recipe fills, so that this package knows no modality by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from orchdata.loaders.text.jinja import ROLES, JinjaTemplate, Message, jinja_template


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """What surrounds each turn. The default is ChatML; `from_jinja` takes the template of a model.

    Attributes:
        prefix: before a turn's content; `{role}` is replaced by the role. Never carries loss.
        suffix: after it; carries loss if the content does, so that the model learns to stop.
        loss_roles: roles of turns that carry loss.
        roles: other roles that a conversation may have. Any further role is an error: a misspelt "Assistant" would
            carry no loss.
    """

    prefix: str = "<|im_start|>{role}\n"
    suffix: str = "<|im_end|>\n"
    loss_roles: tuple[str, ...] = ("assistant",)
    roles: tuple[str, ...] = ROLES

    def __post_init__(self) -> None:
        for name in ("loss_roles", "roles"):
            roles = getattr(self, name)
            if isinstance(roles, str):
                raise ValueError(f"ChatTemplate.{name} must be a tuple of roles, got the string {roles!r}")
            object.__setattr__(self, name, tuple(roles))

    @staticmethod
    def from_jinja(
        source: Any,
        *,
        ignore_keys: tuple[str, ...] = (),
        roles: tuple[str, ...] = (),
        add_special_tokens: bool | None = None,
        date: str | None = None,
        **variables: Any,
    ) -> JinjaTemplate:
        """The chat template of a model, as transformers renders it: system prompts, tools, reasoning, media.

        Args:
            source: a tokenizer or processor of transformers with a template, or the text of a template.
            ignore_keys: keys of turns and records that may be lost if the template does not render them.
            roles: further roles that turns may have.
            add_special_tokens: whether the tokenizer's special tokens go around a rendering that does not begin with
                `bos_token`. None does as transformers: yes for a processor, no for a tokenizer or a text.
            date: the current date for the template (`strftime_now`), in ISO form; default: today, if it uses a date.
            variables: further variables of the template: `bos_token` and the like (default: those of the source), and
                its own switches, for example `enable_thinking=False` or `add_vision_id=True`.

        Raises:
            ValueError: no template, or an invalid one; a variable that each sample defines (`messages`, `tools`).
            TypeError: a variable without a JSON form.
        """
        for name, given in (("ignore_keys", ignore_keys), ("roles", roles)):
            if isinstance(given, str):
                raise ValueError(f"ChatTemplate.from_jinja({name}=) must be a tuple, got the string {given!r}")
        return jinja_template(source, variables, tuple(ignore_keys), tuple(roles), add_special_tokens, date)

    def before(self, role: str) -> str:
        return self.prefix.replace("{role}", role)

    def after(self, role: str) -> str:
        return self.suffix.replace("{role}", role)

    def knows(self, role: str) -> bool:
        return role in self.roles or role in self.loss_roles

    def carries_loss(self, role: str) -> bool:
        return role in self.loss_roles


class TextSegment(NamedTuple):
    """Text to tokenize, and whether its tokens carry loss."""

    text: str
    loss: bool


class Placeholder(NamedTuple):
    """A slot for the next part of a modality, by name, and what an item of a turn says about it."""

    modality: str
    about: Mapping[str, Any] = {}

    @classmethod
    def of(cls, modality: str, kind: str, item: Mapping[str, Any]) -> Placeholder:
        """Return the slot of an item of this type."""
        named = [key for key in item if key == kind or modality in key]
        about = {key: value for key, value in item.items() if key not in ("type", *named)}
        for value in [item[key] for key in named]:  # {"path": ..., "start": ...}, or a list of one
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            about = {**one, **about} if isinstance(one, dict) else about
        return cls(modality, about)


Segment = TextSegment | Placeholder


def items_of(content: Any) -> list[Any]:
    """Return the items of a turn's content; a string is one item of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text in a turn's content."""
    items = items_of(message.get("content"))
    return "".join(str(item.get("text", "")) for item in items if isinstance(item, dict))


def render(messages: Sequence[Message], template: ChatTemplate) -> Iterator[Segment]:
    """Yield the segments of a conversation, in order."""
    around: dict[str, tuple[TextSegment, TextSegment]] = {}  # by role
    for message in messages:
        role = message["role"]
        if role not in around:
            loss = template.carries_loss(role)
            around[role] = TextSegment(template.before(role), False), TextSegment(template.after(role), loss)
        before, after = around[role]
        yield before
        content = message["content"]
        if isinstance(content, str) and content:  # most are
            yield TextSegment(content, after.loss)
            yield after
            continue
        for item in items_of(content):
            if isinstance(item, Placeholder):
                yield item
            elif item["text"]:
                yield TextSegment(item["text"], after.loss)
        yield after


NOT_DECODED: Final = "`datasets` keeps the file if its feature has decode=False"


_NAME: Final = r"/?[A-Za-z0-9_-]+(?: \d+)?/?"


# Square brackets after a name or a bracket index a value in code, and before a round one they are a link. Angle
# brackets may be around the id of an e-mail's part.
# Each alternative begins with a bracket, so that others than brackets are skipped fast.
_MARK: Final = re.compile(rf"<[|\uff5c]{_NAME}[|\uff5c]>|<(?<!-I[Dd]: <){_NAME}>|\[(?<![\w\])(]\[){_NAME}\](?!\()")


_SHORT: Final = 64


_marks_in_short = lru_cache(maxsize=1024)(_MARK.findall)


_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


_NUMBERED: Final = re.compile(r"\d(?![A-Za-z0-9])")


_BARS: Final = ("<|", "<\uff5c")


_MEDIA: Final = frozenset(
    "image img im picture pic photo figure fig visual vision vis frame patch video vid movie audio speech sound voice "
    "music mel wav aud clip media gif tile crop thumbnail screenshot".split()
)


_GROUNDING: Final = frozenset(
    "bbox box ref object obj region point quad polygon poly grounding det loc coord seg mask".split()
)


_OFTEN_WORDS: Final = frozenset("figure fig mask movie gif tile crop thumbnail screenshot coord".split())
"""They stand for media only in angle brackets with a number: `<figure>` is HTML, and [Figure 1] a reference."""


_EDGES: Final = frozenset("start end begin bos eos break newline around".split())
"""Words of tokens that stand before, after or between the parts of media."""


_CLOSING_TAGS: Final = frozenset(("</audio>", "</object>", "</picture>", "</video>"))
"""Of HTML."""


class MediaWords(NamedTuple):
    """Words that stand for media in texts, chats and records, with the name of their modality."""

    marks: tuple[tuple[str, str], ...]  # (text, modality): a part goes where the text is
    items: Mapping[str, str]  # type of an item in a turn's content -> modality
    records: Mapping[str, str]  # key of a record, and column of text, that names media by path -> modality
    slots: Mapping[str, str] = {}  # modality -> mark of a part in the text that a model reads
    listed: frozenset[str] = frozenset()  # modalities of which an item may list the files that form one part


def record_keys(names: Iterable[str]) -> dict[str, str]:
    """Keys with which records name media of these modalities: `image`, `images`."""
    return {key: name for name in names for key in (name, f"{name}s")}


def holds_mark(name: str, mark: str | None) -> str:
    """The error for a text that contains the mark of a modality."""
    return (
        f"its text holds {mark}, which stands for a part of {name}: write <{name}>, or an item of type {name!r}, where "
        "one goes, and no mark anywhere else"
    )


def media_marks(text: str, *, next_to_media: bool) -> list[str]:
    """Return the marks that tools put where media, or places in them, go: `<image_1>`, `<|video|>`, `[bbox]`. In a
    sample without media, only marks with a number or bars are meant.
    """
    return [
        mark
        for mark in (_MARK.findall(text) if len(text) > _SHORT else _marks_in_short(text))
        if words_of_media(mark) and (next_to_media or mark[:2] in _BARS or _NUMBERED.search(mark))
    ]


@lru_cache(maxsize=4096)
def words_of_media(mark: str) -> frozenset[str]:
    """Return the words for media and for places in them in a mark, in the singular."""
    found = [word.lower() for word in _WORD.findall(mark)]
    words = {form for word in found for form in (word, word.removesuffix("s"), word.removesuffix("es"))}
    if mark.startswith("["):
        words.discard("ref")  # a citation
    if mark.startswith(_BARS):
        words.discard("im")  # <|im_start|> is of a chat
    if mark.startswith("[") or not _NUMBERED.search(mark):
        words -= _OFTEN_WORDS
    return frozenset() if mark.lower() in _CLOSING_TAGS else frozenset(words & (_MEDIA | _GROUNDING))


def is_part(mark: str) -> bool:
    """Whether a token with this text stands for a part of media, and not for a place in it or for its start or end."""
    words = {word.lower() for word in _WORD.findall(mark)}
    return not words_of_media(mark).isdisjoint(_MEDIA) and words.isdisjoint(_EDGES)
