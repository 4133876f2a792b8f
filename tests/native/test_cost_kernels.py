"""The cost kernels against plain Python, which has no int64 to overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.native.costs import COST_SHIFT, MAX_FIXED_POINT, longest_sequence, part_costs, sequence_costs

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")

NO_WINDOWS = np.empty((0, 2), np.int64)
windows = st.lists(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 2**21)), max_size=3)
coefficients = st.tuples(
    st.integers(0, 2**40),
    st.integers(0, 2**21),
    st.integers(0, 2**50),
    windows.map(lambda pairs: np.array(pairs, np.int64).reshape(-1, 2)),
)
Coefficients = tuple[int, int, int, np.ndarray]


def fixed_point(length: int, linear: int, quadratic: int, constant: int, windows: np.ndarray) -> int:
    in_windows = sum(coefficient * length * min(length, width) for width, coefficient in windows.tolist())
    return linear * length + quadratic * length**2 + constant + in_windows


def cost_twin(length: int, *values: Any) -> int:
    return max(1, fixed_point(length, *values) >> COST_SHIFT) if length > 0 else 0


@given(st.lists(st.integers(0, 2**20), max_size=20), coefficients)
def test_sequence_costs_equal_their_twin(lengths: list[int], values: Coefficients) -> None:
    longest = longest_sequence(*values)
    lengths = [length for length in lengths if length <= longest]
    assert sequence_costs(np.array(lengths, np.int64), *values).tolist() == [cost_twin(x, *values) for x in lengths]


@given(coefficients)
def test_longest_sequence_is_the_last_that_fits(values: Coefficients) -> None:
    longest = int(longest_sequence(*values))
    assert fixed_point(longest, *values) <= MAX_FIXED_POINT
    assert longest == 2**31 - 1 or fixed_point(longest + 1, *values) > MAX_FIXED_POINT


def test_too_long_a_sequence_is_an_error_not_an_overflow() -> None:
    with pytest.raises(ValueError, match="too long"):
        sequence_costs(np.array([2**22], np.int64), 1, 2**20, 0, NO_WINDOWS)


@pytest.mark.parametrize(("width", "longest"), [(1, 2**22), (2**10, 2**12), (2**31 - 1, 2**11)])
def test_too_long_for_a_window_is_an_error_not_an_overflow(width: int, longest: int) -> None:
    window = np.array([[width, 1 << 40]], np.int64)
    assert longest_sequence(0, 0, 0, window) == longest  # 2**40 * longest * min(longest, width) = 2**62
    assert sequence_costs(np.array([longest], np.int64), 0, 0, 0, window)[0] > 0
    with pytest.raises(ValueError, match="too long"):
        sequence_costs(np.array([longest + 1], np.int64), 0, 0, 0, window)


def test_part_costs_sum_over_the_parts_of_one_modality() -> None:
    offsets = np.array([0, 2, 2, 5], np.int64)
    modality = np.array([1, 2, 1, 1, 0], np.uint8)
    positions = np.array([10, 20, 3, 4, 5], np.int32)
    rows = np.array([2, 0, 1, 2], np.int64)
    one, square = 1 << COST_SHIFT, 1 << COST_SHIFT
    # Each part is its own sequence: 3*3 + 4*4, not 7*7.
    assert part_costs(rows, offsets, modality, positions, 1, 0, square, 0, NO_WINDOWS).tolist() == [25, 100, 0, 25]
    assert part_costs(rows, offsets, modality, positions, 2, one, 0, 0, NO_WINDOWS).tolist() == [0, 20, 0, 0]
    # And a window of its own: 3*3 + 4*3, 10*3.
    window = np.array([[3, one]], np.int64)
    assert part_costs(rows, offsets, modality, positions, 1, 0, 0, 0, window).tolist() == [21, 30, 0, 21]


@pytest.mark.parametrize("offsets", [[-1, 2], [0, 3], [2, 1], [1 << 40, 1 << 41], [-(1 << 62), 1 << 62]])
def test_parts_outside_of_the_arrays_are_refused(offsets: list[int]) -> None:
    modality, positions = np.ones(2, np.uint8), np.ones(2, np.int32)
    with pytest.raises(IndexError, match="parts of a row outside"):
        part_costs(np.array([0]), np.array(offsets), modality, positions, 1, 1, 0, 0, NO_WINDOWS)
    for row in (-1, 1, 1 << 62, (1 << 63) - 1):
        with pytest.raises(IndexError, match="a row outside"):
            part_costs(np.array([row]), np.array([0, 2]), modality, positions, 1, 1, 0, 0, NO_WINDOWS)


def test_a_present_part_costs_at_least_one() -> None:
    offsets, modality = np.array([0, 2], np.int64), np.array([1, 1], np.uint8)
    positions = np.array([1, 1], np.int32)
    assert part_costs(np.array([0]), offsets, modality, positions, 1, 1, 0, 0, NO_WINDOWS).tolist() == [2]
