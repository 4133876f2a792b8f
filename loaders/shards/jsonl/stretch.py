"""Records about a stretch of their clip: NeMo's `offset` and `duration`, or `start` and `end`.

Clips are taken whole, so a clip that is longer than its stretch would be trained with the text of a part of it.

    record --stretch_of--> Stretch, seconds of the clip --why_not_whole--> the error, or None
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from orchdata.loaders.modalities.builtin import STRETCHED

_BEGINS: Final = re.compile(
    rf"(?P<of>(?:seg|segment|clip|{'|'.join(STRETCHED)}|utt|utterance|sub|speech)_?)?(?P<word>start|begin)"
    r"(?P<unit>_?(?:time|at|s|sec|secs|seconds|ms)(?:_?(?:s|sec|secs|seconds|ms))?)?",
    re.IGNORECASE,
)
_ENDS: Final = {"start": ("end", "stop"), "begin": ("end", "stop")}
_BOTH: Final = ("segment", "timestamp", "timestamps")
"""Keys of a start and an end in one list."""
_ROUNDED: Final = 0.5
"""Seconds that a clip may be longer than its stretch: numbers are rounded, and a cut file keeps some more frames."""
_LONGER: Final = 1.02
_WAY_OUT: Final = (
    "clips are taken whole: cut the file (`ffmpeg -ss START -t SECONDS`); if it is not about the clip, remove it or "
    "rename it with columns="
)


class Stretch(NamedTuple):
    """A stretch that a record is about, in seconds.

    Attributes:
        named: the keys and values that say so.
        length: its length.
    """

    named: str
    length: float


def check_offset(record: Mapping[str, Any]) -> str | None:
    """Return the error of a record about a stretch that begins inside its clip by its `offset`; else None."""
    seconds = _number(record.get("offset"))
    return f"'offset' is {seconds:g} s, and {_WAY_OUT}" if seconds else None


def stretch_of(record: Mapping[str, Any]) -> Stretch | None:
    """Return the stretch of its clip that a record is about; None for a record that names none."""
    length = _number(record.get("duration"))
    if length and "offset" in record:
        return Stretch(f"'duration' is {length:g} s", length)
    for key, value in record.items():
        begins = _BEGINS.fullmatch(key) if isinstance(key, str) else None
        if begins is not None:
            for word in _ENDS[begins["word"].lower()]:
                end = key[: begins.start("word")] + word + key[begins.end("word") :]
                if (
                    found := _between(f"{key!r} and {end!r}", value, record.get(end), begins["unit"] or "")
                ) is not None:
                    return found
        elif key in _BOTH and isinstance(value, list) and len(value) == 2:
            return _between(repr(key), value[0], value[1], "")
    return None


def why_not_whole(stretch: Stretch, seconds: float) -> str | None:
    """Return the error of a clip that is longer than its stretch; None for one that is the stretch."""
    if seconds <= stretch.length * _LONGER + _ROUNDED:
        return None
    return f"{stretch.named}, of a clip of {seconds:.4g} s, and {_WAY_OUT}"


def _between(names: str, start: Any, end: Any, unit: str) -> Stretch | None:
    begin, stop = _number(start), _number(end)
    if begin is None or stop is None or stop <= begin:
        return None
    scale = 1000 if unit.lower().endswith("ms") else 1
    return Stretch(f"{names} are {begin / scale:g} and {stop / scale:g} s", (stop - begin) / scale)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
