"""Lengths, in bounded memory: how often each occurs --> percentiles and bins of a factor of 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PERCENTILES = {"min": 0, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths above 0 of some samples.

    Attributes:
        samples: number of these samples.
        total: their sum.
        percentiles: "min", "p25", "p50", "p75", "p95", "p99" and "max", each the length of a sample; empty without any.
        bins: samples with lengths from 2^b up to 2^(b+1), for b from 0.
    """

    samples: int
    total: int
    percentiles: Mapping[str, int]
    bins: tuple[int, ...]


class LengthCounts:
    """Counts lengths that are added in chunks; it keeps one number for each different length."""

    def __init__(self) -> None:
        self._lengths: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def add(self, lengths: Ints) -> None:
        """Add lengths, int64 (n,); those of 0 are left out."""
        new, counts = np.unique(lengths[lengths > 0], return_counts=True)
        merged, places = np.unique(np.concatenate([self._lengths, new]), return_inverse=True)
        both = np.concatenate([self._counts, counts])
        self._lengths, self._counts = merged, np.bincount(places, weights=both, minlength=len(merged)).astype(np.int64)

    def lengths(self) -> Lengths:
        ends = np.cumsum(self._counts)
        samples = int(ends[-1]) if len(ends) else 0
        percentiles: dict[str, int] = {}
        bins: tuple[int, ...] = ()
        if samples:
            # The length of the sample at that place in ascending order, as np.percentile(..., method="lower").
            places = {name: (samples - 1) * percent // 100 for name, percent in PERCENTILES.items()}
            found = {name: np.searchsorted(ends, place, side="right") for name, place in places.items()}
            percentiles = {name: int(self._lengths[place]) for name, place in found.items()}
            powers = np.frexp(self._lengths.astype(np.float64))[1] - 1
            bins = tuple(np.bincount(powers, weights=self._counts).astype(np.int64).tolist())
        return Lengths(
            samples=samples, total=int((self._lengths * self._counts).sum()), percentiles=percentiles, bins=bins
        )
