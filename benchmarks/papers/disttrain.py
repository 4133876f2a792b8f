"""The order of DistTrain's inter-microbatch reordering (arXiv 2408.04275), for comparison.

Its code is not public. From its description: the smallest microbatch first; the num_stages - 1 smallest of the rest
kept for the tail, where no forward is left to fill the waits; the others by best fit into the intervals in which stage
0 waits for a backward; O(l * (l + p)) for l microbatches on p stages.

Our assumptions: the size of a microbatch is its time over all stages, forward and backward; the tail runs from its
largest to its smallest; an interval is as long as in the schedule of the microbatches placed so far, and the forward on
stage 0 nearest to it fits best; the first interval, which the warm-up fills, is the first microbatch's time on the
later stages, shared equally by the forwards still to come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.native.microbatches.pipeline import fill_intervals, sizes_of


def order_after_disttrain(forward_times: ArrayLike, backward_times: ArrayLike) -> NDArray[np.int32]:
    """Return int32 (num_microbatches,), the microbatch that runs at each position; times as in `simulate_1f1b`."""
    forward, backward = (np.asarray(times, np.float64) for times in (forward_times, backward_times))
    num_stages, count = forward.shape
    flat = forward.T.ravel(), backward.T.ravel()
    order = fill_intervals(*flat, np.argsort(sizes_of(*flat, count), kind="stable"), num_stages)
    return np.asarray(order, dtype=np.int32)
