"""Cost kernels: lengths of sequences and quantised coefficients -> int64 costs.

A sequence of l positions costs (a*l + b*l*l + sum of b_i*l*min(l, w_i) + c) >> COST_SHIFT, and at least 1 where l > 0:
fixed point, so that a small quadratic coefficient keeps its precision. All in int64, without fastmath: equal on every
machine.

`windows` is int64 (num_windows, 2): the positions w_i and the quantised coefficient b_i of each attention window.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, Ints32, inlined, kernel

COST_SHIFT = 20
MAX_FIXED_POINT = 1 << 62

Coefficients: TypeAlias = tuple[int, int, int, Ints]
"""linear, quadratic, constant and windows, quantised: what `CostModel.coefficients` gives."""


@kernel
def room_after(room: int, coefficient: int, length: int, reach: int) -> int:
    """Return room - coefficient*length*reach; -1 if it does not fit. It divides, as products may overflow."""
    if room < 0 or coefficient > room // length // reach:
        return np.int64(-1)
    return room - coefficient * length * reach


@kernel
def longest_sequence(linear: int, quadratic: int, constant: int, windows: Ints) -> int:
    """Return the most positions with a cost before the shift within 2**62, at most 2**31 - 1."""
    low = np.int64(0)
    high = np.int64((1 << 31) - 1)
    while low < high:
        middle = low + (high - low + 1) // 2
        room = room_after(np.int64(MAX_FIXED_POINT) - constant, np.int64(quadratic), middle, middle)
        room = room_after(room, np.int64(linear), middle, np.int64(1))
        for window in range(windows.shape[0]):
            room = room_after(room, windows[window, 1], middle, min(middle, windows[window, 0]))
        if room >= 0:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def sequence_cost(length: int, linear: int, quadratic: int, constant: int, windows: Ints) -> int:
    """Return the cost of one sequence; the caller has checked its length."""
    total = linear * length + quadratic * length * length + constant
    if windows.shape[0] > 0:  # The compiler moves this test out of the loop: without windows it is vectorised.
        for window in range(windows.shape[0]):
            total += windows[window, 1] * length * min(length, windows[window, 0])
    return max(np.int64(1), total >> COST_SHIFT) if length > 0 else np.int64(0)


@kernel
def sequence_costs(lengths: Ints, linear: int, quadratic: int, constant: int, windows: Ints) -> Ints:
    """Return the cost of each sequence of `lengths` positions, 0 for 0, int64 (num_sequences,), under the quantised
    coefficients of `CostModel.coefficients`. Raises ValueError for one too long for int64.
    """
    costs = np.empty(lengths.shape[0], np.int64)
    longest = longest_sequence(linear, quadratic, constant, windows)
    for index in range(lengths.shape[0]):
        length = lengths[index]
        if length > longest:
            raise ValueError("a sequence is too long for its cost to fit into int64: limit the positions of a sample")
        costs[index] = sequence_cost(length, linear, quadratic, constant, windows)
    return costs


@kernel
def part_costs(
    rows: Ints,
    part_offsets: Ints,
    part_modality: NDArray[np.uint8],
    part_positions: Ints32,
    modality: int,
    linear: int,
    quadratic: int,
    constant: int,
    windows: Ints,
) -> Ints:
    """Return the cost of index rows in an encoder phase, int64 (num_samples,): the sum over their parts of one
    modality, each its own sequence. Row r has the parts from part_offsets[r] to part_offsets[r + 1]. Raises ValueError
    for one too long for int64, IndexError for a row, or its parts, outside of the arrays.
    """
    costs = np.zeros(rows.shape[0], np.int64)
    longest = longest_sequence(linear, quadratic, constant, windows)
    for index in range(rows.shape[0]):
        row = rows[index]
        if row < 0 or row >= part_offsets.shape[0] - 1:
            raise IndexError("a row outside of the index")
        if not 0 <= part_offsets[row] <= part_offsets[row + 1] <= part_modality.shape[0]:
            raise IndexError("parts of a row outside of the index")
        for part in range(part_offsets[row], part_offsets[row + 1]):
            if part_modality[part] != modality:
                continue
            length = np.int64(part_positions[part])
            if length > longest:
                raise ValueError("a part is too long for its cost to fit into int64: limit the positions of a part")
            costs[index] += sequence_cost(length, linear, quadratic, constant, windows)
    return costs
