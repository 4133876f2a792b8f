"""Costs of samples that have one number each: equal ones, or those of an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.storage.cache import MappedArray
from orchdata.planning.parts import Parts
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding

Ints = NDArray[np.int64]


class _SampleCosts:
    """Samples with one cost each, in the single phase `llm`."""

    phases: ClassVar[tuple[str, ...]] = ("llm",)
    balanced: ClassVar[tuple[str, ...]] = ("llm",)
    padded: ClassVar[Padding] = NO_PADDING
    exponent: ClassVar[int] = 0

    def loss_tokens(self, row: Ints) -> Ints:
        return np.zeros(len(row), np.int64)

    def parts(self, phase: str, row: Ints) -> Parts:
        raise ValueError(f"costs per sample do not give the parts of phase {phase!r}: use assignment='joint'")


@dataclass(frozen=True)
class EqualCosts(_SampleCosts):
    """Every sample costs 1, for any number of samples."""

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.ones(len(row), np.int64)

    positions = costs


@dataclass(frozen=True)
class ArrayCosts(_SampleCosts):
    """One cost a sample, int64 (num_samples,)."""

    values: Ints

    def __reduce__(self) -> tuple[Any, ...]:
        return _array_costs, (MappedArray(self.values),)

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.maximum(self.values[row], 1)

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.values[row]


def _array_costs(values: MappedArray) -> ArrayCosts:
    return ArrayCosts(values.array)
