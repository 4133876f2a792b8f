"""When the pictures of a clip are shown, and which of them are used: all in integers and fractions.

times of its pictures --Timeline--> their number and seconds (the header) --sampled--> how many to use
                                                                 this count --pictures--> which to use
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError

ENCODE_AGAIN: Final = "(`ffmpeg -i in.mp4 out.mp4` encodes again what can be recovered)"
"""The way out for a clip that players can show partly."""
_INT32_MAX: Final = 2**31 - 1
_FINEST: Final = 1_000_000
_DEFAULT_RATE: Final = 25
"""Pictures per second of a clip with one picture."""
_MOST_TICKS: Final = 2**62
_SIMPLE: Final = 100
"""The largest denominator of a plausible rate."""
TIMING: Final = re.compile(r"fps|rate|stamp|time|start|end|second|duration|trim|clip|total|indices", re.IGNORECASE)
"""Keys about when the frames of a video are shown, or about which frames: they are read, or an error."""


@dataclass(frozen=True)
class Timeline:
    """The pictures of a clip in the order in which they are shown."""

    ticks: NDArray[np.int64]  # (frames,), time of each picture, ascending, in units of the file
    seconds: Fraction  # length of the clip; its numerator and denominator are below 2**31
    is_constant: bool  # every picture is within half a step of its time at a constant rate
    _tick: Fraction = Fraction(1)

    @property
    def frames(self) -> int:
        return len(self.ticks)

    def pictures(self, count: int) -> list[int]:
        """Return `count` of the pictures, ascending: those that are shown at 0, 1/count, 2/count, ... of the clip.

        However the file rounds times of a constant rate. At a variable rate a picture may be used several times.
        """
        if self.is_constant:
            return [number * self.frames // count for number in range(count)]
        first, span = int(self.ticks[0]), self._span
        moments = [first + span * number / count for number in range(count)]
        # A tick is an integer: the last one at or before a moment is at or before its integer part.
        whole = np.array([moment.numerator // moment.denominator for moment in moments], np.int64)
        pictures: list[int] = (np.searchsorted(self.ticks, whole, side="right") - 1).tolist()
        return pictures

    @property
    def _span(self) -> Fraction:
        """Length of the clip in ticks, from its seconds."""
        return self.seconds / self._tick

    @classmethod
    def of(cls, ticks: list[int], tick: Fraction, last: int | None = None) -> Timeline:
        """Build a timeline from times in any order, in ticks of `tick` seconds. Rounded times of a steady rate give
        that rate.

        `last` is the duration of the last picture in ticks; None: the mean duration, as most files only guess the last.
        Raises DecodeError for no picture, or two pictures at the same time.
        """
        if not ticks:
            raise DecodeError("video without a single frame")
        if not (tick > 0 and min(ticks) > -_MOST_TICKS and max(ticks) < _MOST_TICKS):
            raise DecodeError("damaged video: it shows its frames at impossible times")
        at = np.sort(np.array(ticks, np.int64))
        spread, count = int(at[-1]) - int(at[0]), len(at)
        if count == 1:
            return cls(at, _bounded(last * tick) if last else Fraction(1, _DEFAULT_RATE), True, tick)
        if not (np.diff(at) > 0).all():
            raise DecodeError(f"damaged video: it shows two frames at one time {ENCODE_AGAIN}")
        is_constant = _is_even(at, spread)
        seconds = (spread + last) * tick if last else Fraction(spread * count, count - 1) * tick
        if is_constant and not last:
            seconds = _steady(at, seconds, tick)
        return cls(at, _bounded(seconds), is_constant, tick)


def _is_even(at: NDArray[np.int64], spread: int) -> bool:
    count = len(at)
    if spread * (count - 1) >= _MOST_TICKS:
        return False
    off = (at - at[0]) * (count - 1) - np.arange(count, dtype=np.int64) * spread
    return bool((2 * np.abs(off) <= spread).all())


def _steady(at: NDArray[np.int64], seconds: Fraction, tick: Fraction) -> Fraction:
    """Return the exact length of a clip whose times are those of a usual rate, each rounded to a tick; else as
    measured.
    """
    gaps, count = np.diff(at), len(at)
    if (gaps == gaps[0]).all():
        return seconds
    measured = count / seconds
    thousandths = round(measured * 1001 / 1000)
    usual = (Fraction(round(measured)), Fraction(1000 * thousandths, 1001), measured.limit_denominator(_SIMPLE))
    candidates = [(_off(at, 1 / (rate * tick)), count / rate) for rate in usual if rate]
    off, best = min(candidates, key=lambda each: each[0], default=(2.0, seconds))
    return best if off <= 1 else seconds


def _off(at: NDArray[np.int64], step: Fraction) -> float:
    """Return how far times differ from steps of `step` ticks: less than a tick in all if they are rounded."""
    past, up, down = at - at[0], step.numerator, step.denominator
    if max(len(at) * up, (int(past[-1]) + 1) * down) >= _MOST_TICKS:
        return math.inf
    return float(np.ptp(np.arange(len(at)) * up - past * down)) / down


def _bounded(seconds: Fraction) -> Fraction:
    """Return the same value, or one near it, with a numerator and denominator of 31 bits, as in the index."""
    if max(seconds.numerator, seconds.denominator) <= _INT32_MAX:
        return seconds
    most = _INT32_MAX // (int(seconds) + 1)
    return max(seconds.limit_denominator(max(1, min(_FINEST, most))), Fraction(1, _FINEST))


def sampled(frames: int, seconds: Fraction, fps: Fraction, least: int, most: int, multiple: int) -> int:
    """Return how many pictures of a clip to use: `fps` per second, between `least` and `most`, never more than
    `frames`, and a whole number of `multiple`s if there are that many.
    """
    wanted = seconds * fps
    count = min(max(wanted.numerator // wanted.denominator, least, 1), most, frames)
    return count - count % multiple if count >= multiple else count
