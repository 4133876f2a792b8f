"""Every balancer gives the same without compilation: kernels are plain Python, and nothing overflows or warns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, numpy as np
from orchdata.balancers import *
from orchdata.balancers.bins import candidate_packings
from benchmarks.distributions import DISTRIBUTIONS, omni_lengths, quadratic

def numbers(found):
    return [np.asarray(getattr(found, name)).tolist() for name in type(found).__dataclass_fields__ if name != "method"]

answer = []
for name, make in DISTRIBUTIONS.items():
    costs = make(np.random.default_rng(3), 48)
    owner = np.random.default_rng(4).integers(0, 6, 48)
    answer += map(numbers, (
        balance(costs, 5),
        balance(costs, 5, equal_count=True),
        balance_padded(costs, 5, PhaseCost(1.0, 0.001), multiple_of=8),
        balance_padded(costs, 5, PhaseCost(1.0), max_samples=12),
        balance_from(costs, owner, 6, ranks_per_node=2),
        balance_grid(costs, owner, 6, 2),
        balance_grouped(costs, owner, 6, 4),
        place_on_nodes(traffic_between(owner, owner[::-1], 6), 2),
        balance_teams(-(-costs[:, None] // [1, 2, 4]), 5),
        balance_teams(-(-costs[:, None] ** 2 // [1, 2, 4]), 6, tokens=costs, max_tokens=int(costs.max()) // 3 + 1),
    ))
lengths = omni_lengths(np.random.default_rng(6), 48)
costs = quadratic(lengths)
image = DISTRIBUTIONS["image phase"](np.random.default_rng(4), 48)
rank = balance_phases({"image": image, "llm": costs}, 4).rank
answer.append(rank.tolist())
phases = {"image": image, "audio": image[::-1], "llm": costs}
for effort in (0, 1, 30):
    answer.append(numbers(balance_phases(phases, 4, effort=effort, sizes=lengths, max_size=lengths.sum() // 3)))
    answer.append(numbers(balance_phases(phases, 4, effort=effort, equal_count=True)))
owner = np.arange(48) % 6
answer += [numbers(balance_from(phases, owner, 6)), numbers(balance_grid(phases, owner, 6, 3))]
table = np.stack(list(phases.values()), axis=1)
for ranks in (1, 4):
    answer.append(pack_bins(lengths[:7], int(lengths.max()), None, table[:7], num_ranks=ranks).tolist())
for ways in ([(slice(None), 4)], [(slice(0, 24), 2), (slice(24, None), 2)]):
    for one in candidate_packings(lengths[:, None], np.array([lengths.sum() // 6]), 3, table, ways, 18):
        answer += [one.bins.tolist(), one.rank.tolist(), one.estimate]
for cost in (PhaseCost(0.3, 0.001), PhaseCost(0.3, 0.001, windows=((64, 0.1), (1000, 0.01)))):
    answer.append(CostModel(llm=cost).sequence_costs("llm", lengths).tolist())
    answer.append(numbers(balance_padded(lengths, 5, cost)))
for in_step in (False, True):
    answer.append(
        split_microbatches(costs, rank, 4, sizes=lengths, max_size=7000, oversize="own", in_step=in_step)[0].tolist()
    )
pinned = np.where(np.arange(48) % 5 == 0, rank, -1)
answer.append(numbers(balance(costs, 4, pinned=pinned)))
answer.append(numbers(balance_phases(phases, 4, sizes=lengths, max_size=lengths.sum() // 3, pinned=pinned)))
answer.append(split_microbatches(costs, rank, 4, max_size=2 * max(costs), in_step=True, pinned=pinned)[0].tolist())
for stages, count in ((1, 3), (3, 2), (2, 5), (4, 7)):
    forward, backward = np.random.default_rng(stages).lognormal(0, 1, (2, stages, count))
    answer += [numbers(order_microbatches(forward, backward, seed=3)), simulate_1f1b(forward, backward)]
print(json.dumps(answer))
"""


@pytest.mark.slow
def test_the_same_without_numba() -> None:
    compiled, interpreted = (
        subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for disabled in ("0", "1")
    )
    assert json.loads(compiled) == json.loads(interpreted)
