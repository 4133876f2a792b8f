"""The cost of one sequence in a phase: a position, a pair of positions, a pair inside a window, and a constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.checks import checked_count

MAX_WIDTH = (1 << 31) - 1
Positions = TypeVar("Positions", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Cost of one sequence of l positions, in any unit shared by all phases.

    linear*l + quadratic*l*l + constant, and coefficient*l*min(l, width) for each attention window.

    Attributes:
        linear: cost of a position.
        quadratic: cost of a pair of positions, as in attention.
        constant: cost of a sequence of any length.
        windows: (width, coefficient) of each window: a position pairs with at most `width` positions, and a pair costs
            `coefficient`. One entry for each width, ascending.
    """

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "constant"):
            object.__setattr__(self, name, checked_coefficient(getattr(self, name), f"PhaseCost.{name}"))
        object.__setattr__(self, "windows", _checked_windows(self.windows))
        if not self.linear + self.quadratic + self.constant > 0 and not self.windows:
            raise ValueError("PhaseCost needs a coefficient above 0: leave the phase out if it costs nothing")

    def phase_cost(self) -> PhaseCost:
        """Return itself: a model takes a PhaseCost or an object that returns one."""
        return self

    def __add__(self, other: PhaseCost) -> PhaseCost:
        """Return the cost of both, for a phase in which sequences pass both."""
        return PhaseCost(
            self.linear + other.linear,
            self.quadratic + other.quadratic,
            self.constant + other.constant,
            self.windows + other.windows,
        )

    def at(self, positions: Positions) -> Positions:
        """Return the cost of one sequence, or of each, before quantisation."""
        cost = self.linear * positions + self.quadratic * positions * positions + self.constant
        for width, coefficient in self.windows:  # One by one: sum() adds floats differently in each version of Python.
            cost += coefficient * positions * np.minimum(positions, width)
        return cost


def _checked_windows(windows: Any) -> tuple[tuple[int, float], ...]:
    """Return one entry for each width, ascending; those that cost nothing are left out."""
    by_width: dict[int, float] = {}
    try:
        pairs = [(width, coefficient) for width, coefficient in windows]
    except (TypeError, ValueError):
        raise ValueError(f"PhaseCost.windows must be pairs (width, coefficient), got {windows!r}") from None
    for width, coefficient in pairs:
        width = checked_count(width, "PhaseCost.windows: a width")
        if width > MAX_WIDTH:
            raise ValueError(f"PhaseCost.windows: a width must be at most {MAX_WIDTH:,}, got {width:,}")
        value = checked_coefficient(coefficient, "PhaseCost.windows: a coefficient")
        by_width[width] = by_width.get(width, 0.0) + value
    return tuple((width, by_width[width]) for width in sorted(by_width) if by_width[width] > 0)


def checked_coefficient(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return number
