"""Cost models: the number of positions that enter a phase -> their cost, in integers; and costs from measurements.

A phase's cost of one sequence is a `PhaseCost`. The coefficients are quantised once, with one scale for all phases, so
that costs can be added; from there on everything is int64, the same on every rank. The scale is the largest power of
two at which one sequence of 2**20 positions in every phase together costs at most 2**42: 2**20 such samples still sum
to 2**62. Coefficients carry 20 more fractional bits (`COST_SHIFT`). Whole coefficients that fit keep scale 1.

Fitting is least squares over constant, linear and quadratic, none below 0 (Lawson and Hanson 1974, as in scipy): a
phase does not get faster with length, and a negative coefficient would predict negative times. Each equation is divided
by its measured time, so relative errors are minimised. Columns are scaled to equal length, as l*l is up to 10**12 times
the constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import checked_costs
from orchdata.balancers.costs.families import phases_of
from orchdata.balancers.costs.phase import PhaseCost, TransformerCost
from orchdata.native.costs import COST_SHIFT, MAX_FIXED_POINT, Coefficients, sequence_costs

LONGEST_POSITIONS = 1 << 20
BACKBONE = "llm"
FIRST_PHASES = ("image", "audio")


@dataclass(frozen=True, slots=True, init=False)
class CostModel:
    """The cost of each phase of a model; it also defines the phases.

    `CostModel(image=TransformerCost(...), llm=PhaseCost(1.0))`: any phase by name, a PhaseCost or TransformerCost each.
    The backbone, `llm`, is required. A value of None leaves a phase out.

    Attributes:
        phases: names in the order they run: image, audio, others by name, llm.
        costs: PhaseCost of each, before quantisation.
        exponent: costs are the given units times 2**exponent.
    """

    phases: tuple[str, ...]
    costs: tuple[PhaseCost, ...]
    exponent: int

    def __init__(self, **phases: PhaseCost | TransformerCost | None) -> None:
        given: dict[str, PhaseCost] = {}
        for name, cost in phases.items():
            if cost is None:
                continue
            if not isinstance(cost, PhaseCost | TransformerCost):
                raise ValueError(f"CostModel({name}=...) must be a PhaseCost or a TransformerCost, got {cost!r}")
            given[name] = cost.phase_cost()
        if BACKBONE not in given:
            raise ValueError(f"CostModel needs {BACKBONE}=..., the backbone all samples pass, got {sorted(given)}")
        others = sorted(set(given) - {*FIRST_PHASES, BACKBONE})
        names = tuple(name for name in (*FIRST_PHASES, *others, BACKBONE) if name in given)
        object.__setattr__(self, "phases", names)
        object.__setattr__(self, "costs", tuple(given[name] for name in names))
        object.__setattr__(self, "exponent", _exponent(self.costs))

    @classmethod
    def tokens(cls) -> CostModel:
        """Return a model in which a position of the backbone costs 1: it balances tokens."""
        return cls(llm=PhaseCost(1.0))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | Any, **phases: Mapping[str, Any] | PhaseCost | TransformerCost | None
    ) -> CostModel:
        """Return a model of the phases that a Hugging Face config describes, each read by
        `TransformerCost.from_config`.

        `CostModel.from_config(config, image={"trainable": False}, llm={"recompute": "full"})`.

        Args:
            config: of the whole model: a dict, or an object with `to_dict`.
            phases: attributes of a phase's TransformerCost that the config does not have, or its whole cost, such as a
                measured one; None leaves the phase out.

        Raises:
            ValueError: as `TransformerCost.from_config`, or a phase that the config does not describe.
        """
        described = phases_of(config)
        unknown = sorted(set(phases) - set(described))
        if unknown:
            raise ValueError(f"the config has no phase {unknown[0]!r}, it describes {', '.join(described) or 'none'}")
        known = {field.name for field in fields(TransformerCost)}
        given: dict[str, PhaseCost | TransformerCost | None] = {}
        for phase in described:
            value = phases.get(phase, {})
            if value is None or isinstance(value, PhaseCost | TransformerCost):
                given[phase] = value
                continue
            if not isinstance(value, Mapping) or (wrong := sorted(set(value) - known)):
                raise ValueError(
                    f"{phase}={value!r} must map attributes of TransformerCost to values"
                    + (f", and {wrong[0]!r} is none of them" if isinstance(value, Mapping) else "")
                    + "; a PhaseCost or TransformerCost is taken unchanged, None leaves the phase out"
                )
            given[phase] = TransformerCost.from_config(config, phase, **value)
        return cls(**given)

    def coefficients(self, phase: str) -> Coefficients:
        """Return the quantised (linear, quadratic, constant, windows) of a phase, for the kernels of
        `orchdata.native.costs`.

        `windows` is int64 (num_windows, 2), the width and the coefficient of each.

        Raises:
            ValueError: the model has no such phase.
        """
        return coefficients_of(self._cost(phase), self.exponent)

    def sequence_costs(self, phase: str, lengths: ArrayLike) -> NDArray[np.int64]:
        """Return the cost of each sequence of `lengths` positions in a phase: 0 without positions, else at least 1.

        Raises:
            ValueError: an unknown phase, lengths that are not non-negative integers, or too long for int64.
        """
        checked: NDArray[np.int64] = sequence_costs(checked_costs(lengths, "lengths"), *self.coefficients(phase))
        return checked

    def describe(self) -> dict[str, Any]:
        """Return a JSON-safe part of a plan's identity; two models with equal descriptions give equal costs."""
        return {
            "exponent": self.exponent,
            "shift": COST_SHIFT,
            "phases": {
                name: [*plain, windows] if windows else plain
                for name, cost in zip(self.phases, self.costs, strict=True)
                for *plain, windows in [_quantised(cost, self.exponent)]
            },
        }

    def __repr__(self) -> str:
        return f"CostModel({', '.join(f'{n}={c!r}' for n, c in zip(self.phases, self.costs, strict=True))})"

    def _cost(self, phase: str) -> PhaseCost:
        try:
            return self.costs[self.phases.index(phase)]
        except ValueError:
            raise ValueError(f"the cost model has no phase {phase!r}, it has {', '.join(self.phases)}") from None


def coefficients_of(cost: PhaseCost, exponent: int) -> Coefficients:
    """Return the coefficients of a cost times 2**exponent, as `CostModel.coefficients` does."""
    linear, quadratic, constant, windows = _quantised(cost, exponent)
    return linear, quadratic, constant, np.array(windows, np.int64).reshape(-1, 2)


def _exponent(costs: tuple[PhaseCost, ...]) -> int:
    """Return the power of two of the scale: 0 where whole coefficients fit, else as large as fits."""
    longest = sum(cost.at(LONGEST_POSITIONS) for cost in costs)
    if not math.isfinite(longest):
        raise ValueError("the cost model's coefficients are too large: give them in a larger unit, as GFLOPs")
    largest = math.frexp(MAX_FIXED_POINT / 2)[1] - math.frexp(longest)[1] - COST_SHIFT
    # Rounding each coefficient up may exceed the limit if the sum is just below it.
    if sum(_fixed_point(cost, largest, LONGEST_POSITIONS) for cost in costs) > MAX_FIXED_POINT:
        largest -= 1
    values = (value for cost in costs for value in (cost.linear, cost.quadratic, cost.constant, *_in_windows(cost)))
    whole = all(value.is_integer() for value in values)
    return 0 if whole and largest >= 0 else largest


def _in_windows(cost: PhaseCost) -> list[float]:
    return [coefficient for _, coefficient in cost.windows]


def _quantised(cost: PhaseCost, exponent: int) -> tuple[int, int, int, list[list[int]]]:
    """Return (linear, quadratic, constant, windows), rounded to nearest: ldexp is exact, and so is round on a float."""
    shift = exponent + COST_SHIFT
    linear, quadratic, constant, *in_windows = (
        round(math.ldexp(value, shift)) for value in (cost.linear, cost.quadratic, cost.constant, *_in_windows(cost))
    )
    widths = [width for width, _ in cost.windows]
    return linear, quadratic, constant, [list(pair) for pair in zip(widths, in_windows, strict=True)]


def _fixed_point(cost: PhaseCost, exponent: int, positions: int) -> int:
    """Return the cost of one sequence before the shift, without int64's limit."""
    linear, quadratic, constant, windows = _quantised(cost, exponent)
    in_windows = sum(coefficient * positions * min(positions, width) for width, coefficient in windows)
    return linear * positions + quadratic * positions**2 + constant + in_windows


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
