"""Fitting a phase's cost: measured sequences and their seconds -> the PhaseCost that predicts them, in seconds.

Least squares over constant, linear and quadratic, none of them below 0 (Lawson and Hanson 1974, as in scipy): a phase
does not get faster with length, and a negative coefficient would predict negative times outside the measured range.

Each equation is divided by its measured time, so that relative errors are minimised: one of 10 % counts the same at 100
positions as at a million. Columns are scaled to equal length, as those of l*l are up to 10**12 times those of the
constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_costs
from orchdata.balancers.costs import PhaseCost


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A phase's cost as measured, and how well it predicts the measurements it was fitted to.

    Attributes:
        cost: seconds of one sequence of l positions; a CostModel takes it as it is.
        residual: root mean square of the relative errors (predicted - measured) / measured: 0.05 is 5 % off.
        worst_residual: the largest of those errors, without its sign.
        num_samples: how many measurements it was fitted to.
    """

    cost: PhaseCost
    residual: float
    worst_residual: float
    num_samples: int


def fit_phase_cost(lengths: ArrayLike | Sequence[ArrayLike], seconds: ArrayLike) -> FittedCost:
    """Fit seconds ~ constant + linear*l + quadratic*l*l to measurements, by non-negative least squares.

    A measurement is one sequence, or several that ran together (packed): then its time is the sum over its sequences,
    and the constant counts for each of them. What a step takes however many sequences it runs should be subtracted
    before. Measure lengths spread over the range that will be trained on, and medians of repeats: noise of p per cent
    in the times lowers the fit by about p*p / 100 per cent.

    Args:
        lengths: integers of at least 1: (num_samples,), a sequence each; or num_samples arrays, the sequences of each
            measurement.
        seconds: numbers (num_samples,), above 0. Another unit will do if all phases of the model share it.

    Raises:
        ValueError: lengths or seconds out of range, not one time for each measurement, or lengths that do not tell
            the three coefficients apart: at least three different ones do.
    """
    from scipy.optimize import nnls

    features = _features(lengths)
    times = _checked_seconds(seconds, len(features))
    longest = times.max()
    with np.errstate(over="ignore", divide="ignore"):
        equations = features / (times / longest)[:, None]
        scale = np.sqrt(np.square(equations).sum(axis=0))
    if not np.isfinite(scale).all():
        raise ValueError(f"seconds[{times.argmin()}] is {times.min()}, too small beside {longest}: leave it out")
    solution, _ = nnls(equations / scale, np.ones(len(equations)))
    coefficients = solution / scale
    errors = equations @ coefficients - 1.0
    constant, linear, quadratic = (float(value) for value in coefficients * longest)
    return FittedCost(
        cost=PhaseCost(linear, quadratic, constant),
        residual=float(np.sqrt(np.mean(np.square(errors)))),
        worst_residual=float(np.abs(errors).max()),
        num_samples=len(errors),
    )


def _features(lengths: Any) -> NDArray[np.float64]:
    """float64 (num_samples, 3): count, sum of l and sum of l*l over the sequences of each measurement."""
    nested = isinstance(lengths, list | tuple) and any(np.ndim(entry) for entry in lengths)
    if nested or np.ndim(lengths) == 2:
        rows = [_checked_lengths(entry, f"lengths[{index}]") for index, entry in enumerate(lengths)]
        features = np.array([(len(row), row.sum(), np.square(row).sum()) for row in rows])
        if not features[:, 0].all():
            index = int(features[:, 0].argmin())
            raise ValueError(f"lengths[{index}] is empty: a measurement has at least one sequence, leave it out")
    else:
        single = _checked_lengths(lengths, "lengths")
        features = np.stack([np.ones_like(single), single, np.square(single)], axis=1)
    if not len(features) or np.linalg.matrix_rank(features / np.linalg.norm(features, axis=0)) < 3:
        raise ValueError(
            f"{len(features)} measurements do not tell constant, linear and quadratic cost apart:"
            " measure sequences of at least 3 different lengths"
        )
    return features


def _checked_lengths(lengths: ArrayLike, name: str) -> NDArray[np.float64]:
    checked = checked_costs(lengths, name)
    if len(checked) and not checked.all():
        raise ValueError(f"{name}[{checked.argmin()}] is 0; a measured sequence has at least 1 position")
    return checked.astype(np.float64)


def _checked_seconds(seconds: ArrayLike, num_samples: int) -> NDArray[np.float64]:
    times = np.asarray(seconds)
    if times.ndim != 1 or times.dtype.kind not in "iuf":
        raise ValueError(f"seconds must be numbers (num_samples,), got shape {times.shape}, dtype {times.dtype}")
    if len(times) != num_samples:
        raise ValueError(f"each measurement needs its time, got {num_samples} of lengths and {len(times)} of seconds")
    times = times.astype(np.float64)
    bad = ~(np.isfinite(times) & (times > 0))
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(f"seconds[{index}] is {times[index]}; it must be finite and above 0")
    return times
