"""How far apart two ways of computing the same float32 values may lie: the bounds that docs/reliability.md states.

Processors with other vector widths, other releases of torch and other batch sizes add the same numbers in another
order. The bounds follow from the number of roundings, u = 2**-24 each, and hold for any order. What integers decide
(plans, counts, token ids, bytes of pixels and their normalised values) has no bound: it is equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""

LOG_MEL_SUM = 5e-6
"""Absolute, of log-mel features: all roundings but those of the Fourier transform.

A band is a sum of at most 201 products of numbers that are not negative, so any order is within 203 u of the true sum
(Higham, Accuracy and Stability of Numerical Algorithms, 3.1), and its magnitudes, squared, within 9 u. Two ways are
424 u apart; log10 and the division by 4 divide that by 4 ln 10 = 9.2: 2.8e-6. log10, the sum and the quotient round
within a unit in the last place of numbers below 16 and 4: 2 * (9.5e-7 / 4 + 2.4e-7) = 1e-6.
Together 3.8e-6, rounded up.
"""

LOG_MEL_TRANSFORM = 1e-6
"""Absolute, of a log-mel feature as loud as the loudest band of its frame: roundings of the Fourier transform.

400 points are four passes of radix 4 or 5, each within 6 u of the norm of the frame (Higham, 24.1, with the error of a
complex product of Brent, Percival and Zimmermann, 2007), together 1.4e-6 of it. They lie evenly over the bins. Slaney's
bands have equal areas, so the loudest one has at least the mean amplitude, and one that is d decades of power below it
has a relative error 10**(d / 2) times as large. Power has twice that of an amplitude, and there are two ways:
4 * 1.4e-6 / 9.2 = 6e-7, rounded up.
"""

STANDARD_SCORE = 32 * UNIT
"""Of (x - mean) / sqrt(variance), relative to 1 + |value|.

NumPy adds in pairs: blocks of 128 numbers, in which 8 sums of 16 run, and 8 levels of blocks for up to 30,000 samples.
That is 8 + 16 + 3 roundings of the mean, of numbers as large as the deviation, and five of the value itself.
"""


RESIZED = 3e-3
"""Absolute, of pixels from 0 to 255 that are resized in floats: two passes of at most 90 products each, whose weights
add up to 1, are 2 * 92 roundings of at most 255."""


def log_mel_bound(expected: NDArray[Any], band_axis: int) -> NDArray[np.float64]:
    """The bound of each log-mel feature (Whisper's: (log10 + 4) / 4), by how far it lies below its frame's loudest.

    5e-6 + 1e-6 * 10**(d / 2), d the decades of power below it: 6e-6 for the loudest, 1.5e-5 at 2 decades, 1e-4 at 4.
    Energy outside of the bands (a constant added to a clip) is not in the frame's loudest band: clips here have none.
    """
    values = np.asarray(expected, np.float64)
    decades = 4 * (values.max(axis=band_axis, keepdims=True) - values)
    return LOG_MEL_SUM + LOG_MEL_TRANSFORM * 10 ** (decades / 2)


def assert_log_mel_close(found: NDArray[Any], expected: NDArray[Any], band_axis: int = -1) -> None:
    """Raise AssertionError where a feature differs by more than its bound."""
    _assert_within(found, expected, log_mel_bound(expected, band_axis))


def assert_standard_scores_close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Raise AssertionError where a normalised sample differs by more than `STANDARD_SCORE`."""
    _assert_within(found, expected, STANDARD_SCORE * (1 + np.abs(np.asarray(expected, np.float64))))


def assert_pixels(found: NDArray[np.uint8], expected: NDArray[Any]) -> None:
    """Raise AssertionError where bytes are not those expected, or not the rounded floats that are expected."""
    if expected.dtype == np.uint8:
        np.testing.assert_array_equal(found, expected)
        return
    values = np.asarray(expected, np.float64)
    assert found.dtype == np.uint8 and found.shape == values.shape
    assert np.all(np.abs(found - values.clip(0, 255)) <= 0.5 + RESIZED)


def _assert_within(found: NDArray[Any], expected: NDArray[Any], bound: NDArray[np.float64]) -> None:
    ours, theirs = np.asarray(found), np.asarray(expected)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.float32, (ours.dtype, theirs.dtype)
    ratio = np.abs(ours.astype(np.float64) - theirs) / bound
    worst = np.unravel_index(int(ratio.argmax()), ratio.shape) if ratio.size else ()
    assert not ratio.size or ratio[worst] <= 1, (
        f"{ours[worst]!r} at {worst} should be {theirs[worst]!r}: {ratio[worst]:.2f} times the bound {bound[worst]:.1e}"
    )
