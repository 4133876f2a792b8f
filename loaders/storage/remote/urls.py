"""URLs of objects: their parts, the name under which an object is known, patterns, and messages without secrets.

    https://user:password@host/a%20b.tar?signature=x --identity--> https://host/a%20b.tar

The query of an HTTP URL is a signature, and changes each time it is made: it is no part of the identity. It is kept
apart, in `files.Files`, and appears in no message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

MAGIC: Final = re.compile(r"[*?[]")
HTTP: Final = ("http", "https")
_OF_OBSTORE: Final = ("s3", "gs", "az", *HTTP)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_IN_TEXT: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/\"'?]*@)?([^\s?\"']*)(\?[^\s\"']*)?")


class ObjectUrl(NamedTuple):
    """The parts of an object's URL: scheme in lower case; bucket, container or host with its port; key, decoded for
    HTTP; query of HTTP with its "?"; "name:password".
    """

    scheme: str
    place: str
    key: str
    query: str = ""
    user: str = ""

    @property
    def root(self) -> str:
        """The URL of its bucket or host."""
        return f"{self.scheme}://{self.place}"


def scheme_of(path: str) -> str:
    """Return the scheme of a URL in lower case; "" for a path."""
    match = _SCHEME.match(path)
    return "" if match is None else match[1].lower()


def is_remote(path: str) -> bool:
    """Return whether a path is the URL of an object: it has a scheme other than `file`."""
    return scheme_of(path) not in ("", "file")


def parsed(url: str) -> ObjectUrl:
    """Split the URL of an object. Raises ValueError for a URL without a bucket or host."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme in HTTP:
        parts = urlsplit(f"{scheme}://{rest}")
        user, _, place = parts.netloc.rpartition("@")
        query = f"?{parts.query}" if parts.query else ""
        split = ObjectUrl(scheme, place, unquote(parts.path.removeprefix("/")), query, user)
    else:
        place, _, key = rest.partition("/")
        user, _, host = place.rpartition("@")
        split = ObjectUrl(scheme, host, key, user=user) if ":" in user else ObjectUrl(scheme, place, key)
    if not split.place:
        raise ValueError(f"{without_secrets(url)!r} names no {'host' if scheme in HTTP else 'bucket'}")
    return split


def identity(path: str) -> str:
    """Return the name under which what is kept of a file is stored: an absolute path, or a URL without secrets."""
    scheme = scheme_of(path)
    if scheme in ("", "file"):
        return path if scheme else os.path.abspath(path)
    rest = path[len(scheme) + 3 :]
    if scheme in HTTP:
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    place, slash, key = rest.partition("/")
    user, _, host = place.rpartition("@")
    if scheme in HTTP or ":" in user:  # without a password it may be a container, as in abfs://container@account
        rest = host + slash + key
    return f"{scheme}://{rest}"


def same_name(url: str) -> str:
    """Return a name that is equal for two spellings of one object's URL."""
    parts = parsed(url)
    return f"{parts.scheme}://{parts.place.lower() if parts.scheme in HTTP else parts.place}/{parts.key}"


def check_key(url: str) -> None:
    """Raise ValueError for a URL with a key that clients would refuse, or take for another one."""
    parts = parsed(url)
    if parts.scheme not in _OF_OBSTORE:
        return
    shown = repr(without_secrets(url))
    if not parts.key.isprintable() and any(ord(each) < 32 or ord(each) == 127 for each in parts.key):
        raise ValueError(f"{shown}: a key with control characters cannot be read: give the object another name")
    if any(part in ("", ".", "..") for part in parts.key.rstrip("/").split("/")) and parts.key:
        raise ValueError(f"{shown}: a key with an empty part, '.' or '..' cannot be read: give the object another name")


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a message without queries and passwords of URLs, and without these values."""

    def shown(found: re.Match[str]) -> str:
        scheme, _, rest, query = found.groups(default="")
        return f"{scheme}{rest}{'?...' if query and scheme[:-3].lower() in HTTP else query}"

    text = _IN_TEXT.sub(shown, text)
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "...")
    return text


def has_magic(url: str) -> bool:
    """Return whether a URL is a pattern, so that objects must be listed. A "?" of an HTTP URL begins its query. Raises
    ValueError for a pattern of HTTP, which has no listings.
    """
    if scheme_of(url) in HTTP:
        if MAGIC.search(identity(url)):
            raise ValueError(
                f"{without_secrets(url)!r}: HTTP servers have no listing, so a pattern cannot be matched: name the "
                "shards with braces, as in train-{000000..000127}.tar, or give a list"
            )
        return False
    return MAGIC.search(url) is not None


def is_match(pattern: str, key: str) -> bool:
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
