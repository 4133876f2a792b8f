"""What a decoder raises: a reason, before the field is known."""

from __future__ import annotations

from orchdata.loaders.errors import FieldError


class DecodeError(Exception):
    """Bytes that cannot be decoded as the recipe and the index say. Never reaches the user.

    Whoever knows the field turns it into a FieldError with `at`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def at(self, field: str) -> FieldError:
        return FieldError(field, self.reason)
