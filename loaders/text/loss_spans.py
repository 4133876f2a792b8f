"""Finds what of a rendered chat carries loss.

Templates with `{% generation %}` mark it. For others, the text of an assistant turn is what its rendering adds to that
of the turns before it with the prompt for an answer: up to and including its end mark, but without the blanks after
that. If a template renders earlier turns differently from the last one (it leaves out their reasoning), the turn is
located by rendering the whole chat with a marker word instead of it.

That takes two or three renderings an answer, so a long chat is cut into stretches of turns. Each is rendered with its
neighbours, the first and last turns and the last question, because templates look at these. The stretches' texts must
equal that of the whole chat, or else the whole chat is searched. The work is counted (`Work`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.text.jinja import TRAINED_ROLE, Inputs, JinjaTemplate, Message, Spans, Work

_ANSWER: Final = "Zq8qZ"
_BEFORE: Final = "Zq9qZ"
_SHORT: Final = 64
"""Maximum number of turns of a chat that is searched as a whole."""
_STOPS: Final = 6
"""Turns that are tried as the end of a stretch."""


@dataclass(frozen=True)
class _Template:
    """A template with its further inputs from a chat, besides the turns."""

    template: JinjaTemplate
    inputs: Inputs
    listed: bool  # the content of a turn is a list
    work: Work

    @cached_property
    def asked(self) -> list[Message]:
        """A question, of a marker word, after a system prompt where the template wants one."""
        question = {"role": "user", "content": _like([] if self.listed else "", _BEFORE)}
        system = {"role": "system", "content": _like([] if self.listed else "", "-")}
        return [question] if self.rendered([question]) is not None else [system, question]

    @cached_property
    def answered(self) -> str:
        """The rendering of `example`; "" if it does not show the answer."""
        text = self.of(self.example)
        return text if text is not None and _ANSWER in text else ""

    @property
    def example(self) -> list[Message]:
        """The question and an answer, of another marker word."""
        return [*self.asked, {"role": TRAINED_ROLE, "content": _like([] if self.listed else "", _ANSWER)}]

    @cached_property
    def tail(self) -> str:
        """`eos_token` if it ends chats without a prompt for an answer, after any role; else ""."""
        asked, eos = self.asked, self.template.eos_token
        plain, prompted = self.rendered(asked), self.rendered(asked, prompt=True)
        if not eos or plain is None or prompted is None or not plain.endswith(eos) or prompted.startswith(plain):
            return ""
        return eos if prompted.startswith(plain.removesuffix(eos)) else ""

    @cached_property
    def around(self) -> tuple[str, str]:
        """The text before an answer, and the text that ends it if it is the last turn."""
        plain, prompted = self.of(self.asked) or "", self.of(self.asked, prompt=True) or ""
        return prompted[len(plain) :] if prompted.startswith(plain) else "", self.answered.rpartition(_ANSWER)[2]

    @cached_property
    def header(self) -> str | None:
        """The text between a question and its answer: "" if blank, None if unknown."""
        starts = self.of(self.asked), self.of(self.asked, prompt=True)
        start = next((each for each in starts if each is not None and self.answered.startswith(each)), None)
        header = None if start is None else self.answered[len(start) :].partition(_ANSWER)[0]
        return header if header is None or header.strip() else ""

    def ways(self) -> tuple[_Template, ...]:
        """Templates for stretches: first with one tool and document, as few stretches show them; then with all."""
        tools, documents, variables = self.inputs
        if max(len(tools or ()), len(documents or ())) < 2:
            return (self,)
        return replace(self, inputs=Inputs(tools and tools[:1], documents and documents[:1], variables)), self

    def of(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """Return a rendering of other turns, without the tail; None if the template rejects them."""
        text = self.rendered(messages, prompt=prompt)
        return text if text is None or prompt else text.removesuffix(self.tail)

    def rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """Return a rendering of other turns; None if the template rejects them."""
        rendered = self.template.rendered(messages, self.inputs, prompt=prompt, work=self.work)
        return None if rendered is None else rendered[0]


@dataclass(frozen=True)
class _Rendering:
    """Turns with their rendering."""

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
    """Return (start, end) of the spans of `text` that carry loss, ascending and disjoint. `trained` says for each turn
    whether it carries loss, `generated` are the spans that the template marks. Raises DecodeError for a turn with loss
    that cannot be located.
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
        # Of the spans that the template marks, those that overlap no turn without loss.
        others = sorted(_turn_spans(rendering, [n for n in answers if not trained[n]]))
        starts = [start for start, _ in others]
        ends = [0, *accumulate((end for _, end in others), max)]  # ends[n]: the last end of the first n
        spans = [(start, end) for start, end in generated if ends[bisect_left(starts, end)] <= start]
    spans = sorted((start, end) for start, end in spans if end > start)
    if wanted and not spans:
        raise DecodeError(
            "the chat template marks nothing of the assistant's turns as generated: nothing of it would be learned"
        )
    if any(later[0] < earlier[1] for earlier, later in pairwise(spans)):
        raise DecodeError("two turns of the assistant are rendered into one another")
    return spans


@lru_cache(maxsize=64)
def learned_ending(template: JinjaTemplate) -> str:
    """Return what of the text after the last answer carries loss, without blanks around it."""
    for listed in (False, True):
        messages = _Template(template, Inputs(), listed, Work()).example
        try:
            text, generated = template.render(messages, Inputs())
            trained = [message["role"] == TRAINED_ROLE for message in messages]
            spans = loss_spans(messages, trained, template, Inputs(), text, generated, Work())
        except DecodeError:
            continue
        if spans and _ANSWER in text:
            return text[slice(*spans[-1])].rpartition(_ANSWER)[2].strip()
    return ""


def _turn_spans(rendering: _Rendering, turns: Sequence[int]) -> Spans:
    """Return the spans of these turns in a chat. Raises DecodeError."""
    spans = _by_stretches(rendering, turns) if len(rendering.messages) > _SHORT else None
    return [_turn_span(rendering, turn) for turn in turns] if spans is None else spans


def _by_stretches(rendering: _Rendering, turns: Sequence[int]) -> Spans | None:
    """Return the spans of these turns, located in stretches; None if the stretches' texts are not that of the chat."""
    chat, last = _LongChat(rendering.messages), len(rendering.messages)
    ways = rendering.by.ways()
    spans: Spans = []
    start = offset = 0
    while start < last:
        # Turns at which the stretch may end, first those before an answer.
        first, stops = start + STRETCH, [last]
        if first + _STOPS < last:
            stops = sorted(
                range(first, first + _STOPS), key=lambda stop: rendering.messages[stop]["role"] != TRAINED_ROLE
            )
        cuts = (_cut(way, chat, start, stop) for way in ways for stop in stops)
        cut = next((cut for cut in cuts if cut is not None and rendering.text.startswith(cut.text, offset)), None)
        if cut is None:
            return None
        stop, off = start + cut.stop - cut.start, offset - cut.begin
        for turn in turns[bisect_left(turns, start) : bisect_left(turns, stop)]:
            span = _span(cut.near, cut.start + turn - start)
            if span is None:
                spans.append(_turn_span(rendering, turn))
            elif cut.begin <= span[0] and (span[1] <= cut.end or stop == last):
                spans.append((span[0] + off, span[1] + off))
            else:
                return None
        start, offset = stop, offset + len(cut.text)
    return spans if offset == len(rendering.text) else None


class _Cut(NamedTuple):
    """A stretch, and its text."""

    near: _Rendering  # the stretch and its context, rendered together
    start: int  # range of the stretch among these turns
    stop: int
    begin: int  # range of its characters in their text
    end: int

    @property
    def text(self) -> str:
        return self.near.text[self.begin : self.end]


def _cut(by: _Template, chat: _LongChat, start: int, stop: int) -> _Cut | None:
    """Return a stretch with its text; None if renderings with and without the turns before it do not locate it."""
    messages, at = chat.stretch(start, stop)
    whole = by.rendered(messages)
    if whole is None:
        return None
    near = _Rendering(messages, whole, by)
    begin, end = _beginning(near, at), _beginning(near, at + stop - start)
    return None if begin is None or end is None else _Cut(near, at, at + stop - start, begin, end)


def _beginning(rendering: _Rendering, turn: int) -> int | None:
    """Return where the text of a turn begins; None if unknown."""
    if turn in (0, len(rendering.messages)):
        return len(rendering.text) if turn else 0
    before = rendering.by.of(rendering.messages[:turn])
    return len(before) if before is not None and rendering.text.startswith(before) else None


def _turn_span(rendering: _Rendering, turn: int) -> tuple[int, int]:
    span = _span(rendering, turn)
    if span is None:
        raise DecodeError(
            f"turn {turn + 1} (assistant) cannot be located in the rendered chat, as the chat template renders the "
            "turns before it differently when more follow: mark what is learned by {% generation %} in the template, "
            "or split the chat there"
        )
    return span


def _span(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    span = _added(rendering, turn) or _replaced(rendering, turn)
    return None if span is None or span[1] <= span[0] else span


def _added(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    """Return what a turn adds to the turns before it, if the whole chat begins with that."""
    messages, text = rendering.messages, rendering.text
    last = turn + 1 == len(messages)
    through = text if last else rendering.by.of(messages[: turn + 1])
    if through is None or not text.startswith(through):
        return None
    before = rendering.by.of(messages[:turn], prompt=True)
    if before is None or not through.startswith(before):
        return None
    prompt = rendering.by.around[0]
    if not (prompt.strip() and before.endswith(prompt)):
        template = rendering.by.template
        knows = "add_generation_prompt" in template.source + (template.tool_source or "")
        asked = rendering.by.of(messages[:turn]) if knows else before
        if asked is not None and len(before) <= _common(asked, through):  # no prompt for an answer here
            header = rendering.by.header
            if header is None or not through.startswith(before + header):
                return None
            before += header
    end = through.rstrip()
    said = messages[turn].get("content")
    if isinstance(said, list):
        said = next((item["text"] for item in reversed(said) if isinstance(item.get("text"), str)), "")
    said = said.strip() if isinstance(said, str) else ""
    # Blanks after an end mark belong to the template. Without a mark, the blanks (or the tail) end the turn.
    ended = not (said and end.endswith(said))
    return len(before), max(len(end), len(before)) if ended else len(rendering.whole if last else through)


def _replaced(rendering: _Rendering, turn: int) -> tuple[int, int] | None:
    """Return where a turn is, located by rendering a marker word instead of it."""
    messages, text = rendering.messages, rendering.text
    answer = {"role": TRAINED_ROLE, "content": _like(messages[turn].get("content"), _ANSWER)}
    earlier = list(messages[:turn])
    if earlier:  # another word at the end of the last turn before it
        content = earlier[-1].get("content") or ""
        if isinstance(content, list):
            content = [*content, {"type": "text", "text": _BEFORE}]
        else:
            content = content.rstrip() + _BEFORE + content[len(content.rstrip()) :]
        earlier[-1] = {**earlier[-1], "content": content}
    marked = rendering.by.of([*earlier, answer, *messages[turn + 1 :]])
    if marked is None or marked.count(_ANSWER) != 1:
        return None
    before, after = marked.split(_ANSWER)
    prompt, ending = rendering.by.around
    if before.count(_BEFORE) != bool(turn) or _BEFORE in ending:
        return None
    header = before.rpartition(_BEFORE)[2]
    before = before.replace(_BEFORE, "")
    start, end = _common(before, text), len(text) - len(after)
    mark = ending.rstrip() or ending[: _common(ending, after)]
    if start < len(before) - len(header) or end < start or not text.endswith(after) or not after.startswith(mark):
        return None
    # What the template itself writes after the prompt for an answer (an empty thought) is learned.
    shared = next((size for size in range(len(prompt), 0, -1) if prompt[:size] in header), 0)
    if prompt.strip().partition("\n")[0] in prompt[:shared]:
        start = min(start, len(before) - len(header) + header.rindex(prompt[:shared]) + shared)
    return start, end + len(mark)


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _like(content: Any, text: str) -> Any:
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


STRETCH: Final = 24
"""Turns per stretch."""
_ENDS: Final = 6
"""Turns at the start and at the end of a chat that are always rendered."""
_NEIGHBOURS: Final = 4
"""Turns before and after a stretch that are rendered with it."""
_LOOK: Final = 16
"""Number of turns that are searched for a turn after which, or before which, others are left out."""
_ASKS: Final = "user"
_KEPT_CHARACTERS: Final = 128
"""Kept at the start and the end of a text outside the stretch, where templates look for its form."""


class _LongChat:
    """The turns of a chat, to be cut into stretches."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        # What a template may distinguish turns by.
        self._kinds = [(each["role"], frozenset(each), type(each.get("content"))) for each in messages]
        self._asked = max((turn for turn, message in enumerate(messages) if message["role"] == _ASKS), default=0)

    def stretch(self, start: int, stop: int) -> tuple[list[Message], int]:
        """Return the turns `start` to `stop` (exclusive) with their context, and where `start` is among these."""
        last = len(self._messages)
        taken = self._through([*range(min(_ENDS, start))], start - _NEIGHBOURS)
        taken += range(taken[-1] + 1 if taken else 0, min(stop + _NEIGHBOURS, last))
        for turn in (self._asked, last - _ENDS, last - 1):
            taken = self._through(taken, turn)
        near = range(start - 1, stop + 1)
        messages = [self._messages[turn] if turn in near else _shortened(self._messages[turn]) for turn in taken]
        return messages, taken.index(start)

    def _through(self, taken: list[int], target: int) -> list[int]:
        """Return `taken`, extended through `target`, without the turns between that may be left out."""
        at = taken[-1] + 1 if taken else 0
        if target < at:
            return taken
        pairs = {self._pair(turn): turn for turn in range(max(at, target - _LOOK) + 1, target + 1)}
        for leave in range(max(at, 1), min(at + _LOOK, target)):
            enter = pairs.get(self._pair(leave), 0)
            if enter > leave:
                return [*taken, *range(at, leave), *range(enter, target + 1)]
        return [*taken, *range(at, target + 1)]

    def _pair(self, turn: int) -> tuple[Any, Any]:
        return self._kinds[turn - 1], self._kinds[turn]


def _shortened(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= 2 * _KEPT_CHARACTERS:
        return message
    return {**message, "content": content[:_KEPT_CHARACTERS] + content[-_KEPT_CHARACTERS:]}
