"""What the exceptions of filesystems of fsspec mean. Their packages have classes of their own, and new ones with each
release: what is not known to last is taken for something that may pass.
"""

from __future__ import annotations

import ftplib
import re
from collections.abc import Mapping
from typing import Final

from orchdata.loaders.errors import pass_trouble
from orchdata.loaders.storage.remote.clients.trouble import Trouble

_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FINAL: Final = (*_ABSENT, PermissionError, ftplib.error_perm)
_MISTAKES: Final = (TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError, MemoryError)
_STATUS: Final = ("status_code", "status", "code", "http_status")


def trouble_of(error: Exception, words: str) -> Trouble:
    """Return what an exception means. Raises as `pass_trouble` for a mistake of a program.

    Args:
        words: the exception on one line, without secrets.
    """
    status = next(filter(None, map(_status, _came_from(error, "__cause__"))), 0)
    if status:
        return _of_status(status, words)
    causes = _came_from(error, "__cause__", "__context__")[1:]
    # Some filesystems say that there is no such file for any failure of the network, and name that as the cause.
    if isinstance(error, _FINAL) and all(isinstance(each, (*_FINAL, *_MISTAKES)) for each in causes):
        if isinstance(error, _ABSENT):
            return Trouble("absent", "no such object")
        return Trouble("credentials", f"may not be read with these credentials ({words})")
    if isinstance(error, _MISTAKES) and not any(map(_is_of_network, (error, *causes))):
        pass_trouble(error)
        return Trouble("final", words)
    return Trouble("passing", words)


def _of_status(status: int, words: str) -> Trouble:
    """Return what an answer of HTTP means that is an error."""
    if status in (404, 410):
        return Trouble("absent", f"no such object (HTTP {status})")
    if status in (401, 403):
        return Trouble("credentials", f"may not be read with these credentials ({words})")
    if status == 416:
        return Trouble("changed", "is shorter than when it was indexed (HTTP 416)")
    is_final = 300 <= status < 500 and status not in (408, 409, 425, 429) and "RequestTimeout" not in words
    return Trouble("final" if is_final else "passing", words, throttled=status in (429, 503))


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an exception has, where its package keeps it; 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # of botocore
        values = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        values = [getattr(where, name, None) for where in (response, error) for name in _STATUS]
    return next((int(each) for each in values if re.fullmatch(r"[1-5]\d\d", str(each))), 0)


def _came_from(error: BaseException, *names: str) -> list[BaseException]:
    """Return an exception and those from which it came, by these attributes, with the members of groups."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop(0)
        if each is not None and each not in found:
            found.append(each)
            left += [getattr(each, name) for name in names]
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return found


def _is_of_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or any("timeout" in each.__name__.lower() for each in type(error).__mro__)
