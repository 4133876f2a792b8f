"""The chat template: turns of a conversation -> text segments, each with or without loss.

Segments are tokenized separately (neighbours of equal loss as one), so that the loss mask is exact whatever the
tokenizer merges: a token never spans what the model is told and what it must say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchdata.loaders.text.jinja import ROLES, JinjaTemplate, jinja_template


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """What surrounds each turn. The default is ChatML; `from_jinja` takes the template of a model.

    Attributes:
        prefix: before a turn's content; `{role}` is replaced by the role. Never carries loss.
        suffix: after it; carries loss where the content does, so that the model learns to stop.
        loss_roles: roles whose turns carry loss.
        roles: the others that a conversation may have. Any other role is an error: a misspelt "Assistant" would go
            without loss.
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
            source: a tokenizer or processor of transformers that has a template, or the text of one.
            ignore_keys: keys of turns and records that may be lost where the template does not render them.
            roles: more roles that turns may have.
            add_special_tokens: whether the tokenizer's special tokens go around what is rendered without `bos_token` at
                its beginning. None does as transformers: they do for a processor, not for a tokenizer or a text.
            date: what day the template is told that it is (`strftime_now`), in ISO form; default: today, where it asks.
            variables: what else the template sees: `bos_token` and the like (default: those of the source), and its
                own switches, as `enable_thinking=False` or `add_vision_id=True`.

        Raises:
            ValueError: no template, or one that is none; a variable that is each sample's own (`messages`, `tools`).
            TypeError: a variable that has no JSON form.
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
    """The place of the next part of a modality, by name."""

    modality: str


Segment = TextSegment | Placeholder


class Turn(NamedTuple):
    """One turn: its role and the content, in order; whether content carries loss is the template's to say."""

    role: str
    content: tuple[str | Placeholder, ...]

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.content if isinstance(piece, str))


def render(turns: list[Turn], template: ChatTemplate) -> Iterator[Segment]:
    """The segments of a conversation, in order."""
    around: dict[str, tuple[TextSegment, TextSegment]] = {}  # of each role
    for role, content in turns:
        if role not in around:
            loss = template.carries_loss(role)
            around[role] = TextSegment(template.before(role), False), TextSegment(template.after(role), loss)
        before, after = around[role]
        yield before
        for piece in content:
            yield piece if isinstance(piece, Placeholder) else TextSegment(piece, after.loss)
        yield after
