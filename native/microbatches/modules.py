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
    meets: bool,
) -> float:
    """Return the end of the last backward.

    Args:
        forward, backward: float64 (sum of replicas, num_microbatches), of a stage of each replica, module after module;
            stages of a module take equal times.
        travel, back: float64 (num_modules, num_microbatches), until features are at a module after the one before has
            made them, and until their gradients are back.
        stages, replicas: int64 (num_modules,).
        meets: whether replicas wait for all of a module next to theirs; else modules have as many replicas each.
    """
    count, total = forward.shape[1], stages.sum()
    module, first = np.repeat(np.arange(len(stages)), stages), np.cumsum(replicas) - replicas
    ends, latest = np.zeros((total, replicas.max())), np.zeros(total)
    old, old_latest = ends.copy(), latest.copy()
    for slot in range(2 * (count + total) - 2):
        old[:], old_latest[:] = ends, latest
        for stage in range(total):
            ahead, back_at = slot - stage, slot - 2 * total + 1 + stage
            is_forward = ahead >= 0 and ahead % 2 == 0 and ahead // 2 < count
            if not is_forward and not (back_at >= 0 and back_at % 2 == 0 and back_at // 2 < count):
                continue
            microbatch = ahead // 2 if is_forward else back_at // 2
            own, other = module[stage], stage - 1 if is_forward else stage + 1
            has_other, way = 0 <= other < total, 0.0
            leaves = has_other and module[other] != own
            if leaves:
                border = max(own, module[other])
                way = travel[border, microbatch] if is_forward else back[border, microbatch]
            end = 0.0
            for replica in range(replicas[own]):
                start = old[stage, replica]
                if has_other:
                    start = max(start, (old_latest[other] if leaves and meets else old[other, replica]) + way)
                row = first[own] + replica
                start += forward[row, microbatch] if is_forward else backward[row, microbatch]
                ends[stage, replica] = start
                end = max(end, start)
            latest[stage] = end
    longest: float = latest.max()
    return longest
