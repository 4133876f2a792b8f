"""Distributions of sizes: a seeded generator -> one number. Frozen values, so that descriptions can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Distribution(Protocol):
    """Something numbers are drawn from; `low` and `high` bound every draw."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    def draw(self, rng: np.random.Generator) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same value."""

    value: float

    @property
    def low(self) -> float:
        return self.value

    @property
    def high(self) -> float:
        return self.value

    def draw(self, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Evenly spread over [low, high]."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal(log(median), sigma)), clipped to [low, high]: the long tail that real data has."""

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: np.random.Generator) -> float:
        return float(np.clip(self.median * math.exp(self.sigma * rng.standard_normal()), self.low, self.high))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few values, by weight."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def draw(self, rng: np.random.Generator) -> float:
        return self.values[pick(rng, self.weights)]


def pick(rng: np.random.Generator, weights: tuple[float, ...]) -> int:
    """Draw an index in proportion to positive `weights`, of any sum."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
