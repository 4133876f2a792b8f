"""`python -m benchmarks.balance.first_call RANKS SAMPLES_PER_RANK`: what the first `balance` of a process takes."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from benchmarks.distributions import omni_lengths
from orchdata.balancers import balance


def main(num_ranks: int, samples_per_rank: int) -> dict[str, float]:
    """Seconds of the first call, imports left out, and of the second."""
    costs = omni_lengths(np.random.default_rng(0), num_ranks * samples_per_rank)
    seconds = []
    for _ in range(2):
        started, cpu_started = time.perf_counter(), time.process_time()
        balance(costs, num_ranks)
        seconds.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return {"first": seconds[0][0], "first_cpu": seconds[0][1], "second": seconds[1][0]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
