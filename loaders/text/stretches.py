"""Long chats are cut into stretches of turns: which turns are rendered with a stretch instead of the whole chat.

To separate an answer from the rest of a chat takes two or three renderings. For a chat of n turns these would be n
renderings of n turns. So a long chat is cut into stretches. Each is rendered with the turns next to it, with the first
and last turns of the chat, and with its last question, because templates look at these. Turns are left out only if the
two turns that become neighbours are of the same kinds as two neighbours in the chat itself. So a template that rejects
two questions in a row rejects a stretch only if the chat has these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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

Message = dict[str, Any]


class Stretch(NamedTuple):
    """Turns that are rendered together.

    Attributes:
        messages: the turns of the stretch and its context.
        start, stop: the range of the stretch in `messages`.
    """

    messages: list[Message]
    start: int
    stop: int


class LongChat:
    """The turns of a chat, to be cut into stretches."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._kinds = [_kind(message) for message in messages]
        self._asked = max((turn for turn, message in enumerate(messages) if message["role"] == _ASKS), default=0)

    def stretch(self, start: int, stop: int) -> Stretch:
        """Return the stretch of turns `start` to `stop` (exclusive) with its context."""
        last = len(self._messages)
        taken = self._through([*range(min(_ENDS, start))], start - _NEIGHBOURS)
        taken += range(taken[-1] + 1 if taken else 0, min(stop + _NEIGHBOURS, last))
        for turn in (self._asked, last - _ENDS, last - 1):
            taken = self._through(taken, turn)
        near = range(start - 1, stop + 1)
        messages = [self._messages[turn] if turn in near else _shortened(self._messages[turn]) for turn in taken]
        at = taken.index(start)
        return Stretch(messages, at, at + stop - start)

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


def _kind(message: Message) -> tuple[str, frozenset[str], type]:
    """What a template may distinguish turns by."""
    return message["role"], frozenset(message), type(message.get("content"))


def _shortened(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= 2 * _KEPT_CHARACTERS:
        return message
    return {**message, "content": content[:_KEPT_CHARACTERS] + content[-_KEPT_CHARACTERS:]}
