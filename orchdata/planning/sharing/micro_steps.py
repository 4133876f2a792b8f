"""Samples in micro-steps, each of which is then balanced by itself.

    balanced_packings     bins of several ranks are filled one after another, or evenly (`balancers.bins.micro_steps`)
    sorted_and_cut   samples sorted by a phase and cut into micro-steps of equal positions
    in_scope         a grid: most samples of each micro-step stay near the ranks that they are drawn for

Where ranks wait for each other after each phase of a micro-step, the m-th microbatch of all ranks, large samples of a
phase belong into the same one, and every phase is then balanced inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL, Limits, assign_jointly
from orchdata.balancers.bins import LOOK_PAIRS, candidate_packings, some_ranks
from orchdata.native.assign.bounds import NO_PINS
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.microbatches.micro_steps import NOTHING_HELD, bins_cost, deal_cells
from orchdata.native.microbatches.within_caps import bin_bound, fits_alone, looked_peaks
from orchdata.native.sorting import descending_order
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.shares import Shares, StepSamples, assign, counted_groups, stay_near

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

MANY_SAMPLES = 8192  # Above this fewer packings are tried,
VERY_MANY_SAMPLES = 16_384  # and above this some of the ranks rule ways out.
_PACKINGS, _PACKINGS_OF_MANY = 3, 2  # Balanced, of those with the best estimates, unless bounds rule them out.
_STEPS_EFFORT = 4  # Micro-steps together are searched as long as this number of whole steps,
_MOST_EFFORT = 12  # and each at most this number of times as long as a step of its size,
_MOST_SEARCHED = 65_536  # of which no more samples count in full.


def balanced_packings(
    step: StepSamples, num_microbatches: int, below: int | None = None, priced: StepSamples | None = None
) -> list[Shares]:
    """Pack samples into micro-steps and balance each of them. Return ways of which each costs less than those before
    it, none if no packing keeps the caps. Only a price lower than `below` is of use; `priced` are the same samples with
    the phases that count, if these are not the balanced ones.
    """
    columns, caps = step.capped
    groups = step.groups
    members = [(step.members(group) if groups[1:] else slice(None), len(group)) for group in groups]
    many, very_many = (step.num_samples > limit for limit in (MANY_SAMPLES, VERY_MANY_SAMPLES))
    counted = None if priced is None else priced.by_sample
    packings = candidate_packings(
        *(columns, caps, num_microbatches, step.by_sample, members, 6 if many else 18), counted=counted, below=below
    )
    most = _PACKINGS_OF_MANY if many else _PACKINGS
    if very_many:  # They were balanced on some ranks already; estimates of phases that do not count are less sure.
        most = 1 if priced is None else _PACKINGS_OF_MANY
    ways: list[Shares] = []
    for packing in islice(packings, most):
        dealt = Shares(packing.rank, packing.bins, num_microbatches)
        if (balanced := _balanced_below(step, dealt, below, priced)) is not None:
            ways, below = [*ways, balanced[0]], balanced[1]
    return ways


def _balanced_below(
    step: StepSamples, dealt: Shares, below: int | None, priced: StepSamples | None = None
) -> tuple[Shares, int] | None:
    """Return `dealt` with balanced micro-steps, and its price; None if it is not below `below` or breaks counts."""
    inside = balanced_inside(step, dealt, below=below, priced=priced)
    if inside is None or not step.keeps_counts(inside.rank):
        return None
    price = (priced or step).price(inside)
    return (inside, price) if below is None or price < below else None


def balanced_inside(
    step: StepSamples,
    dealt: Shares,
    capped: tuple[Ints, Ints] | None = None,
    below: int | None = None,
    priced: StepSamples | None = None,
    pinned: Ranks = NO_PINS,
) -> Shares | None:
    """Balance each micro-step of `dealt`, which keeps the caps (`capped`, by default of `step`), by itself. Number them
    from the most costly: the one that takes most memory comes first. None if bounds show that it costs no less than
    `below`.
    """
    sizes, caps = capped or step.capped
    balance, counted, num_ranks = step.over_all_ranks().balance, (priced or step).by_sample, step.num_ranks
    rank = np.empty_like(dealt.rank)
    samples_of_rank, waits = np.zeros(num_ranks, np.int64), np.zeros(dealt.num_microbatches, np.int64)
    effort = balance.effort * min(_STEPS_EFFORT * dealt.num_microbatches, _MOST_EFFORT)
    members_of = [np.flatnonzero(dealt.microbatch == number) for number in range(dealt.num_microbatches)]
    usual = min(len(rank) // dealt.num_microbatches, _MOST_SEARCHED)
    if below is not None:
        waits[:] = [bin_bound(counted[each], fits_alone(sizes[each], caps), num_ranks) for each in members_of]
    for number, members in enumerate(members_of):
        if below is not None and int(waits.sum()) >= below:
            return None
        costs = {phase: column[members] for phase, column in step.costs.items()}
        limits = Limits(sizes[members], caps, dealt.rank[members], pinned[members] if len(pinned) else pinned)
        # Far more samples than in other micro-steps need few more pairs: its ranks are even soon.
        inside = replace(balance, max_samples=None, effort=effort * min(1.0, usual / max(1, len(members))))
        own = assign(costs, inside, num_ranks, step.stream_rank[members], limits=limits)
        if balance.equal_count or balance.max_samples is not None:
            own = _evened(own, samples_of_rank, balance, num_ranks)
        rank[members] = own
        waits[number] = sum_of_peaks(counted[members], own, num_ranks)
    return _from_the_most_costly(replace(dealt, rank=rank), waits)


def _evened(rank: Ranks, samples_of_rank: Ints, balance: Balance, num_ranks: int) -> Ranks:
    """Rename ranks inside each group, in place of counts: the rank with the fewest samples so far gets the most. Ranks
    are interchangeable in a micro-step. Counts that differ by at most one in each then do so over all.
    """
    counts = np.bincount(rank, minlength=num_ranks)
    name = np.empty(num_ranks, np.int32)
    for group in counted_groups(balance, num_ranks):
        few = np.argsort(samples_of_rank[group.start : group.stop], kind="stable") + group.start
        many = np.argsort(-counts[group.start : group.stop], kind="stable") + group.start
        name[many] = few
    samples_of_rank[name] += counts
    return name[rank]


def _from_the_most_costly(shares: Shares, waits: Ints) -> Shares:
    """Number micro-steps by what ranks wait for in them, int64 (num_microbatches,)."""
    name = np.empty(shares.num_microbatches, np.int32)
    name[np.argsort(-waits, kind="stable")] = np.arange(shares.num_microbatches)
    return replace(shares, microbatch=name[shares.microbatch])


_Cut = tuple[Ranks, Ranks, list[int]]
"""Samples cut into micro-steps: the micro-step of each, the order in which they were cut, bounds of what ranks wait."""


def sorted_and_cut(step: StepSamples, num_microbatches: int, below: int) -> list[Shares]:
    """Sort samples by a phase, or by all, cut them into micro-steps of equal positions, and balance each in the caps.
    Return ways that cost less than `below`, which bounds mostly rule out; the cheapest last.
    """
    columns, caps = step.capped
    positions = np.ascontiguousarray(columns[:, 0])
    if int(positions.sum()) > MAX_TOTAL // num_microbatches:
        return []  # Products that are compared would overflow.
    largest = descending_order(positions)
    ways: list[Shares] = []
    for cut in sorted(_cuts(step, positions, largest, num_microbatches, below), key=lambda cut: sum(cut[2])):
        microbatch, _, bounds = cut
        if sum(bounds) >= below:
            break
        # Of very many samples the search over packings has gone further than this.
        if step.num_samples <= VERY_MANY_SAMPLES:
            rank = _dealt_inside(columns, caps, microbatch, largest, step.num_ranks, num_microbatches)
            dealt = None if rank is None else Shares(rank, microbatch, num_microbatches)
            if dealt is not None and (balanced := _balanced_below(step, dealt, below)) is not None:
                ways, below = [*ways, balanced[0]], balanced[1]
        if (balanced_as_phases := _balanced_as_phases(step, cut, below)) is not None:
            ways, below = [*ways, balanced_as_phases], step.price(balanced_as_phases)
    return ways


def _cuts(step: StepSamples, positions: Ints, largest: Ranks, num_microbatches: int, below: int) -> Iterator[_Cut]:
    """Yield cuts by each phase and by their sum, without those that some of very many ranks, or bounds, rule out."""
    columns, caps = step.capped
    stride, few = some_ranks(step.num_ranks) if step.num_samples > VERY_MANY_SAMPLES else (0, 0)
    keys: Iterable[Ints] = step.costs.values() if len(step.costs) == 1 else (*step.costs.values(), step.total_costs)
    for by in keys:
        if stride:
            # Some ranks, with their samples cut and balanced about as by `balance_phases`, wait less than all ranks do.
            some, in_turn = largest[::stride], np.arange(len(largest[::stride]), dtype=np.int32)
            costs, own = step.by_sample[some], columns[some]
            cut = _cut(own[:, 0], descending_order(by[some]), num_microbatches)
            rank = _dealt_inside(own, caps, cut, in_turn, few, num_microbatches)
            if rank is not None:
                given = num_microbatches, few, LOOK_PAIRS
                if int(looked_peaks(costs, costs, own, caps, cut, rank, *given)) >= below:
                    continue
        order = largest[descending_order(by[largest])]
        cut = _cut(positions, order, num_microbatches)
        if bins_cost(step.by_sample, cut, num_microbatches, step.num_ranks) < below:
            members_of = [np.flatnonzero(cut == number) for number in range(num_microbatches)]
            costs, alone = step.by_sample, [fits_alone(columns[members], caps) for members in members_of]
            bounds = [int(bin_bound(costs[m], own, step.num_ranks)) for m, own in zip(members_of, alone, strict=True)]
            yield cut, order, bounds


def _cut(positions: Ints, order: Ranks, num_microbatches: int) -> Ranks:
    """Return the micro-step of each sample, int32 (n,): `order` in parts of equal positions."""
    before = np.cumsum(positions[order]) - positions[order]
    cut = np.empty(len(order), np.int32)
    cut[order] = np.minimum(before * num_microbatches // max(1, int(positions.sum())), num_microbatches - 1)
    return cut


def _balanced_as_phases(step: StepSamples, cut: _Cut, below: int) -> Shares | None:
    """Balance each micro-step of `cut` as `balance_phases` does; None above the caps, or if not below `below`."""
    (columns, caps), by_sample, (microbatch, order, bounds) = step.capped, step.by_sample, cut
    rank, price = np.empty_like(microbatch), sum(bounds)
    if step.balance.equal_count or step.balance.max_samples is not None:
        return None
    for number, bound in enumerate(bounds):
        mine = order[microbatch[order] == number]
        if not len(mine):
            continue
        phases, limits = np.ascontiguousarray(by_sample[mine].T), Limits(columns[mine], caps)
        rank[mine] = assign_jointly(
            phases, np.array([step.num_ranks]), len(phases) - 1, limits, effort=step.balance.effort
        )
        price += int(sum_of_peaks(by_sample[mine], rank[mine], step.num_ranks)) - bound
        if price >= below or above_caps(columns[mine], caps, rank[mine], step.num_ranks):
            return None
    return Shares(rank, microbatch, len(bounds))


def _dealt_inside(
    columns: Ints, caps: Ints, microbatch: Ranks, largest: Ranks, num_ranks: int, num_microbatches: int
) -> Ranks | None:
    """Deal the samples of each micro-step from the `largest`. Return ranks within the caps, None if there are none."""
    rank = np.empty_like(microbatch)
    for number in range(num_microbatches):
        mine = largest[microbatch[largest] == number]
        chosen, within = np.empty((2, len(mine)), np.int32)
        order = np.arange(len(mine), dtype=np.int32)
        if deal_cells(order, columns[mine], caps, caps * num_ranks, 1, num_ranks, chosen, within, NOTHING_HELD):
            return None
        rank[mine] = within
    return rank


def in_scope(step: StepSamples, shares: Shares) -> Shares:
    """Return `shares`, which balances all ranks; on a grid with samples near their streams, and renumbered."""
    if step.balance.scope != "grid":
        return shares
    near = near_streams(step, shares)
    waits: Ints = np.sum([near.loads(column, step.num_ranks).max(axis=0) for column in step.costs.values()], axis=0)
    return _from_the_most_costly(near, waits)


def near_streams(step: StepSamples, shares: Shares) -> Shares:
    """Move most samples of each micro-step near the ranks that they are drawn for; `shares` is balanced over all ranks.
    If that costs less, the search over all ranks missed something. Then return `shares` with ranks renamed so that most
    samples stay: a grid never costs less than "global".
    """
    columns, caps = step.capped
    near, named = shares.rank.copy(), shares.rank.copy()
    for number in range(shares.num_microbatches):
        members = np.flatnonzero(shares.microbatch == number)
        costs = {phase: column[members] for phase, column in step.costs.items()}
        limits = Limits(columns[members], caps, shares.rank[members])
        if len(members):
            near[members], named[members] = stay_near(
                costs, limits.within, step.stream_rank[members], step.num_ranks, step.balance, limits
            )
    moved = replace(shares, rank=near)
    if step.balance.price.meets_in_micro_steps and step.price(moved) < step.price(shares):
        return replace(shares, rank=named)
    return moved
