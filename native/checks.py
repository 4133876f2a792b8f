"""Checks in one pass: costs (num_samples,) -> the first entry that breaks the rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def first_invalid(costs: NDArray[np.int64], max_total: int) -> tuple[int, bool]:
    """Return the first sample with a negative cost, or at which the running sum exceeds `max_total`.

    Returns:
        (sample or -1, whether the sum exceeds).
    """
    room = np.int64(max_total)
    for sample in range(costs.shape[0]):
        if costs[sample] < 0:
            return sample, False
        if costs[sample] > room:
            return sample, True
        room -= costs[sample]
    return -1, False
