"""Which pictures of a clip are taken: at a constant rate by their places, at a variable one by their times."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.video.containers import Timeline, sampled

MILLI = Fraction(1, 1000)


def test_a_constant_rate_is_seen_through_rounded_times() -> None:
    rounded = [round(1000 * at / 30) for at in range(100)]
    line = Timeline.of(rounded[::-1], MILLI)
    assert line.is_constant and line.frames == 100
    assert line.seconds == Fraction(100, 30)
    assert line.pictures(10) == list(range(0, 100, 10))  # not 9, 19, ...: 10 / 30 s is written as 333 ms


def test_a_variable_rate_goes_by_times() -> None:
    line = Timeline.of([0, 100, 1000, 1100, 3200], MILLI)
    assert not line.is_constant and line.seconds == 4  # the last one is taken to last as long as one in the mean, 0.8 s
    # 0, 0.5, 1, ... 3.5 s: the picture at 0.1 s is shown until the one at 1 s.
    assert line.pictures(8) == [0, 1, 2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("ticks", "tick", "message"),
    [
        ([], MILLI, "without a single frame"),
        ([0, 5, 5], MILLI, "two frames at one time"),
        ([1, 2], Fraction(0), "impossible times"),
    ],
)
def test_what_is_no_timeline(ticks: list[int], tick: Fraction, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Timeline.of(ticks, tick)


@given(
    gaps=st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    tick=st.fractions(Fraction(1, 10**9), 1),
    count=st.integers(1, 80),
)
def test_pictures_are_those_shown_at_equal_distances(gaps: list[int], tick: Fraction, count: int) -> None:
    ticks = np.cumsum([0, *gaps]).tolist()
    line = Timeline.of(ticks, tick)
    pictures = line.pictures(count)
    assert len(pictures) == count and pictures == sorted(pictures) and pictures[0] == 0 and pictures[-1] < line.frames
    assert max(line.seconds.numerator, line.seconds.denominator) < 2**31
    if line.seconds == Fraction(ticks[-1] * line.frames, line.frames - 1) * tick and not line.is_constant:
        for number, at in enumerate(pictures):
            moment = line.seconds * number / count
            assert ticks[at] * tick <= moment
            assert at + 1 == line.frames or moment < ticks[at + 1] * tick


@given(
    frames=st.integers(1, 5000),
    seconds=st.fractions(Fraction(1, 100), 1000),
    fps=st.fractions(Fraction(1, 10), 60),
    least=st.integers(1, 20),
    most=st.integers(20, 800),
    multiple=st.integers(1, 4),
)
def test_how_many_are_taken(
    frames: int, seconds: Fraction, fps: Fraction, least: int, most: int, multiple: int
) -> None:
    count = sampled(frames, seconds, fps, least, most, multiple)
    assert 1 <= count <= min(frames, most)
    assert count % multiple == 0 or count == min(frames, count) < multiple
    wanted = int(seconds * fps)
    if least <= wanted <= min(most, frames):
        assert wanted - multiple < count <= max(wanted, 1)
