"""The work for one chat, counted: a chat with too much of it fails, and fails on every machine."""

from __future__ import annotations

from typing import Final

from orchdata.loaders.errors import DecodeError

_MOST_WORK: Final = 1 << 31
"""Characters that may be rendered or searched for one chat."""


class TooMuchWork(DecodeError):
    """A chat that takes more work than is allowed."""


class Work:
    """Counts the work for one chat."""

    def __init__(self, most: int = _MOST_WORK) -> None:
        self.done = 0
        self._most = most

    def add(self, characters: int) -> None:
        """Count characters that are rendered or searched. Raises TooMuchWork."""
        self.done += characters
        self.check(0)

    def check(self, more: int) -> None:
        """Raise TooMuchWork if `more` further characters would be too many."""
        if self.done + more > self._most:
            raise TooMuchWork(
                f"more than {self._most} characters are rendered or searched to find the chat's text and which of it "
                "has loss: split the chat, or leave it out (less work is needed with a chat template that marks the "
                "text with loss by {% generation %})"
            )
