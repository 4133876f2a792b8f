"""Microbatch kernels: rank of each sample -> microbatch of each, the same number on all ranks, within the caps.

Samples are grouped by rank, each rank's from the most costly. The entry of a sample is its index in that grouping.

Swap kernels: ranks and micro-steps of samples -> the same with lower peaks, by swaps and moves between all cells.

A cell is one rank's microbatch. Its load in each phase, and its sizes, are sums over its samples. The peaks of a
micro-step are its largest loads, one for each phase; their sum over phases and micro-steps is what ranks wait for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, Ints32, kernel
from orchdata.native.microbatches.micro_steps import bins_needed, fits, hold, level, pack_rank, rename
from orchdata.native.sorting import descending_order

# First targets of a micro-step tried, in eighths of the mean. The last leaves micro-steps empty where caps allow it.
TARGETS = (8, 3, 0)


@kernel
def cell_sums(costs: Ints, rank: Ints32, microbatch: Ints32, num_ranks: int, num_bins: int) -> Ints:
    """Return the cost of each rank's microbatches, int64 (num_ranks, num_bins)."""
    cells = np.zeros((num_ranks, num_bins), np.int64)
    for sample in range(costs.shape[0]):
        cells[rank[sample], microbatch[sample]] += costs[sample]
    return cells


@kernel
def group_by_rank(descending: Ints32, rank: Ints32, num_ranks: int) -> tuple[Ints, Ints, Ints]:
    """Group samples by rank, in their order; those with rank -1 are left out. Return (offsets (num_ranks + 1,) of the
    entries of each rank; the sample of each entry; the entries in the order of `descending`).
    """
    offsets = np.zeros(num_ranks + 1, np.int64)
    for owner in rank:
        if owner >= 0:
            offsets[owner + 1] += 1
    for r in range(num_ranks):
        offsets[r + 1] += offsets[r]
    samples = np.empty(offsets[num_ranks], np.int64)
    entries = np.empty(offsets[num_ranks], np.int64)
    cursor = offsets[:num_ranks].copy()
    next_entry = 0
    for sample in descending:
        owner = rank[sample]
        if owner >= 0:
            samples[cursor[owner]] = sample
            entries[next_entry] = cursor[owner]
            cursor[owner] += 1
            next_entry += 1
    return offsets, samples, entries


@kernel
def held_by(held: Ints, rank: int) -> Ints:
    """Return what the microbatches of one rank hold; empty if nothing is held."""
    if len(held) == 0:
        return np.empty((0, 0), np.int64)
    return held[rank]


@kernel
def held_peaks(held: Ints, num_bins: int) -> Ints:
    """Return the largest cost that a rank holds in each micro-step, int64 (num_bins,)."""
    peaks = np.zeros(num_bins, np.int64)
    if len(held) > 0:
        for r in range(held.shape[0]):
            for b in range(held.shape[1]):
                peaks[b] = max(peaks[b], held[r, b, 0])
    return peaks


@kernel
def rename_all(
    costs: Ints, samples: Ints, offsets: Ints, num_bins: int, bins: Ints32, by_cost: bool, held: Ints
) -> None:
    """Number the microbatches of each rank, as `rename` does, in place. Those with pinned samples keep their number;
    others take the free numbers in turn, or by cost: those first of which pinned samples of other ranks cost most.
    """
    if len(held) > 0:
        turn = np.arange(num_bins).astype(np.int32)
        if by_cost:
            turn = descending_order(held_peaks(held, num_bins))
        for r in range(offsets.shape[0] - 1):
            is_free = np.ones(num_bins, np.bool_)
            is_free[: held.shape[1]] = held[r, :, 1] == 0
            start, end = offsets[r], offsets[r + 1]
            own = start + np.flatnonzero(is_free[bins[start:end]])
            named = bins[own]
            rename(costs[own], samples[own], num_bins, named, by_cost)
            bins[own] = turn[is_free[turn]][named]
        return
    for r in range(offsets.shape[0] - 1):
        start, end = offsets[r], offsets[r + 1]
        rename(costs[start:end], samples[start:end], num_bins, bins[start:end], by_cost)


@kernel
def pack_ranks(
    costs: Ints, sizes: Ints, offsets: Ints, caps: Ints, num_microbatches: int, bins: Ints32, held: Ints
) -> int:
    """Pack all ranks' samples into microbatches, level and number them; write `bins`. Return their number; if it is
    above a given `num_microbatches`, `bins` is undefined.
    """
    num_ranks = offsets.shape[0] - 1
    count = np.int64(max(1, num_microbatches))
    if len(held) > 0:
        count = max(count, held.shape[1])
    if num_microbatches == 0:
        for r in range(num_ranks):
            if offsets[r] < offsets[r + 1]:
                count = max(count, bins_needed(sizes[offsets[r] : offsets[r + 1]], caps))
    packed_into = np.zeros(num_ranks, np.int64)
    # A rank that fails with `count` may pack with more; one that packed still can, so none is visited twice.
    for r in range(num_ranks):
        start, end = offsets[r], offsets[r + 1]
        if start == end:
            continue
        while not pack_rank(costs[start:end], sizes[start:end], caps, count, bins[start:end], held_by(held, r)):
            count += 1
        packed_into[r] = count
    if count == 1 or 0 < num_microbatches < count:
        return count
    for r in range(num_ranks):
        start, end = offsets[r], offsets[r + 1]
        if start == end:
            continue
        # Ranks packed before the count was raised have more room now; if a new search fails, their packing stays.
        if packed_into[r] < count:
            again = np.empty(end - start, np.int32)
            if pack_rank(costs[start:end], sizes[start:end], caps, count, again, held_by(held, r)):
                bins[start:end] = again
        level(costs[start:end], sizes[start:end], caps, count, bins[start:end], held_by(held, r))
    return count


@kernel
def deal(
    costs: Ints,
    sizes: Ints,
    owner: Ints32,
    entries: Ints,
    caps: Ints,
    targets: Ints,
    stuck: NDArray[np.bool_],
    bins: Ints32,
    held: Ints,
) -> None:
    """Put each of `entries`, from the most costly, into the microbatch of its rank with most room below the target of
    its micro-step. A sample that exceeds it raises the target for all ranks: later, smaller samples use the room.
    `stuck` ranks are left out, and set where a sample fits nowhere.
    """
    num_ranks, num_bins = stuck.shape[0], targets.shape[0]
    work = np.zeros((num_ranks, num_bins), np.int64)
    counts = np.zeros((num_ranks, num_bins), np.int32)
    loads = np.zeros((num_ranks, num_bins, caps.shape[0]), np.int64)
    for r in range(num_ranks):
        hold(held_by(held, r), work[r], counts[r], loads[r])
    for entry in entries:
        r = owner[entry]
        if stuck[r]:
            continue
        chosen = -1
        most = np.int64(0)
        for b in range(num_bins):
            room = targets[b] - work[r, b]
            if (chosen < 0 or room > most) and fits(loads[r, b], sizes[entry], caps, counts[r, b] == 0):
                chosen, most = b, room
        if chosen < 0:
            stuck[r] = True
            continue
        bins[entry] = chosen
        work[r, chosen] += costs[entry]
        counts[r, chosen] += 1
        for k in range(caps.shape[0]):
            loads[r, chosen, k] += sizes[entry, k]
        targets[chosen] = max(targets[chosen], work[r, chosen])


@kernel
def step_peaks(costs: Ints, offsets: Ints, included: NDArray[np.bool_], bins: Ints32, peaks: Ints, held: Ints) -> int:
    """Raise `peaks` (num_bins,) to the largest cost of an included rank in each micro-step. Return their sum."""
    work = np.empty(peaks.shape[0], np.int64)
    for r in range(offsets.shape[0] - 1):
        if included[r]:
            work[:] = 0
            if len(held) > 0:
                work[: held.shape[1]] = held[r, :, 0]
            for entry in range(offsets[r], offsets[r + 1]):
                work[bins[entry]] += costs[entry]
            for b in range(peaks.shape[0]):
                peaks[b] = max(peaks[b], work[b])
    return int(peaks.sum())


@kernel
def lower_peaks(
    costs: Ints,
    sizes: Ints,
    offsets: Ints,
    entries: Ints,
    caps: Ints,
    num_bins: int,
    fill_all: bool,
    bins: Ints32,
    held: Ints,
) -> None:
    """Lower the sum over micro-steps of the largest cost of a rank, in place; it never rises. Large samples force a
    high peak in a few micro-steps. Ranks without large samples should do more of their work in those, so microbatches
    of equal cost are not the goal. Deals from several first targets are tried; a rank that exceeds the caps that way
    keeps its microbatches. `fill_all`: use all microbatches, although fewer would do.
    """
    num_ranks = offsets.shape[0] - 1
    owner = np.empty(costs.shape[0], np.int32)
    mean = np.int64(0)
    for r in range(num_ranks):
        owner[offsets[r] : offsets[r + 1]] = r
        total = costs[offsets[r] : offsets[r + 1]].sum()
        if len(held) > 0:
            total += held[r, :, 0].sum()
        mean = max(mean, total // num_bins)
    everyone = np.ones(num_ranks, np.bool_)
    stuck = np.zeros(num_ranks, np.bool_)
    given = bins.copy()
    trial = np.empty_like(bins)
    lowest = step_peaks(costs, offsets, everyone, bins, np.zeros(num_bins, np.int64), held)
    for trial_number in range(len(TARGETS) - 1 if fill_all else len(TARGETS)):
        targets = np.maximum(mean // 8 * TARGETS[trial_number], held_peaks(held, num_bins))
        step_peaks(costs, offsets, stuck, given, targets, held)
        deal(costs, sizes, owner, entries, caps, targets, stuck, trial, held)
        for r in range(num_ranks):
            if stuck[r]:
                trial[offsets[r] : offsets[r + 1]] = given[offsets[r] : offsets[r + 1]]
        total = step_peaks(costs, offsets, everyone, trial, np.zeros(num_bins, np.int64), held)
        if total < lowest:
            lowest = total
            bins[:] = trial


@kernel
def split(
    costs: Ints,
    rank: Ints32,
    num_ranks: int,
    sizes: Ints,
    caps: Ints,
    num_microbatches: int,
    in_step: bool,
    held: Ints,
) -> tuple[Ints32, int]:
    """Split each rank's samples into microbatches: (microbatch, -1 where rank is -1; their number). 0 as
    `num_microbatches` means the fewest that fit; if it is too small, the number needed comes with an empty array.
    `in_step`: lower the sum over microbatches of the largest cost of a rank, and number by cost. `held`, (num_ranks,
    microbatches, 2 + num_caps): cost, number and sizes of pinned samples, which have rank -1 here; all 0 without any.
    """
    offsets, samples, entries = group_by_rank(descending_order(costs), rank, num_ranks)
    num_places, num_caps = samples.shape[0], caps.shape[0]
    costs_here = np.empty(num_places, np.int64)
    sizes_here = np.empty((num_places, num_caps), np.int64)
    for entry in range(num_places):
        costs_here[entry] = costs[samples[entry]]
        for k in range(num_caps):
            sizes_here[entry, k] = sizes[samples[entry], k]
    bins = np.zeros(num_places, np.int32)
    # More microbatches than samples of a rank would only take memory.
    usable = min(num_microbatches, max(1, np.diff(offsets).max()))
    if len(held) > 0:
        usable = min(num_microbatches, usable + held.shape[1])
    count = pack_ranks(costs_here, sizes_here, offsets, caps, usable, bins, held)
    if 0 < num_microbatches < count:
        return np.empty(0, np.int32), count
    if count > 1:
        rename_all(costs_here, samples, offsets, count, bins, in_step, held)
        if in_step:
            lower_peaks(costs_here, sizes_here, offsets, entries, caps, count, num_microbatches > 0, bins, held)
            # Never worse: the k-th most costly microbatch of a rank is within the k-th largest of the peaks.
            if len(held) == 0:
                rename_all(costs_here, samples, offsets, count, bins, True, held)
    microbatch = np.full(rank.shape[0], np.int32(-1))
    for entry in range(num_places):
        microbatch[samples[entry]] = bins[entry]
    return microbatch, max(count, num_microbatches)


TOP = 3  # The largest loads of a micro-step that are known: one more than a swap changes.
KICKS = 3  # Random swaps before the search begins again.


@kernel
def find_top(loads: Ints, m: int, top: Ints) -> None:
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
def peak_without(loads: Ints, top: Ints, m: int, p: int, first: int, second: int) -> int:
    """Return the largest load of a phase in a micro-step over all ranks but two; 0 if there are no others."""
    for t in range(TOP):
        r = top[m, p, t]
        if r >= 0 and r != first and r != second:
            return loads[m, r, p]
    return np.int64(0)


@kernel
def change_of(
    costs: Ints, loads: Ints, top: Ints, m: int, r: int, given: int, other_m: int, other_r: int, taken: int
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
    sizes: Ints, caps: Ints, filled: Ints, m: int, r: int, given: int, other_m: int, other_r: int, taken: int
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
    costs: Ints,
    sizes: Ints,
    rank: Ints32,
    microbatch: Ints32,
    loads: Ints,
    filled: Ints,
    top: Ints,
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
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    group: Ints32,
    rank: Ints32,
    microbatch: Ints32,
    loads: Ints,
    filled: Ints,
    top: Ints,
    may_move: bool,
    given: int,
    p: int,
) -> tuple[int, int, int, int, int]:
    """Return the exchange of a sample that lowers peaks most, if it lowers the cell's load in phase `p`: (by how much
    peaks rise, below 0 if there is one; the sample taken or -1; the micro-step and rank that get the sample; the
    exchanges looked at).
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
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    group: Ints32,
    rank: Ints32,
    microbatch: Ints32,
    loads: Ints,
    filled: Ints,
    top: Ints,
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
def add_up(costs: Ints, sizes: Ints, rank: Ints32, microbatch: Ints32, loads: Ints, filled: Ints, top: Ints) -> None:
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
def lower_all_peaks(
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    group: Ints32,
    num_micro_steps: int,
    rank: Ints32,
    microbatch: Ints32,
    may_move: bool,
    pairs: int,
    pinned: Ints32,
) -> None:
    """Lower the sum of peaks, in `rank` and `microbatch`; it never rises. Samples stay in the `group`, int32
    (num_ranks,), of their rank. Where no exchange helps, some samples are swapped at random, from a fixed seed, and the
    search begins again: it returns to the best so far if that does not lead to less. The limit is work, not time: the
    result is the same on every machine.
    """
    held = np.zeros((num_micro_steps, group.shape[0], costs.shape[1]), np.int64)
    held_sizes = np.zeros((num_micro_steps, group.shape[0], caps.shape[0]), np.int64)
    if len(pinned) == 0:
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
    costs: Ints,
    sizes: Ints,
    caps: Ints,
    group: Ints32,
    rank: Ints32,
    microbatch: Ints32,
    may_move: bool,
    pairs: int,
    held: Ints,
    held_sizes: Ints,
) -> None:
    """`lower_all_peaks` of samples that may move, next to what cells hold besides: (num_micro_steps,
    num_ranks, ...).
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
def sum_of_tops(loads: Ints, top: Ints) -> int:
    """Return the sum over micro-steps and phases of the largest load."""
    total = np.int64(0)
    for m in range(loads.shape[0]):
        for p in range(loads.shape[2]):
            total += loads[m, top[m, p, 0], p]
    return total
