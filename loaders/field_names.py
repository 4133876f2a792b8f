"""Names of fields: the numbers in them, what containers add to them, and the names that may claim or keep a field."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from orchdata.loaders.text.conversation import WORDS_SUFFIX

NULL, EMPTY = " = null", " = []"
"""After the name of a column whose cell is null, or an empty list of media, if all columns are requested."""

VALUE: Final = " = value"
"""After the name of a column that only `Recipe.keep` asks for: its cells are JSON, and neither text nor media.

After the name of a record: the record before a function of the user's.
"""

NUMBER: Final = re.compile(r"^(\d+)\.|\.(\d+)$")
"""The number of a field: before its name ("0.jpg"), or after it (an item of a list, "images.0")."""

FILE_KEYS: Final = ("type", "path", "url", "base64", "bytes", "data", "format", "media_type", "index")
"""Keys of a file that a record names, or of the struct of its bytes, that are no data about it."""

_ADDED: Final = (VALUE, NULL, EMPTY, WORDS_SUFFIX)
_LONGEST_NAME: Final = 256

Place = tuple[int, str]
"""Sort key of a number: its length and its digits. Not an int, because it may have thousands of digits."""


def names_of(field: str) -> Iterator[str]:
    """Yield the names that may claim a field, the longest first: "0.depth.png" gives "depth.png" and "png" too, and the
    item "cloud.3" of a Parquet list gives "cloud".
    """
    name = field.lower()[-_LONGEST_NAME:]  # a name may be a MiB long, with as many dots
    while name:
        yield name
        stripped = NUMBER.sub("", name, count=1)
        name = stripped if stripped != name else name.partition(".")[2]


def bare_name(field: str) -> str:
    """Return the name of a field without what its container adds, and without `.gz`."""
    for suffix in _ADDED:
        if field.endswith(suffix):
            return field.removesuffix(suffix)
    return field.removesuffix(".gz")


def is_kept_as(field: str, name: str) -> bool:
    """Return whether a field is kept under a name of `Recipe.keep`."""
    return name in names_of(field) or ((bare := bare_name(field)) != field and name in names_of(bare))


def leading_number(name: str) -> Place:
    """Return the sort key of the number before a name; names without one come first."""
    match = NUMBER.match(name)
    return (-1, "") if match is None or match[1] is None else _place(match[1])


def number_of(name: str) -> Place:
    """Return the sort key of the number before or after a name; names without one come first."""
    match = NUMBER.search(name)
    return (-1, "") if match is None else _place(match[1] or match[2])


def without_leading_number(name: str) -> str:
    """Return a name without the number before it."""
    match = NUMBER.match(name)
    return name if match is None or match[1] is None else name[match.end() :]


def _place(number: str) -> Place:
    digits = "".join(str(unicodedata.decimal(digit)) for digit in number).lstrip("0")
    return len(digits), digits
