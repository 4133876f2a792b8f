"""1F1B search kernel: times of each microbatch on each stage -> a good order.

Times and orders are as in `orchdata.native.microbatches.pipeline`.
"""

from __future__ import annotations

import numpy as np

from orchdata.native.jit import kernel
from orchdata.native.microbatches.pipeline import Order, Times, fill_intervals, lower_bound, run_all, sizes_of


@kernel
def draw(state: Order, below: int) -> int:
    """Return a number below `below` < 2**31 from int64 (1,) in [1, 2**32), by xorshift32 (Marsaglia 2003)."""
    x = state[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x
    number: int = (x * below) >> 32
    return number


@kernel
def write_start(index: int, ascending: Order, num_stages: int, state: Order, out: Order) -> None:
    """Write start number `index`: 0 ascending, 1 descending, 2 pyramid, 3 valley, then reserved tails, then random.

    A reserved tail has the smallest first, the r next smallest last, and the others in between from the largest, for
    r = 1, 2, ... up to the number of later stages.
    """
    count = ascending.shape[0]
    tail = min(index - 3, count - 1)
    if index == 0:
        out[:] = ascending
    elif index == 1:
        out[:] = ascending[::-1]
    elif index < 4:
        for entry in range(count):
            position = entry >> 1 if entry & 1 == 0 else count - 1 - (entry >> 1)
            out[position] = ascending[entry if index == 2 else count - 1 - entry]
    elif tail < num_stages and index < 12:
        out[0] = ascending[0]
        out[1 : count - tail] = ascending[tail + 1 :][::-1]
        out[count - tail :] = ascending[1 : tail + 1][::-1]
    else:
        for entry in range(count - 1, 0, -1):
            other = draw(state, entry + 1)
            out[entry], out[other] = out[other], out[entry]


@kernel
def best_start(forward: Times, backward: Times, num_stages: int, num_starts: int, state: Order) -> Order:
    """Return the best of the given order, the one after DistTrain, and `num_starts` others; ties: the first."""
    count = forward.shape[0] // num_stages
    ends = np.empty(num_stages)
    ascending = np.argsort(sizes_of(forward, backward, count), kind="mergesort")
    best = np.arange(count)
    least = run_all(forward, backward, best, ends)
    trial = fill_intervals(forward, backward, ascending, num_stages)
    for index in range(num_starts + 1):
        if index > 0:
            write_start(index - 1, ascending, num_stages, state, trial)
        makespan = run_all(forward, backward, trial, ends)
        if makespan < least:
            least = makespan
            best[:] = trial
    return best


@kernel
def insert(order: Order, source: int, target: int) -> None:
    """Move the microbatch at position `source` to `target`; those in between move by one."""
    microbatch = order[source]
    step = 1 if source < target else -1
    for position in range(source, target, step):
        order[position] = order[position + step]
    order[target] = microbatch


@kernel
def search(
    forward: Times, backward: Times, num_stages: int, num_starts: int, num_steps: int, heat: float, state: Order
) -> tuple[Order, float, float]:
    """Return a good order: the best start, then threshold accepting (Dueck and Scheuer 1990) by swaps and insertions.

    A step is kept if it lengthens the schedule by at most a share of the best makespan; the share falls from `heat` to
    0 as a parabola. Unlike simulated annealing this needs no exponential, which differs in the last bit between
    machines.

    Args:
        num_starts: number of starts in addition to the given order and the one after DistTrain.
        num_steps: number of steps that follow; none once the lower bound is reached.
        heat: first share of the makespan by which a step may be worse.
        state: int64 (1,) in [1, 2**32), of the random numbers; updated.

    Returns:
        (order int64 (num_microbatches,), its makespan, lower bound).
    """
    count = forward.shape[0] // num_stages
    ends = np.empty(num_stages)
    bound = lower_bound(forward, backward, num_stages)
    order = best_start(forward, backward, num_stages, num_starts, state)
    best = order.copy()
    current = run_all(forward, backward, order, ends)
    least = current
    for step in range(num_steps if count > 1 else 0):
        if least <= bound:
            break
        one, other = draw(state, count), draw(state, count - 1)
        other += other >= one
        inserts = draw(state, 2) == 1
        if inserts:
            insert(order, one, other)
        else:
            order[one], order[other] = order[other], order[one]
        makespan = run_all(forward, backward, order, ends)
        left = 1 - step / num_steps
        if makespan <= current + least * heat * left * left:
            current = makespan
            if makespan < least:
                least = makespan
                best[:] = order
        elif inserts:
            insert(order, other, one)
        else:
            order[one], order[other] = order[other], order[one]
    return best, least, bound
