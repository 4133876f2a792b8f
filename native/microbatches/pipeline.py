"""1F1B kernels: times of each microbatch on each stage -> makespan of an order, bound of all, a good order.

Times are flat, float64 (num_microbatches * num_stages,), with adjacent stages of a microbatch; an order is int64
(num_microbatches,). All rounding has a fixed order, by operations that IEEE 754 defines to the last bit: the result is
the same on every machine.

With p stages, give forward j of stage s the slot 2j + s and backward j the slot 2j + 2p - 1 - s. Within a stage the
slots then follow the 1F1B order, and an operation always waits for the last operation of its neighbour before the
slot. So the state is one number a stage, the end of its last operation, and a slot pairs each stage that runs a
backward with the next one, which runs a forward: both start at the later of their two ends. Where two modules with
replicas meet, an operation waits for all replicas of the neighbour, and for what travels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, kernel

Times = NDArray[np.float64]
Order = Ints


@kernel
def run_slots(forward: Times, backward: Times, order: Order, first: int, stop: int, ends: Times) -> None:
    """Run the slots first, ..., stop - 1 of the schedule, of 2 * (num_microbatches + num_stages) - 2. `ends`,
    (num_stages,), are the times at which each stage ends the slots before; updated.
    """
    count, stages = order.shape[0], ends.shape[0]
    for slot in range(first, stop):
        stage = slot & 1 ^ 1
        if stage == 1 and slot < 2 * count:
            ends[0] += forward[order[slot >> 1] * stages]
        # Filling or draining: at most one of a pair runs.
        paired = min(stages - 1, max(2 * stages - 1 - slot, slot - 2 * count))
        while stage < paired:
            up, down = ends[stage], ends[stage + 1]
            ahead = (slot - stage - 1) >> 1
            backward_index = (slot - 2 * stages + 1 + stage) >> 1
            if 0 <= ahead < count:
                ends[stage + 1] = (up if up > down else down) + forward[order[ahead] * stages + stage + 1]
            elif 0 <= backward_index < count:
                ends[stage] = (up if up > down else down) + backward[order[backward_index] * stages + stage]
            stage += 2
        ahead = (slot - stage - 1) >> 1
        backward_index = (slot - 2 * stages + 1 + stage) >> 1
        while stage < stages - 1:
            # Unsigned, as numba tests signed indices for negative values; and no max(), which tests for NaN.
            here, there = np.uint64(stage), np.uint64(stage + 1)
            up, down = ends[here], ends[there]
            start = up if up > down else down
            ends[here] = start + backward[np.uint64(order[np.uint64(backward_index)] * stages + stage)]
            ends[there] = start + forward[np.uint64(order[np.uint64(ahead)] * stages + stage + 1)]
            stage, ahead, backward_index = stage + 2, ahead - 1, backward_index + 1
        backward_index = (slot - stages) >> 1
        if stage < stages and 0 <= backward_index < count:
            ends[stage] += backward[order[backward_index] * stages + stage]


@kernel
def run_all(forward: Times, backward: Times, order: Order, ends: Times) -> float:
    """Return the makespan of an order; `ends` float64 (num_stages,) is overwritten."""
    ends[:] = 0.0
    run_slots(forward, backward, order, 0, 2 * (order.shape[0] + ends.shape[0]) - 2, ends)
    # The last operation is the first stage's backward.
    makespan: float = ends[0]
    return makespan


@kernel
def least_pair(first: Times, last: Times) -> float:
    """Return the least first[a] + last[z] over a != z; a == z if there is only one microbatch."""
    least: float = first[0] + last[0] if first.shape[0] == 1 else np.inf
    a, z = np.argmin(first), np.argmin(last)
    for i in range(first.shape[0]):
        if i != z:
            least = min(least, first[i] + last[z])
        if i != a:
            least = min(least, first[a] + last[i])
    return least


@kernel
def largest_others(times: Times, count: int) -> Times:
    """Return for each microbatch the sum of the `count` largest times of the others, float64 (num_microbatches,)."""
    ascending = np.sort(times)
    last = ascending.shape[0] - 1
    count = min(count, last)
    others = 0.0
    for entry in range(count):
        others += ascending[last - entry]
    sums = np.full(times.shape[0], others)
    for microbatch in range(times.shape[0]):
        # Replace it by the next largest.
        if times[microbatch] > ascending[last - count]:
            sums[microbatch] = 0.0
            skipped = False
            for entry in range(count + 1):
                if not skipped and ascending[last - entry] == times[microbatch]:
                    skipped = True
                else:
                    sums[microbatch] += ascending[last - entry]
    return sums


@kernel
def lower_bound(forward: Times, backward: Times, num_stages: int) -> float:
    """Return a lower bound of the makespan of any order. A stage works for the sum of its times. Before that it waits
    until some microbatch a has reached it, and after that until another, z, has returned from it to the first stage. In
    between, a is on later stages, while the stage has at most as many forwards to do as its warm-up; the same holds for
    z and backwards, and for any microbatch with both. The first two waits add up if the first backward comes before the
    last forward.
    """
    count = forward.shape[0] // num_stages
    down, up, later = np.zeros(count), np.zeros(count), np.zeros(count)
    for microbatch in range(count):
        for stage in range(num_stages):
            later[microbatch] += forward[microbatch * num_stages + stage] + backward[microbatch * num_stages + stage]
    bound: float = np.max(later)
    for stage in range(num_stages):
        here, back = forward[stage::num_stages].copy(), backward[stage::num_stages].copy()
        warm_up = num_stages - 1 - stage
        forwards, backwards = largest_others(here, warm_up), largest_others(back, warm_up)
        work, longest = 0.0, 0.0
        first, last = down.copy(), up.copy()
        for microbatch in range(count):
            work += here[microbatch] + back[microbatch]
            later[microbatch] -= here[microbatch] + back[microbatch]
            first[microbatch] += max(0.0, later[microbatch] - forwards[microbatch])
            last[microbatch] += max(0.0, later[microbatch] - backwards[microbatch])
            longest = max(longest, later[microbatch] - forwards[microbatch] - backwards[microbatch])
        waits = max(least_pair(first, up), least_pair(down, last), least_pair(down, up) + longest)
        if count > warm_up + 1:
            waits = max(waits, least_pair(first, last))
        bound = max(bound, work + waits)
        down += here
        up += back
    return bound


@kernel
def sizes_of(forward: Times, backward: Times, count: int) -> Times:
    """Return the time of each microbatch over all stages, float64 (num_microbatches,), added up in a fixed order."""
    stages = forward.shape[0] // count
    sizes = np.zeros(count)
    for microbatch in range(count):
        for entry in range(microbatch * stages, (microbatch + 1) * stages):
            sizes[microbatch] += forward[entry] + backward[entry]
    return sizes


@kernel
def closest(candidates: Order, count: int, forward: Times, num_stages: int, interval: float) -> int:
    """Return which of the first `count` candidates has a forward on stage 0 closest to `interval`; ties: the first."""
    best, least = 0, np.inf
    for index in range(count):
        distance = abs(forward[candidates[index] * num_stages] - interval)
        if distance < least:
            best, least = index, distance
    return best


@kernel
def fill_intervals(forward: Times, backward: Times, ascending: Order, num_stages: int) -> Order:
    """Return an order: the smallest first, num_stages - 1 of the next smallest last, others by best fit (DistTrain)."""
    count = ascending.shape[0]
    tail = min(num_stages - 1, count - 1)
    order = ascending.copy()
    # The reserved microbatches drain from the largest to the smallest.
    order[count - tail :] = ascending[1 : tail + 1][::-1]
    left = ascending[tail + 1 :].copy()
    ends = np.zeros(num_stages)
    smallest = ascending[0] * num_stages
    room, done = 0.0, 0
    for entry in range(smallest + 1, smallest + num_stages):
        room += forward[entry] + backward[entry]
    for position in range(1, count - tail):
        remaining = count - tail - position
        free = 0.0
        if position < num_stages:
            # Warm-up: equal shares of the first microbatch's time on the later stages.
            interval = room / (num_stages - position)
        else:
            run_slots(forward, backward, order, done, 2 * position, ends)
            free = ends[0]
            done = 2 * position + 1
            # In this slot stage 1 returns the next backward, for any forward that stage 0 runs in it.
            run_slots(forward, backward, order, done - 1, done, ends)
            interval = ends[1] - free if num_stages > 1 else 0.0
        index = closest(left, remaining, forward, num_stages, interval)
        order[position] = left[index]
        room -= forward[left[index] * num_stages]
        ends[0] = free + forward[left[index] * num_stages]
        left[index : remaining - 1] = left[index + 1 : remaining].copy()
    return order


@kernel
def slowest(first: Times, work: Times, num_stages: int) -> float:
    """Return the longest makespan of several pipelines in the order after DistTrain, with float64 (num_pipelines,
    num_microbatches) forwards on stage 0 and on each other stage; backward takes twice as long.
    """
    num_pipelines, count = work.shape
    longest = 0.0
    for number in range(num_pipelines):
        forward = np.repeat(work[number], num_stages)
        for microbatch in range(count):
            forward[microbatch * num_stages] = first[number, microbatch]
        backward = 2.0 * forward
        ascending = np.argsort(sizes_of(forward, backward, count), kind="mergesort")
        order = fill_intervals(forward, backward, ascending, num_stages)
        longest = max(longest, run_all(forward, backward, order, np.zeros(num_stages)))
    return longest


@kernel
def run_modules(
    forward: Times, backward: Times, travel: Times, back: Times, stages: Ints, replicas: Ints, meets: bool
) -> float:
    """Return the end of the last backward. Times are of a stage of each replica, (sum of replicas, num_microbatches),
    module after module; `travel` and `back`, (num_modules, num_microbatches), until features are at a module after the
    one before has made them, and their gradients are back. `meets`: replicas wait for all of a module next to theirs;
    else modules have as many replicas each.
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
    """Write start number `index`: 0 ascending, 1 descending, 2 pyramid, 3 valley, then reserved tails (the smallest
    first, the r next smallest last, others from the largest, r = 1, 2, ... up to the number of later stages), then
    random.
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
    """Return (a good order, its makespan, lower bound): the best of `num_starts` and two more, then threshold accepting
    (Dueck and Scheuer 1990) by swaps and insertions. A step is kept if it lengthens the schedule by at most a share of
    the best makespan, which falls from `heat` to 0 as a parabola. Unlike simulated annealing this needs no exponential,
    which differs in the last bit between machines.
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
