"""Checks of what a caller passes: array-likes -> contiguous int64, or a ValueError that names value and limit."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.native.checks import first_invalid

MAX_TOTAL = 1 << 62


def checked_count(value: int, name: str, least: int = 1) -> int:
    """An integer of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def checked_costs(costs: ArrayLike, name: str = "costs") -> NDArray[np.int64]:
    """Contiguous int64 (num_samples,), each at least 0, with a sum of at most 2**62.

    Floats are taken where each is a whole number.

    Raises:
        ValueError: for anything else; it names the first offending sample.
    """
    array = np.asarray(costs)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, one entry a sample, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = _whole_numbers(array, name)
    elif array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}: use a CostModel to make costs")
    elif array.dtype.kind == "u" and array.size and int(array.max()) > MAX_TOTAL:
        index = int(array.argmax())
        raise ValueError(f"{name}[{index}] is {array[index]}, above the limit of 2**62 for their sum: scale them down")
    checked = np.ascontiguousarray(array, dtype=np.int64)
    index, total_exceeded = first_invalid(checked, MAX_TOTAL)
    if index >= 0:
        if total_exceeded:
            raise ValueError(f"{name} sum to more than 2**62 at sample {index} ({checked[index]}): scale them down")
        raise ValueError(f"{name}[{index}] is {checked[index]}; it must be at least 0")
    return checked


def _whole_numbers(array: NDArray[np.floating], name: str) -> NDArray[np.int64]:
    """Floats as int64 where that loses nothing."""
    bad = ~(np.isfinite(array) & (np.abs(array) <= MAX_TOTAL) & (np.floor(array) == array))
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(
            f"{name}[{index}] is {array[index]}; it must be a whole number from 0 to 2**62:"
            " use a CostModel to make costs"
        )
    return array.astype(np.int64)
