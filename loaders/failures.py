"""Exceptions of what reads and decodes -> failures of samples, and reasons of one kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchdata.loaders.errors import FAILURES, NOT_DATA, FieldError, one_line, pass_trouble


@contextmanager
def as_failure(
    make: Callable[[str], Exception], doing: str, *, before: Callable[[Exception], None] = pass_trouble
) -> Iterator[None]:
    """Turn an exception of the block into a failure of the data: `make("doing: message")`.

    Failures that the block raises itself pass unchanged, and so do errors that say nothing about the data. `before` is
    called first; it may raise something else.
    """
    try:
        yield
    except (*NOT_DATA, *FAILURES):
        raise
    except Exception as error:
        before(error)
        raise make(f"{doing}: {one_line(error)}") from error


def as_field_error(error: Exception, doing: str, field: str = "*") -> FieldError:
    """Return the failure of a sample, or of a field, for an unexpected exception. `doing` is "measured" or "decoded".

    Raises as `pass_trouble`.
    """
    if isinstance(error, FieldError):
        return error
    pass_trouble(error)
    said = " ".join(str(error).split())[:200]
    return FieldError(field, f"cannot be {doing}: {type(error).__name__}: {said}")


def reason_kind(reason: str) -> str:
    """A reason without quoted names and numbers, to group reasons of one kind.

    `UTF-8` and `MP3` are no numbers. What to do, and the values of bytes, stay as they are.
    """
    return _VARYING.sub(lambda found: found[1] or ("N" if found[0][0].isdigit() else "'...'"), reason)


_VARYING = re.compile(
    r"(call the key '[^']*'|columns=\{[^}]*\}|sep(?:arated by |=)'[^']*'|to_csv\('[^']*'|'utf-8'|\b0x[0-9a-f]+)"
    r"|'[^']*'(?:, '[^']*')*"
    r"|(?<![A-Z\d])(?<![A-Z]-)\d+(?:\.\d+)?"
)
