"""Names of fields: the numbers in them, what containers add to them, and the names that may claim or keep a field.

Records, rows and items that name a stretch of their clip: `start` and `end`, or `offset` and `duration`. Clips are
taken whole, so a clip that is longer than its stretch would be trained with the text of a part of it.

    {name: value}, seconds of the clip --why_not_whole--> the error, or None
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

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


NAMES_EDGE: Final = re.compile(
    rb'"[^"]{0,32}(?:start|begin|offset|end|segment|timestamp)[^"]{0,32}"\s*:', re.IGNORECASE
)
"""Found in all JSON that names a stretch."""
_EDGE: Final = re.compile(
    r"(?P<of>seg|segment|clip|audio|video|utt|utterance|sub|speech|time|)(?P<word>start|begin|offset|end|stop|duration)"
    r"(?P<unit>(?:timestamp|time|at|)(?:s|secs?|seconds?|ms|msecs?|milliseconds?|))"
)
"""Names in lower case without separators. Samples, frames and characters are no seconds."""
_PARTNERS: Final = {
    "start": ("end", "stop", "duration"),
    "begin": ("end", "stop", "duration"),
    "offset": ("duration", "end", "stop"),
    "end": (),
}
_BOTH: Final = ("segment", "timestamp", "timestamps")
"""Keys of a start and an end in one list or dict."""
_CLOCK: Final = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
_ROUNDED: Final = 0.5
"""Seconds that a clip may be longer than its stretch: numbers are rounded, and a cut file keeps some more frames."""
_LONGER: Final = 1.02
_WAY_OUT: Final = (
    "clips are taken whole: cut the file (`ffmpeg -ss START -t SECONDS`); if it is not about the clip, remove it or "
    "rename it with columns="
)


def says_edge(name: str, value: Any) -> bool:
    """Whether a name and its value are those of an edge, or of a length, in a form that is read."""
    if not is_edge(name, or_length=True):
        return False
    if _plain(name) in _BOTH and isinstance(value, list):
        return len(value) == 2 and all(_seconds(each, "") is not None for each in value)
    if _plain(name) in _BOTH and isinstance(value, dict):
        return bool(value) and all(isinstance(key, str) and says_edge(key, each) for key, each in value.items())
    return _plain(name) not in _BOTH and _seconds(value, "") is not None


def is_edge(name: str, *, or_length: bool = False) -> bool:
    """Whether a name is that of an edge of a stretch; a length cuts nothing alone."""
    edge = _EDGE.fullmatch(plain := _plain(name))
    return plain in _BOTH or (edge is not None and (or_length or edge["word"] != "duration"))


def why_not_whole(
    about: Mapping[str, Any], seconds: float, others: Collection[str] = (), *, strict: bool = False
) -> str | None:
    """Return the error of a clip that is longer than a stretch of it that a record, a row or an item names.

    A clip that is as long as its stretch was cut before: its error is None.

    Args:
        seconds: length of the clip; infinite for other media.
        others: modalities of other media of the sample: `video_start` says nothing about sound next to a video.
        strict: whether an edge that cannot be read is an error.
    """
    known = {_plain(key): key for key, value in about.items() if isinstance(key, str) and value is not None}
    for name, key in known.items():
        value, edge = about[key], _EDGE.fullmatch(name)
        if name in _BOTH and isinstance(value, list | dict):
            pair = dict(zip(("start", "end"), value, strict=False)) if isinstance(value, list) else value
            if (isinstance(value, dict) or len(value) == 2) and (reason := why_not_whole(pair, seconds)) is not None:
                return reason
        if edge is None or edge["word"] not in _PARTNERS or edge["of"] in others:
            continue
        of, word, unit = edge.groups()
        if word == "end" and any(f"{of}{each}{unit}" in known for each in _PARTNERS if each != "end"):
            continue
        # Find its other edge, with the same words around it, and compare their distance with the clip.
        names = [f"{of}{each}{unit}" for each in _PARTNERS[word]] + ["duration"] * (not of and word != "end")
        other = next((known[each] for each in names if each in known), None)
        first = _seconds(value, unit)
        last = math.inf if other is None else _seconds(about[other], "" if _plain(other) == "duration" else unit)
        if word == "end":
            first, last = 0.0, first
        if last is not None and last < 0:  # -1: to the end of the clip
            last = math.inf
        elif first is not None and last is not None and "duration" in _plain(other or ""):
            last += first
        if first is None or last is None or first == last == 0:
            is_whole = not (strict and value)
        elif last == math.inf:
            is_whole = first <= 0 or first >= seconds
        else:
            is_whole = seconds <= (last - first) * _LONGER + (_ROUNDED if last > first else 0)
        if not is_whole:
            named = " and ".join(f"{each!r} is {about[each]!r:.40}" for each in (key, other) if each is not None)
            of = "media without a length" if seconds == math.inf else f"a clip of {seconds:.4g} s"
            return f"{named}, of {of}, and {_WAY_OUT}"
    return None


def _plain(key: str) -> str:
    return re.sub(r"[\W_]+", "", key[:64].lower())


def _seconds(value: Any, unit: str) -> float | None:
    """Return a number, or `00:00:02.5`, in seconds; None for anything else."""
    try:
        if isinstance(value, str) and (clock := _CLOCK.fullmatch(value.strip())):
            hours, minutes, rest = clock.groups("0")
            return 3600.0 * int(hours) + 60 * int(minutes) + float(rest.replace(",", "."))
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number / (1000 if re.search("ms|milli", unit) else 1) if math.isfinite(number) else None
