"""Swap kernels: ranks and micro-steps of samples -> the same with lower peaks, by swaps and moves between all cells.

A cell is one rank's microbatch. Its load in each phase, and its sizes, are sums over its samples. The peaks of a
micro-step are its largest loads, one for each phase; their sum over phases and micro-steps is what ranks wait for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

TOP = 3  # The largest loads of a micro-step that are known: one more than a swap changes.
KICKS = 3  # Random swaps before the search begins again.


@kernel
def find_top(loads: NDArray[np.int64], m: int, top: NDArray[np.int64]) -> None:
    """Write the ranks with the largest loads in micro-step `m` into `top[m]`, for each phase; -1 for missing ones."""
    num_ranks, num_phases = loads.shape[1], loads.shape[2]
    for p in range(num_phases):
        for t in range(TOP):
            best = np.int64(-1)
            for r in range(num_ranks):
                used = False
                for s in range(t):
                    used |= top[m, p, s] == r
                if not used and (best < 0 or loads[m, r, p] > loads[m, best, p]):
                    best = np.int64(r)
            top[m, p, t] = best


@kernel
def peak_without(loads: NDArray[np.int64], top: NDArray[np.int64], m: int, p: int, first: int, second: int) -> int:
    """Return the largest load of a phase in a micro-step over all ranks but two; 0 if there are no others."""
    for t in range(TOP):
        r = top[m, p, t]
        if r >= 0 and r != first and r != second:
            return loads[m, r, p]
    return np.int64(0)


@kernel
def change_of(
    costs: NDArray[np.int64],
    loads: NDArray[np.int64],
    top: NDArray[np.int64],
    m: int,
    r: int,
    given: int,
    other_m: int,
    other_r: int,
    taken: int,
) -> int:
    """Return by how much peaks rise if cell (m, r) gives a sample and takes another one, -1 for none, in return."""
    total = np.int64(0)
    for p in range(costs.shape[1]):
        change = costs[given, p] - (costs[taken, p] if taken >= 0 else 0)
        here, there = loads[m, r, p] - change, loads[other_m, other_r, p] + change
        if m == other_m:
            total += max(peak_without(loads, top, m, p, r, other_r), max(here, there)) - loads[m, top[m, p, 0], p]
        else:
            total += max(peak_without(loads, top, m, p, r, -1), here) - loads[m, top[m, p, 0], p]
            total += max(peak_without(loads, top, other_m, p, other_r, -1), there)
            total -= loads[other_m, top[other_m, p, 0], p]
    return total


@kernel
def keeps_caps(
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    filled: NDArray[np.int64],
    m: int,
    r: int,
    given: int,
    other_m: int,
    other_r: int,
    taken: int,
) -> bool:
    """Return whether both cells are within the caps after that exchange, or no further above one than before."""
    for k in range(caps.shape[0]):
        change = sizes[given, k] - (sizes[taken, k] if taken >= 0 else 0)
        if change < 0 and filled[m, r, k] - change > caps[k]:
            return False
        if change > 0 and filled[other_m, other_r, k] + change > caps[k]:
            return False
    return True


@kernel
def exchange(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    loads: NDArray[np.int64],
    filled: NDArray[np.int64],
    top: NDArray[np.int64],
    given: int,
    taken: int,
    other_m: int,
    other_r: int,
) -> None:
    """Move the sample `given` to cell (other_m, other_r), and the sample `taken` of it, -1 for none, to its place."""
    m, r = np.int64(microbatch[given]), np.int64(rank[given])
    for p in range(costs.shape[1]):
        change = costs[given, p] - (costs[taken, p] if taken >= 0 else 0)
        loads[m, r, p] -= change
        loads[other_m, other_r, p] += change
    for k in range(sizes.shape[1]):
        change = sizes[given, k] - (sizes[taken, k] if taken >= 0 else 0)
        filled[m, r, k] -= change
        filled[other_m, other_r, k] += change
    if taken >= 0:
        rank[taken], microbatch[taken] = r, m
    rank[given], microbatch[given] = other_r, other_m
    find_top(loads, m, top)
    if other_m != m:
        find_top(loads, other_m, top)


@kernel
def best_exchange(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    group: NDArray[np.int32],
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    loads: NDArray[np.int64],
    filled: NDArray[np.int64],
    top: NDArray[np.int64],
    may_move: bool,
    given: int,
    p: int,
) -> tuple[int, int, int, int, int]:
    """Return the exchange of a sample that lowers peaks most, if it lowers the cell's load in phase `p`.

    Returns:
        (by how much peaks rise, below 0 if there is such an exchange; the sample taken or -1; the micro-step and rank
        that get the sample; the exchanges looked at).
    """
    m, r = np.int64(microbatch[given]), np.int64(rank[given])
    best, best_taken, best_m, best_r, pairs = np.int64(0), np.int64(-1), np.int64(-1), np.int64(-1), np.int64(0)
    for taken in range(costs.shape[0]):
        other_m, other_r = np.int64(microbatch[taken]), np.int64(rank[taken])
        if group[other_r] != group[r] or costs[taken, p] >= costs[given, p] or (other_m == m and other_r == r):
            continue
        pairs += 1
        change = change_of(costs, loads, top, m, r, given, other_m, other_r, taken)
        if change < best and keeps_caps(sizes, caps, filled, m, r, given, other_m, other_r, taken):
            best, best_taken, best_m, best_r = change, np.int64(taken), other_m, other_r
    for cell in range(loads.shape[0] * loads.shape[1] if may_move else 0):
        other_m, other_r = np.int64(cell // loads.shape[1]), np.int64(cell % loads.shape[1])
        if group[other_r] != group[r] or (other_m == m and other_r == r):
            continue
        pairs += 1
        change = change_of(costs, loads, top, m, r, given, other_m, other_r, -1)
        if change < best and keeps_caps(sizes, caps, filled, m, r, given, other_m, other_r, -1):
            best, best_taken, best_m, best_r = change, np.int64(-1), other_m, other_r
    return best, best_taken, best_m, best_r, pairs


@kernel
def descend(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    group: NDArray[np.int32],
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    loads: NDArray[np.int64],
    filled: NDArray[np.int64],
    top: NDArray[np.int64],
    may_move: bool,
    pairs: int,
) -> int:
    """Make the best exchange of each sample of a peak, while one lowers the sum of peaks. Return the pairs left."""
    improved = True
    while improved and pairs > 0:
        improved = False
        for m in range(loads.shape[0]):
            for p in range(loads.shape[2]):
                r = top[m, p, 0]
                for given in range(costs.shape[0]):
                    if microbatch[given] != m or rank[given] != r or costs[given, p] == 0 or pairs <= 0:
                        continue
                    change, taken, other_m, other_r, looked = best_exchange(
                        costs, sizes, caps, group, rank, microbatch, loads, filled, top, may_move, given, p
                    )
                    pairs -= looked
                    if change < 0:
                        exchange(costs, sizes, rank, microbatch, loads, filled, top, given, taken, other_m, other_r)
                        improved = True
    return pairs


@kernel
def add_up(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    loads: NDArray[np.int64],
    filled: NDArray[np.int64],
    top: NDArray[np.int64],
) -> None:
    """Add the loads and sizes of samples to those of all cells, and write the ranks with the largest loads."""
    for sample in range(costs.shape[0]):
        m, r = microbatch[sample], rank[sample]
        for p in range(costs.shape[1]):
            loads[m, r, p] += costs[sample, p]
        for k in range(sizes.shape[1]):
            filled[m, r, k] += sizes[sample, k]
    for m in range(loads.shape[0]):
        find_top(loads, m, top)


@kernel
def lower_peaks(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    group: NDArray[np.int32],
    num_micro_steps: int,
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    may_move: bool,
    pairs: int,
    pinned: NDArray[np.int32] | None = None,
) -> None:
    """Lower the sum of peaks, and write the result into `rank` and `microbatch`. It never rises.

    Where no exchange helps, some samples are swapped at random, from a fixed seed, and the search begins again: it
    returns to the best so far if that does not lead to less. The limit is work, not time: the result is the same on
    every machine.

    Args:
        costs: int64 (num_samples, num_phases).
        sizes, caps: int64 (num_samples, num_caps) and (num_caps,), of a cell.
        group: int32 (num_ranks,); samples stay in the group of their rank.
        rank, microbatch: int32 (num_samples,), changed.
        may_move: whether a cell may give a sample without taking one.
        pairs: exchanges to look at.
        pinned: int32 (num_samples,), the rank of a sample that stays in its cell, as in `rank`, or -1.
    """
    held = np.zeros((num_micro_steps, group.shape[0], costs.shape[1]), np.int64)
    held_sizes = np.zeros((num_micro_steps, group.shape[0], caps.shape[0]), np.int64)
    if pinned is None:
        search_swaps(costs, sizes, caps, group, rank, microbatch, may_move, pairs, held, held_sizes)
    else:
        fixed, free = np.flatnonzero(pinned >= 0), np.flatnonzero(pinned < 0)
        top = np.empty((num_micro_steps, costs.shape[1], TOP), np.int64)
        add_up(costs[fixed], sizes[fixed], rank[fixed], microbatch[fixed], held, held_sizes, top)
        own, cut = rank[free], microbatch[free]
        search_swaps(costs[free], sizes[free], caps, group, own, cut, may_move, pairs, held, held_sizes)
        rank[free], microbatch[free] = own, cut


@kernel
def search_swaps(
    costs: NDArray[np.int64],
    sizes: NDArray[np.int64],
    caps: NDArray[np.int64],
    group: NDArray[np.int32],
    rank: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    may_move: bool,
    pairs: int,
    held: NDArray[np.int64],
    held_sizes: NDArray[np.int64],
) -> None:
    """`lower_peaks` of samples that may move, next to what cells hold besides.

    Args:
        held, held_sizes: int64 (num_micro_steps, num_ranks, num_phases), and num_caps in place of phases.
    """
    num_samples = costs.shape[0]
    loads, filled = held.copy(), held_sizes.copy()
    top = np.empty((held.shape[0], costs.shape[1], TOP), np.int64)
    add_up(costs, sizes, rank, microbatch, loads, filled, top)
    best_rank, best_microbatch, best = rank.copy(), microbatch.copy(), sum_of_tops(loads, top)
    state, has_held = np.uint64(88172645463325252), held.sum() > 0  # of xorshift
    while pairs > 0 and num_samples > 1 - has_held:
        pairs = descend(costs, sizes, caps, group, rank, microbatch, loads, filled, top, may_move, pairs)
        found = sum_of_tops(loads, top)
        if found <= best:
            best = found
            best_rank[:], best_microbatch[:] = rank, microbatch
        else:
            rank[:], microbatch[:] = best_rank, best_microbatch
            loads[:], filled[:] = held, held_sizes
            add_up(costs, sizes, rank, microbatch, loads, filled, top)
        pairs -= num_samples
        for _ in range(KICKS):
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            given = np.int64(state % np.uint64(num_samples))
            taken = np.int64((state >> np.uint64(32)) % np.uint64(num_samples))
            m, r = np.int64(microbatch[given]), np.int64(rank[given])
            other_m, other_r = np.int64(microbatch[taken]), np.int64(rank[taken])
            if has_held and may_move and (state >> np.uint64(20)) & np.uint64(1):  # Few samples have few swaps.
                cell = np.int64((state >> np.uint64(32)) % np.uint64(loads.shape[0] * loads.shape[1]))
                taken, other_m, other_r = np.int64(-1), cell // loads.shape[1], cell % loads.shape[1]
            same = m == other_m and r == other_r
            if (
                not same
                and group[r] == group[other_r]
                and keeps_caps(sizes, caps, filled, m, r, given, other_m, other_r, taken)
            ):
                exchange(costs, sizes, rank, microbatch, loads, filled, top, given, taken, other_m, other_r)
    rank[:], microbatch[:] = best_rank, best_microbatch


@kernel
def sum_of_tops(loads: NDArray[np.int64], top: NDArray[np.int64]) -> int:
    """Return the sum over micro-steps and phases of the largest load."""
    total = np.int64(0)
    for m in range(loads.shape[0]):
        for p in range(loads.shape[2]):
            total += loads[m, top[m, p, 0], p]
    return total
