"""The chat template: turns of a conversation -> text segments, each with or without loss.

Segments are tokenized separately (neighbours of equal loss as one), so the loss mask is exact for every tokenizer: no
token covers both what the model reads and what it must write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchdata.loaders.text.jinja import ROLES, JinjaTemplate, jinja_template


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


class Turn(NamedTuple):
    """One turn: its role and its content, in order. The template decides whether content carries loss."""

    role: str
    content: tuple[str | Placeholder, ...]

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.content if isinstance(piece, str))


def render(turns: list[Turn], template: ChatTemplate) -> Iterator[Segment]:
    """Yield the segments of a conversation, in order."""
    around: dict[str, tuple[TextSegment, TextSegment]] = {}  # by role
    for role, content in turns:
        if role not in around:
            loss = template.carries_loss(role)
            around[role] = TextSegment(template.before(role), False), TextSegment(template.after(role), loss)
        before, after = around[role]
        yield before
        for piece in content:
            yield piece if isinstance(piece, Placeholder) else TextSegment(piece, after.loss)
        yield after
