"""1F1B over modules with replicas of their own: times of each microbatch -> seconds until all have ended.

Slots are those of `pipeline.py`: an operation waits for the last one of its neighbour in the slot before. Where two
modules meet, it waits for all replicas of the neighbour, and for what travels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

Times = NDArray[np.float64]
Counts = NDArray[np.int64]


@kernel
def run_modules(
    forward: Times,
    backward: Times,
    travel: Times,
    back: Times,
    stages: Counts,
    replicas: Counts,
    meets: NDArray[np.bool_],
) -> float:
    """Return the end of the last backward.

    Args:
        forward, backward: float64 (sum of replicas, num_microbatches), of a stage of each replica, module after module;
            stages of a module take equal times.
        travel, back: float64 (num_modules, num_microbatches), until features are at a module after the one before has
            made them, and until their gradients are back.
        stages, replicas: int64 (num_modules,).
        meets: bool (num_modules,), whether replicas wait for all of the module before; else it has as many replicas.
    """
    count, total = forward.shape[1], stages.sum()
    # Of each stage: its module, the first row of its module, and whether its module begins there.
    module, begins = np.empty(total, np.int64), np.zeros(total + 1, np.bool_)
    first = np.cumsum(replicas) - replicas
    stage = 0
    for number in range(stages.shape[0]):
        begins[stage] = True
        for _ in range(stages[number]):
            module[stage] = number
            stage += 1
    ends, latest = np.zeros((total, replicas.max())), np.zeros(total)
    old, old_latest = ends.copy(), latest.copy()
    for slot in range(2 * (count + total) - 2):
        old[:], old_latest[:] = ends, latest
        for stage in range(total):
            ahead, back_at = slot - stage, slot - 2 * total + 1 + stage
            is_forward = ahead >= 0 and ahead % 2 == 0 and ahead // 2 < count
            if not is_forward and not (back_at >= 0 and back_at % 2 == 0 and back_at // 2 < count):
                continue
            own = module[stage]
            microbatch = ahead // 2 if is_forward else back_at // 2
            other = stage - 1 if is_forward else stage + 1
            has_other = 0 <= other < total
            enters = has_other and begins[stage if is_forward else other]
            border = own if is_forward else min(own + 1, stages.shape[0] - 1)
            waits = enters and meets[border]
            way = 0.0
            if enters:
                way = travel[border, microbatch] if is_forward else back[border, microbatch]
            end = 0.0
            for replica in range(replicas[own]):
                start = old[stage, replica]
                if has_other:
                    start = max(start, (old_latest[other] if waits else old[other, replica]) + way)
                row = first[own] + replica
                start += forward[row, microbatch] if is_forward else backward[row, microbatch]
                ends[stage, replica] = start
                end = max(end, start)
            latest[stage] = end
    longest: float = latest.max()
    return longest
