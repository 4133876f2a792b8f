"""The cost kernels against plain Python, which has no int64 to overflow."""

from __future__ import annotations

import numpy as np
import pytest

from orchdata.native.costs import COST_SHIFT, longest_sequence, part_costs, sequence_costs

NO_WINDOWS = np.empty((0, 2), np.int64)


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
