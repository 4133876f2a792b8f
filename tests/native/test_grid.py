"""The kernels that move little in a grid, against plain-Python twins."""

from __future__ import annotations

import numpy as np
from hypothesis import settings

from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps
from orchdata.native.move_phases import move_in_grid

# The first call of a kernel compiles or loads it.
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")


def test_ranks_within_targets_and_caps_keep_what_they_hold_and_others_give_up_their_excess() -> None:
    random = np.random.default_rng(3)
    costs = random.integers(1, 100, (512, 2)).astype(np.int64)
    sizes, home = np.ascontiguousarray(costs[:, 1:]), (np.arange(512) // 16).astype(np.int32)
    loads = phase_loads(costs, home, 32)
    wide = loads.max(axis=0)
    stays = move_in_grid(costs, sizes, wide[1:], home, 32, 8, 1, wide, 10**6)
    assert stays.tolist() == home.tolist()
    targets, caps = loads.sum(axis=0) * 103 // 3200, loads[:, 1:].sum(axis=0) * 105 // 3200
    near = move_in_grid(costs, sizes, caps, home, 32, 8, 1, targets, 10**6)
    assert above_caps(sizes, caps, home, 32) > 0 == above_caps(sizes, caps, near, 32)
    assert (phase_loads(costs, near, 32).max(axis=0) <= targets).all()
    assert 0 < (near != home).mean() < 0.4  # Dealt again, 31 of 32 would move.
