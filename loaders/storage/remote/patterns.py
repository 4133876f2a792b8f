"""Patterns of URLs: whether one has to be listed, and what it matches."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final

from orchdata.loaders.storage.remote.urls import HTTP, identity, scheme_of, without_secrets

MAGIC: Final = re.compile(r"[*?[]")


def has_magic(url: str) -> bool:
    """Return whether a URL is a pattern, so that objects must be listed. A "?" of an HTTP URL begins its query.

    Raises ValueError for a pattern of HTTP, which has no listings.
    """
    if scheme_of(url) in HTTP:
        if MAGIC.search(identity(url)):
            raise ValueError(
                f"{without_secrets(url)!r}: HTTP servers have no listing, so a pattern cannot be matched: name the "
                "shards with braces, as in train-{000000..000127}.tar, or give a list"
            )
        return False
    return MAGIC.search(url) is not None


def fits(pattern: str, key: str) -> bool:
    """Return whether a key matches a pattern: `*`, `?` and `[...]` within a folder, `**` any number of folders. Names
    that begin with a dot are left out, unless the pattern has the dot.
    """
    return _fit(pattern.split("/"), key.split("/"))


def _fit(parts: list[str], names: list[str]) -> bool:
    if not parts or not names:
        return not parts and not names
    part, name = parts[0], names[0]
    is_shown = not name.startswith(".")
    if part == "**":
        if len(parts) > 1 and _fit(parts[1:], names):
            return True
        return is_shown and name != "" and (parts == ["**"] and len(names) == 1 or _fit(parts, names[1:]))
    may_match = is_shown or part.startswith(".") or not MAGIC.search(part)
    return may_match and fnmatchcase(name, part) and _fit(parts[1:], names[1:])
