"""What of a rendered chat carries loss.

Templates with `{% generation %}` say it themselves. Of others, a turn of the assistant is what its rendering adds to
that of the turns before it with the prompt for an answer: to its end mark, which is learned, but not to the blanks
behind that. Where a template renders earlier turns otherwise than the last one (it leaves out their reasoning), the
turn is found by rendering the whole chat with a word in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import TRAINED_ROLE, Inputs, JinjaTemplate, Message, Spans

_ANSWER: Final = "Zq8qZ"
_BEFORE: Final = "Zq9qZ"


@dataclass(frozen=True)
class _Rendering:
    messages: Sequence[Message]
    template: JinjaTemplate
    inputs: Inputs
    whole: str

    @cached_property
    def tail(self) -> str:
        """`eos_token` where it ends chats in which no answer is asked for, whoever spoke last; else ""."""
        asked = [{"role": "user", "content": _like([] if self._listed else "", _BEFORE)}]
        eos, plain, prompted = self.template.eos_token, self._rendered(asked), self._rendered(asked, prompt=True)
        if not eos or plain is None or prompted is None or not plain.endswith(eos) or prompted.startswith(plain):
            return ""
        return eos if prompted.startswith(plain.removesuffix(eos)) else ""

    @property
    def text(self) -> str:
        """All turns, without the tail."""
        return self.whole.removesuffix(self.tail)

    @cached_property
    def around(self) -> tuple[str, str]:
        """What comes before an answer, and what ends it where it is the last."""
        listed = self._listed
        asked = {"role": "user", "content": _like([] if listed else "", _BEFORE)}
        plain, prompted = self.of([asked]) or "", self.of([asked], prompt=True) or ""
        answered = self.of([asked, {"role": TRAINED_ROLE, "content": _like([] if listed else "", _ANSWER)}]) or ""
        return prompted[len(plain) :] if prompted.startswith(plain) else "", answered.rpartition(_ANSWER)[2]

    def of(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """A rendering of other turns, without the tail; None where the template refuses them."""
        found = self._rendered(messages, prompt=prompt)
        return found if found is None or prompt else found.removesuffix(self.tail)

    @property
    def _listed(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self.template.render(messages, self.inputs, prompt=prompt)[0]
        except DecodeError:
            return None


def loss_spans(
    messages: Sequence[Message],
    trained: Sequence[bool],
    template: JinjaTemplate,
    inputs: Inputs,
    text: str,
    generated: Spans,
) -> Spans:
    """(start, end) of the stretches of `text` that carry loss, ascending and apart.

    Args:
        trained: of each turn, whether it carries loss.
        generated: what the template marks.

    Raises:
        DecodeError: a turn that should carry loss and cannot be told from the rest.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == TRAINED_ROLE]
    wanted = [n for n in answers if trained[n]]
    rendering = _Rendering(messages, template, inputs, text)
    if not template.marks_loss(inputs):
        spans = [_turn_span(rendering, n) for n in wanted]
    elif len(wanted) == len(answers):
        spans = generated
    elif len(generated) == len(answers):
        spans = [span for n, span in zip(answers, generated, strict=True) if trained[n]]
    else:
        masked = [_turn_span(rendering, n) for n in answers if not trained[n]]
        spans = [(s, e) for s, e in generated if not any(start < e and s < end for start, end in masked)]
    spans = sorted((start, end) for start, end in spans if end > start)
    if wanted and not spans:
        raise DecodeError(
            "the chat template marks nothing of the assistant's turns as generated: nothing of it would be learned"
        )
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DecodeError("two turns of the assistant are rendered into one another")
    return spans


def _turn_span(rendering: _Rendering, turn: int) -> tuple[int, int]:
    span = _added(rendering, turn) or _replaced(rendering, turn)
    if span is None or span[1] <= span[0]:
        raise DecodeError(
            f"turn {turn + 1} (assistant) cannot be told in what the chat template renders, as it renders the turns "
            "before it otherwise when more follow: mark what is learned by {% generation %} in the template, or split "
            "the chat there"
        )
    return span


def _added(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    """What a turn adds to what comes before it, where that is how the whole chat begins."""
    messages, text = rendering.messages, rendering.text
    last = turn + 1 == len(messages)
    through = text if last else rendering.of(messages[: turn + 1])
    if through is None or not text.startswith(through):
        return None
    before = rendering.of(messages[:turn], prompt=True)
    if before is None or not through.startswith(before):
        return None
    end = through.rstrip()
    said = _last_text(messages[turn])
    # Blanks behind an end mark are the template's; where there is none, they are what ends the turn, or the tail is.
    ended = not (said and end.endswith(said))
    return len(before), max(len(end), len(before)) if ended else len(rendering.whole if last else through)


def _replaced(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    """Where a turn stands, seen by putting a word in its place."""
    messages, text = rendering.messages, rendering.text
    answer = {"role": TRAINED_ROLE, "content": _like(messages[turn].get("content"), _ANSWER)}
    found = rendering.of([*_up_to(messages, turn), answer, *messages[turn + 1 :]])
    if found is None or found.count(_ANSWER) != 1:
        return None
    before, behind = found.split(_ANSWER)
    prompt, ending = rendering.around
    if before.count(_BEFORE) != bool(turn) or _BEFORE in ending:
        return None
    header = before.rpartition(_BEFORE)[2]
    before = before.replace(_BEFORE, "")
    start, end = _common(before, text), len(text) - len(behind)
    mark = ending.rstrip() or ending[: _common(ending, behind)]
    if start < len(before) - len(header) or end < start or not text.endswith(behind) or not behind.startswith(mark):
        return None
    # What the template itself writes behind the prompt for an answer (an empty thought) is learned.
    held = next((size for size in range(len(prompt), 0, -1) if prompt[:size] in header), 0)
    if prompt.strip().partition("\n")[0] in prompt[:held]:
        start = min(start, len(before) - len(header) + header.rindex(prompt[:held]) + held)
    return start, end + len(mark)


def _up_to(messages: Sequence[Message], turn: int) -> Iterator[Message]:
    """The turns before one, with a word at the end of the last."""
    yield from messages[: max(0, turn - 1)]
    if turn:
        last = messages[turn - 1]
        content = last.get("content") or ""
        if isinstance(content, list):
            yield {**last, "content": [*content, {"type": "text", "text": _BEFORE}]}
        else:
            said = content.rstrip()
            yield {**last, "content": said + _BEFORE + content[len(said) :]}


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _like(content: Any, text: str) -> Any:
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def _last_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = next((item["text"] for item in reversed(content) if isinstance(item.get("text"), str)), "")
    return content.strip() if isinstance(content, str) else ""
