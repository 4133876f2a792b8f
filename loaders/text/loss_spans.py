"""What of a rendered chat carries loss.

Templates with `{% generation %}` say it themselves. Of others, a turn of the assistant is what its rendering adds to
that of the turns before it with the prompt for an answer: to its end mark, which is learned, but not to the blanks
behind that. Where a template renders earlier turns otherwise than the last one (it leaves out their reasoning), the
turn is found by rendering the whole chat with a word in its place.

In a long chat each of its stretches is looked at in place of the whole chat (`stretches`). Their texts one after
another must be that of the whole chat, or the whole chat is looked at after all. What that takes is counted (`Work`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import TRAINED_ROLE, Inputs, JinjaTemplate, Message, Spans, TooMuchWork, Work
from orchdata.loaders.text.stretches import STRETCH, LongChat, Stretch

_ANSWER: Final = "Zq8qZ"
_BEFORE: Final = "Zq9qZ"
_SHORT: Final = 64
"""Turns of a chat that is looked at as a whole."""
_STOPS: Final = 6
"""Places that are tried for the end of a stretch."""


@dataclass(frozen=True)
class _Template:
    """A template with all that it sees of a chat beside its turns.

    Attributes:
        listed: whether the content of any turn is a list.
    """

    template: JinjaTemplate
    inputs: Inputs
    listed: bool
    work: Work

    @cached_property
    def tail(self) -> str:
        """`eos_token` where it ends chats in which no answer is asked for, whoever spoke last; else ""."""
        asked = [{"role": "user", "content": _like([] if self.listed else "", _BEFORE)}]
        eos, plain, prompted = self.template.eos_token, self.rendered(asked), self.rendered(asked, prompt=True)
        if not eos or plain is None or prompted is None or not plain.endswith(eos) or prompted.startswith(plain):
            return ""
        return eos if prompted.startswith(plain.removesuffix(eos)) else ""

    @cached_property
    def around(self) -> tuple[str, str]:
        """What comes before an answer, and what ends it where it is the last."""
        listed = self.listed
        asked = {"role": "user", "content": _like([] if listed else "", _BEFORE)}
        plain, prompted = self.of([asked]) or "", self.of([asked], prompt=True) or ""
        answered = self.of([asked, {"role": TRAINED_ROLE, "content": _like([] if listed else "", _ANSWER)}]) or ""
        return prompted[len(plain) :] if prompted.startswith(plain) else "", answered.rpartition(_ANSWER)[2]

    def ways(self) -> tuple[_Template, ...]:
        """What stretches are rendered with: one of the tools and documents, which few of them show; then all."""
        tools, documents, variables = self.inputs
        if max(len(tools or ()), len(documents or ())) < 2:
            return (self,)
        return replace(self, inputs=Inputs(tools and tools[:1], documents and documents[:1], variables)), self

    def of(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """A rendering of other turns, without the tail; None where the template refuses them."""
        found = self.rendered(messages, prompt=prompt)
        return found if found is None or prompt else found.removesuffix(self.tail)

    def rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """A rendering of other turns; None where the template refuses them."""
        try:
            return self.template.render(messages, self.inputs, prompt=prompt, work=self.work)[0]
        except TooMuchWork:
            raise
        except DecodeError:
            return None


@dataclass(frozen=True)
class _Rendering:
    """Turns, and what the template makes of them."""

    messages: Sequence[Message]
    whole: str
    by: _Template

    @cached_property
    def text(self) -> str:
        """All turns, without the tail."""
        return self.whole.removesuffix(self.by.tail)


def loss_spans(
    messages: Sequence[Message],
    trained: Sequence[bool],
    template: JinjaTemplate,
    inputs: Inputs,
    text: str,
    generated: Spans,
    work: Work,
) -> Spans:
    """(start, end) of the stretches of `text` that carry loss, ascending and apart.

    Args:
        trained: of each turn, whether it carries loss.
        generated: what the template marks.
        work: what is done for the chat.

    Raises:
        DecodeError: a turn that should carry loss and cannot be told from the rest.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == TRAINED_ROLE]
    wanted = [n for n in answers if trained[n]]
    listed = any(isinstance(message.get("content"), list) for message in messages)
    rendering = _Rendering(messages, text, _Template(template, inputs, listed, work))
    if not template.marks_loss(inputs):
        spans = _turn_spans(rendering, wanted)
    elif len(wanted) == len(answers):
        spans = generated
    elif len(generated) == len(answers):
        spans = [span for n, span in zip(answers, generated, strict=True) if trained[n]]
    else:
        spans = _apart(generated, _turn_spans(rendering, [n for n in answers if not trained[n]]))
    spans = sorted((start, end) for start, end in spans if end > start)
    if wanted and not spans:
        raise DecodeError(
            "the chat template marks nothing of the assistant's turns as generated: nothing of it would be learned"
        )
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DecodeError("two turns of the assistant are rendered into one another")
    return spans


def _apart(spans: Spans, others: Spans) -> Spans:
    """Those that have no characters in common with any of others."""
    others = sorted(others)
    starts = [start for start, _ in others]
    ends = [0, *accumulate((end for _, end in others), max)]  # the last end of so many of them
    return [(start, end) for start, end in spans if ends[bisect_left(starts, end)] <= start]


def _turn_spans(rendering: _Rendering, turns: Sequence[int]) -> Spans:
    """Where these turns stand in a chat. Raises DecodeError."""
    found = _by_stretches(rendering, turns) if len(rendering.messages) > _SHORT else None
    return [_turn_span(rendering, turn) for turn in turns] if found is None else found


def _by_stretches(rendering: _Rendering, turns: Sequence[int]) -> Spans | None:
    """Where these turns stand, as stretches of the chat tell it; None where their texts are not that of the chat."""
    chat, last = LongChat(rendering.messages), len(rendering.messages)
    ways = rendering.by.ways()
    spans: Spans = []
    start = place = 0
    while start < last:
        cuts = (_cut(way, chat.stretch(start, stop)) for way in ways for stop in _stops(rendering.messages, start))
        cut = next((cut for cut in cuts if cut is not None and rendering.text.startswith(cut.text, place)), None)
        if cut is None:
            return None
        stop, off = start + cut.stop - cut.start, place - cut.begin
        for turn in turns[bisect_left(turns, start) : bisect_left(turns, stop)]:
            span = _span(cut.near, cut.start + turn - start)
            if span is None:
                spans.append(_turn_span(rendering, turn))
            elif cut.begin <= span[0] and (span[1] <= cut.end or stop == last):
                spans.append((span[0] + off, span[1] + off))
            else:
                return None
        start, place = stop, place + len(cut.text)
    return spans if place == len(rendering.text) else None


class _Cut(NamedTuple):
    """A stretch, and its text.

    Attributes:
        near: it and the turns that are rendered with it.
        start, stop: the stretch among these.
        begin, end: its characters in their text.
    """

    near: _Rendering
    start: int
    stop: int
    begin: int
    end: int

    @property
    def text(self) -> str:
        return self.near.text[self.begin : self.end]


def _stops(messages: Sequence[Message], start: int) -> list[int]:
    """Where a stretch may end, those places first at which an answer follows."""
    first = start + STRETCH
    if first + _STOPS >= len(messages):
        return [len(messages)]
    return sorted(range(first, first + _STOPS), key=lambda stop: messages[stop]["role"] != TRAINED_ROLE)


def _cut(by: _Template, stretch: Stretch) -> _Cut | None:
    """The text of a stretch; None where that is not told by rendering what comes before it, and both."""
    whole = by.rendered(stretch.messages)
    if whole is None:
        return None
    near = _Rendering(stretch.messages, whole, by)
    begin, end = _beginning(near, stretch.start), _beginning(near, stretch.stop)
    return None if begin is None or end is None else _Cut(near, stretch.start, stretch.stop, begin, end)


def _beginning(rendering: _Rendering, turn: int) -> int | None:
    """Where the text of a turn begins."""
    if turn in (0, len(rendering.messages)):
        return len(rendering.text) if turn else 0
    before = rendering.by.of(rendering.messages[:turn])
    return len(before) if before is not None and rendering.text.startswith(before) else None


def _turn_span(rendering: _Rendering, turn: int) -> tuple[int, int]:
    span = _span(rendering, turn)
    if span is None:
        raise DecodeError(
            f"turn {turn + 1} (assistant) cannot be told in what the chat template renders, as it renders the turns "
            "before it otherwise when more follow: mark what is learned by {% generation %} in the template, or split "
            "the chat there"
        )
    return span


def _span(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    span = _added(rendering, turn) or _replaced(rendering, turn)
    return None if span is None or span[1] <= span[0] else span


def _added(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    """What a turn adds to what comes before it, where that is how the whole chat begins."""
    messages, text = rendering.messages, rendering.text
    last = turn + 1 == len(messages)
    through = text if last else rendering.by.of(messages[: turn + 1])
    if through is None or not text.startswith(through):
        return None
    before = rendering.by.of(messages[:turn], prompt=True)
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
    found = rendering.by.of([*_up_to(messages, turn), answer, *messages[turn + 1 :]])
    if found is None or found.count(_ANSWER) != 1:
        return None
    before, behind = found.split(_ANSWER)
    prompt, ending = rendering.by.around
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
