"""Fitting costs: measured sequences and their seconds -> the PhaseCost that predicts them, in seconds.

One phase timed by itself, or all phases of a model at once from the times of whole steps.

Least squares over constant, linear and quadratic, none of them below 0 (Lawson and Hanson 1974, as in scipy): a phase
does not get faster with length, and a negative coefficient would predict negative times outside the measured range.

Each equation is divided by its measured time, so relative errors are minimised: an error of 10 % counts the same at 100
positions as at a million. Columns are scaled to equal length, as l*l is up to 10**12 times the constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.checks import checked_costs
from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost


@dataclass(frozen=True, slots=True)
class FittedCost:
    """The measured cost of a phase, and how well it predicts the measurements that it was fitted to.

    Attributes:
        cost: seconds of one sequence of l positions; a CostModel takes it unchanged.
        residual: root mean square of the relative errors (predicted - measured) / measured: 0.05 is 5 % off.
        worst_residual: the largest of those errors, without its sign.
        num_samples: number of measurements that it was fitted to.
    """

    cost: PhaseCost
    residual: float
    worst_residual: float
    num_samples: int


def fit_phase_cost(lengths: ArrayLike | Sequence[ArrayLike], seconds: ArrayLike) -> FittedCost:
    """Fit seconds ~ constant + linear*l + quadratic*l*l to measurements, by non-negative least squares.

    A measurement is one sequence, or several that ran together (packed): then its time is the sum over its sequences,
    and the constant counts for each of them. Subtract first what a step takes for any number of sequences. An attention
    window shorter than the sequences shows as linear cost. Measure lengths spread over the range of training, and take
    medians of repeats: noise of p per cent in the times lowers the fit by about p*p / 100 per cent.

    Args:
        lengths: integers of at least 1: (num_samples,), one sequence each; or num_samples arrays, the sequences of each
            measurement.
        seconds: numbers (num_samples,), above 0. Another unit is fine if all phases of the model share it.

    Raises:
        ValueError: lengths or seconds out of range, not one time for each measurement, or lengths that do not
            separate the three coefficients: at least three different ones do.
    """
    features = _features(lengths)
    times = _checked_seconds(seconds, len(features))
    coefficients, errors = _solve(features, times)
    constant, linear, quadratic = (float(value) for value in coefficients)
    return FittedCost(
        cost=PhaseCost(linear, quadratic, constant),
        residual=float(np.sqrt(np.mean(np.square(errors)))),
        worst_residual=float(np.abs(errors).max()),
        num_samples=len(errors),
    )


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The measured costs of a model's phases, and how well they predict the measurements that they were fitted to.

    Attributes:
        costs: phase -> seconds of one sequence of l positions.
        seconds: constant part of every measurement.
        residual, worst_residual, num_samples: as in FittedCost.
    """

    costs: Mapping[str, PhaseCost]
    seconds: float
    residual: float
    worst_residual: float
    num_samples: int

    @property
    def model(self) -> CostModel:
        return CostModel(**self.costs)


def fit_phase_costs(lengths: Mapping[str, Sequence[ArrayLike]], seconds: ArrayLike) -> FittedCosts:
    """Fit all phases together to the times of whole steps, in which the phases' shares differ.

    A rank's forward and backward of each of some tens of steps, unbalanced so that they differ, is enough: no phase has
    to be timed alone. Least squares as in `fit_phase_cost`, with a constant of the step and three coefficients a phase.

    Args:
        lengths: phase -> for each measurement the positions of its sequences, integers of at least 1; it may be empty.
        seconds: numbers (num_samples,), above 0.

    Raises:
        ValueError: lengths or seconds out of range, not one time for each measurement, or a phase with a cost that
            the measurements do not show.
    """
    if not isinstance(lengths, Mapping) or not lengths:
        raise ValueError("lengths must map names of phases to the sequences of each measurement")
    columns = []
    for phase, measured in lengths.items():
        rows = [_checked_lengths(entry, f"lengths[{phase!r}][{index}]") for index, entry in enumerate(measured)]
        columns.append(np.array([(len(row), row.sum(), np.square(row).sum()) for row in rows]).reshape(-1, 3))
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"all phases must have the same measurements, got {[len(column) for column in columns]}")
    features = np.concatenate([*columns, np.ones((len(columns[0]), 1))], axis=1)
    times = _checked_seconds(seconds, len(features))
    coefficients, errors = _solve(features, times)
    by_phase = dict(zip(lengths, coefficients[:-1].reshape(-1, 3), strict=True))
    for phase, fitted in by_phase.items():
        if not fitted.any():
            raise ValueError(
                f"phase {phase!r} costs nothing by these measurements: measure steps that differ more in it"
            )
    return FittedCosts(
        costs={
            phase: PhaseCost(float(linear), float(quadratic), float(constant))
            for phase, (constant, linear, quadratic) in by_phase.items()
        },
        seconds=float(coefficients[-1]),
        residual=float(np.sqrt(np.mean(np.square(errors)))),
        worst_residual=float(np.abs(errors).max()),
        num_samples=len(errors),
    )


def _solve(
    features: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return coefficients of at least 0, and the relative errors of their predictions."""
    from scipy.optimize import nnls

    longest = times.max()
    with np.errstate(over="ignore", divide="ignore"):
        equations = features / (times / longest)[:, None]
        scale = np.sqrt(np.square(equations).sum(axis=0))
    if not np.isfinite(scale).all():
        raise ValueError(f"seconds[{times.argmin()}] is {times.min()}, too small compared to {longest}: leave it out")
    scale[scale == 0] = 1.0  # A column without any sequence.
    solution, _ = nnls(equations / scale, np.ones(len(equations)))
    coefficients = solution / scale
    return coefficients * longest, equations @ coefficients - 1.0


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
