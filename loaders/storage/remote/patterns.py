"""Patterns of URLs: whether one has to be listed, and the expression that its matches fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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


def expression(key: str) -> str:
    """Return the regular expression of a pattern."""
    return "".join(_parts(key.split("/")))


def _parts(parts: Sequence[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            yield r"(?:[^/.][^/]*/)*" + (r"[^/.][^/]*" if is_last else "")
            continue
        hidden = "" if part.startswith(".") or not MAGIC.search(part) else r"(?!\.)"
        yield hidden + _in_folder(part) + ("" if is_last else "/")


def _in_folder(part: str) -> str:
    """Return the expression of a name: as of `fnmatch`, but nothing matches the end of a folder."""
    out, at = [], 0
    while at < len(part):
        character = part[at]
        at += 1
        close = part.find("]", at + 1 + part.startswith("!", at)) if character == "[" else -1
        if character == "*":
            out.append("[^/]*")
        elif character == "?":
            out.append("[^/]")
        elif close > 0:
            inside = part[at:close].replace("\\", r"\\").replace("[", r"\[")
            out.append(f"[{'^' + inside[1:] if inside.startswith('!') else inside}]")
            at = close + 1
        else:
            out.append(re.escape(character))
    return "".join(out)
