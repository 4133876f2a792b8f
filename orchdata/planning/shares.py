"""Who gets which sample, and in which microbatch: several ways, and the one whose step takes least.

    ranks by all phases, or by the backbone alone --split_microbatches--+
    global batch --dealings--> micro-steps --balanced inside each-------+-> the one that costs least

Under "grid" the micro-steps are those of balancing over all ranks; in each, most samples then stay near home.

A micro-step is the m-th microbatch of all ranks. Where ranks wait for each other after each phase of it, what counts is
the largest cost in each micro-step and phase: large samples of a phase belong into the same micro-step, and every phase
is then balanced inside it. All in integers: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import split_microbatches
from orchdata.balancers.assignment import cells_of
from orchdata.balancers.bins.micro_steps import LOOK_PAIRS, Dealing, dealings, some_ranks
from orchdata.balancers.checks import MAX_TOTAL
from orchdata.balancers.phases import assign_jointly
from orchdata.native.assign.phases import above_caps, sum_of_peaks
from orchdata.native.microbatches.micro_steps import bins_cost, deal_cells
from orchdata.native.microbatches.rough_peaks import bin_bound, fits_alone
from orchdata.native.microbatches.within_caps import looked_peaks
from orchdata.native.sorting import descending_order
from orchdata.planning.assign import Limits, assign, counted_groups, stay_near
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_DEALINGS, _DEALINGS_OF_MANY = 3, 2  # Balanced of those that promise most; left where the bounds say no.
_MANY_SAMPLES = 8192
_STEPS_EFFORT = 4  # Micro-steps together are searched as long as so many whole steps are,
_MOST_EFFORT = 12  # and each at most so many times as long as a step of its size,
_MOST_SEARCHED = 65_536  # of which no more samples count in full.
_HUGE = 16384  # Samples from which a split of whole ranks is made only where it may pay.
_SOME_RANKS = 64  # Of which the split says whether that of all may pay.
_NEARLY = 19, 20  # full micro-steps: one more may cost less.


@dataclass(frozen=True, slots=True)
class Shares:
    """rank and microbatch of each sample, int32 (num_samples,); as many microbatches on every rank."""

    rank: Ranks
    microbatch: Ranks
    num_microbatches: int


def _prices(costs: Mapping[str, Ints], found: Sequence[Shares], num_ranks: int, balance: Balance) -> list[int]:
    return [balance.price.of(cells(costs, shares, num_ranks)) for shares in found]


def share_out_packed(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None = None,
) -> Shares:
    """Assign samples to ranks and microbatches so that a packed step takes the least time, of the candidates above.

    None has more micro-steps than the split of what is balanced over all phases; of equals the one with fewer is
    taken, then the first.

    Args:
        costs: balanced phase -> int64 (n,), `llm` last.
        sizes: capped phase -> int64 (n,), its positions; without any, a step is one microbatch.
        stream_rank: int32 (n,), whose streams each sample is drawn from.
        num_microbatches: how many; by default the fewest.

    Raises:
        ValueError: a sample above a cap, unless `balance.oversize` is "own", or too few microbatches.
    """
    shares = _cheapest(costs, sizes, num_ranks, balance, stream_rank, num_microbatches)
    return shares if num_microbatches is not None else _without_empty(shares)


def _without_empty(shares: Shares) -> Shares:
    """The same without micro-steps in which no rank has a sample."""
    held = np.bincount(shares.microbatch, minlength=shares.num_microbatches) > 0
    if held.all() or not held.any():
        return shares
    name = np.cumsum(held, dtype=np.int32) - np.int32(1)
    return Shares(shares.rank, name[shares.microbatch], int(held.sum()))


def _cheapest(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
) -> Shares:
    """`share_out_packed`, whose micro-steps may be empty."""
    if num_ranks == 1 and not sizes and num_microbatches is None:
        return Shares(np.zeros(len(stream_rank), np.int32), np.zeros(len(stream_rank), np.int32), 1)
    meets = balance.price.meets_in_micro_steps
    together_in_steps = meets and bool(sizes) and num_ranks > 1
    anywhere = replace(balance, scope="global", group_size=None) if balance.scope == "grid" else balance
    chosen = None
    if num_microbatches is None and len(stream_rank) > _HUGE and together_in_steps:
        chosen = _micro_steps_first(costs, sizes, num_ranks, anywhere, stream_rank)
    if chosen is not None:
        return _in_scope(costs, sizes, chosen, num_ranks, balance, stream_rank)
    rank = assign(costs, balance, num_ranks, stream_rank)
    # Of whole steps of all ranks, the joint search has looked at the backbone alone.
    looked_at = balance.scope == "global" and balance.price.levels_each_phase and balance.num_stages is None
    if not sizes and num_microbatches is None and (looked_at or balance.scope == "none" or len(costs) == 1):
        return Shares(rank, np.zeros(len(rank), np.int32), 1)
    together = np.sum(list(costs.values()), axis=0)
    first = split(together, sizes, rank, num_ranks, balance)
    most = num_microbatches or first.num_microbatches
    if anywhere is not balance and together_in_steps and most > 1:
        chosen = share_out_packed(costs, sizes, num_ranks, anywhere, stream_rank, num_microbatches)
        if chosen.num_microbatches > most:
            return first
        return _in_scope(costs, sizes, chosen, num_ranks, balance, stream_rank)
    found = _in_so_many(first, together, sizes, num_ranks, balance, most)
    if balance.scope != "none":
        if together_in_steps and (most > 1 or not found):
            found += _dealt_ways(costs, sizes, num_ranks, balance, stream_rank, found, most, num_microbatches is None)
        if not meets and balance.price.levels_each_phase:  # Pipelines: only what a rank does in all counts.
            level = assign({"llm": together}, balance, num_ranks, stream_rank)
            shares = split(together, sizes, level, num_ranks, balance)
            found += _in_so_many(shares, together, sizes, num_ranks, balance, num_microbatches)
    prices = _prices(costs, found, num_ranks, balance)
    if balance.scope != "none" and len(costs) > 1:
        alone = _by_the_backbone(costs, sizes, num_ranks, balance, stream_rank, num_microbatches, prices, most > 1)
        found += alone
        prices += _prices(costs, alone, num_ranks, balance)
    if not found:
        raise ValueError(
            f"the samples do not fit into {most} microbatches within max_tokens={balance.max_tokens}: "
            f"{first.num_microbatches} hold them"
        )
    allowed = [number for number, shares in enumerate(found) if shares.num_microbatches <= most]
    return found[min(allowed, key=lambda number: (prices[number], found[number].num_microbatches))]


def _dealt_ways(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    known: Sequence[Shares],
    most: int,
    or_fewer: bool,
) -> list[Shares]:
    """Samples dealt into `most` micro-steps, and into fewer as long as these hold them; then the simple way in as many
    as the cheapest of these and of `known` has.
    """
    found = dealt_shares(costs, sizes, num_ranks, balance, stream_rank, most)
    fewer = most - 1
    while or_fewer and _may_hold(sizes, balance, num_ranks, fewer):
        dealt = dealt_shares(costs, sizes, num_ranks, balance, stream_rank, fewer)
        found, fewer = found + dealt, fewer - 1 if dealt else 0
    prices = {balance.price.of(cells(costs, one, num_ranks)): one.num_microbatches for one in (*known, *found)}
    if balance.scope == "global" and prices and prices[min(prices)] > 1:
        number = prices[min(prices)]
        found += sorted_and_cut(costs, sizes, num_ranks, balance, stream_rank, number, min(prices))
    return found


def _micro_steps_first(
    costs: Mapping[str, Ints], sizes: Mapping[str, Ints], num_ranks: int, balance: Balance, stream_rank: Ranks
) -> Shares | None:
    """Very many samples dealt into the fewest micro-steps that are found, or one more where those are nearly full.

    Splits of whole ranks take as long as all micro-steps together: they are made where some ranks, without a search,
    say that they may cost less.

    Returns:
        None where one micro-step may hold all, or dealing finds no way.
    """
    columns, caps = _capped(sizes, balance)
    taken, held = columns.sum(axis=0), caps * num_ranks
    fewest = int(np.max(-(-taken // held)))
    refused = balance.oversize != "own" and any(int(c.max()) > balance.caps[phase] for phase, c in sizes.items())
    if balance.scope == "none" or fewest == 1 or refused:
        return None
    rough = _rough_split(costs, sizes, num_ranks, balance, stream_rank)
    found: list[Shares] = []
    while not found and fewest <= max(rough[1], int(np.max(-(-taken // held)))):
        found, fewest = dealt_shares(costs, sizes, num_ranks, balance, stream_rank, fewest), fewest + 1
    if not found:
        return None
    prices = _prices(costs, found, num_ranks, balance)
    if fewest <= rough[1] and (taken * _NEARLY[1] > held * (fewest - 1) * _NEARLY[0]).any():
        found += dealt_shares(costs, sizes, num_ranks, balance, stream_rank, fewest, min(prices))
        prices += _prices(costs, found[len(prices) :], num_ranks, balance)
    least = min(prices)
    most = max(shares.num_microbatches for shares in found)
    if balance.scope == "global":
        for number in range(min(shares.num_microbatches for shares in found), most + 1):
            found += sorted_and_cut(costs, sizes, num_ranks, balance, stream_rank, number, least)
    if rough[0] < least:
        together, rank = np.sum(list(costs.values()), axis=0), assign(costs, balance, num_ranks, stream_rank)
        shares = split(together, sizes, rank, num_ranks, balance)
        found += [shares] if shares.num_microbatches <= most else []
    prices += _prices(costs, found[len(prices) :], num_ranks, balance)
    if len(costs) > 1:
        if _rough_split(costs, sizes, num_ranks, balance, stream_rank, ["llm"])[0] < min(prices):
            alone = _by_the_backbone(costs, sizes, num_ranks, balance, stream_rank, most, prices)
        else:
            llm, below = {"llm": costs["llm"]}, min(prices)
            alone = dealt_shares(llm, sizes, num_ranks, balance, stream_rank, most, below, priced=costs)
        found += alone
        prices += _prices(costs, alone, num_ranks, balance)
    return found[min(range(len(found)), key=lambda number: (prices[number], found[number].num_microbatches))]


def _rough_split(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    by: Sequence[str] = (),
) -> tuple[int, int]:
    """What some ranks, balanced without a search and split by sums, wait for among themselves; their microbatches.

    Of the samples from the most costly every k-th, on the k-th part of the ranks; balanced `by` these phases alone.
    """
    stride = max(1, num_ranks // _SOME_RANKS)
    few = num_ranks // stride
    mine = descending_order(np.sum(list(costs.values()), axis=0))[::stride]
    some = {phase: column[mine] for phase, column in costs.items()}
    held = {phase: column[mine] for phase, column in sizes.items()}
    anywhere = replace(balance, scope="global", group_size=None, effort=0.0)
    used = {phase: some[phase] for phase in by or some}
    rank = assign(used, anywhere, few, stream_rank[mine])
    shares = split(np.sum(list(used.values()), axis=0), held, rank, few, balance)
    return balance.price.of(cells(some, shares, few)), shares.num_microbatches


def _by_the_backbone(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
    prices: Sequence[int],
    in_micro_steps: bool = False,
) -> list[Shares]:
    """What balancing `llm` alone gives, where it may be better than what was found at `prices`; in micro-steps its own
    whole plan too, but of very many samples only the dealings that may be below these.
    """
    alone = {"llm": costs["llm"]}
    found: list[Shares] = []
    if (
        balance.price.meets_in_micro_steps
        and prices
        and sizes
        and num_ranks > 1
        and (in_micro_steps or num_microbatches)
    ):
        if len(stream_rank) <= _HUGE and balance.scope == "global":
            with suppress(ValueError):  # It may need more microbatches.
                found = [share_out_packed(alone, sizes, num_ranks, balance, stream_rank, num_microbatches)]
        elif num_microbatches:
            below = min(prices)
            found = dealt_shares(alone, sizes, num_ranks, balance, stream_rank, num_microbatches, below, priced=costs)
    rank = assign(alone, balance, num_ranks, stream_rank)
    if balance.price.meets_in_micro_steps and prices:
        # Microbatches only add to what ranks wait for in the whole step.
        whole = balance.price.of(cells(costs, Shares(rank, np.zeros(len(rank), np.int32), 1), num_ranks))
        if whole >= min(prices):
            return found
    shares = split(alone["llm"], sizes, rank, num_ranks, balance)
    return found + _in_so_many(shares, alone["llm"], sizes, num_ranks, balance, num_microbatches)


def _in_so_many(
    fewest: Shares,
    work: Ints,
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    num_microbatches: int | None,
) -> list[Shares]:
    """The fewest microbatches, or as many as are wanted; none where that is not enough."""
    if num_microbatches is None or fewest.num_microbatches == num_microbatches:
        return [fewest]
    if fewest.num_microbatches > num_microbatches:
        return []
    return [split(work, sizes, fewest.rank, num_ranks, balance, num_microbatches)]


def _may_hold(sizes: Mapping[str, Ints], balance: Balance, num_ranks: int, num_microbatches: int) -> bool:
    """Whether so many micro-steps hold the samples; of many samples, whether room is left: packing takes time."""
    cells = num_ranks * num_microbatches
    return cells > 0 and all(
        int(np.minimum(column, cap).sum()) <= (cap * cells * 63 // 64 if len(column) > _MANY_SAMPLES else cap * cells)
        for column, cap in ((column, balance.caps[phase]) for phase, column in sizes.items())
    )


def cells(costs: Mapping[str, Ints], shares: Shares, num_ranks: int) -> list[Ints]:
    """Cost of each rank's microbatches, of each phase int64 (num_ranks, num_microbatches)."""
    return [
        cells_of(column, shares.rank, shares.microbatch, num_ranks, shares.num_microbatches)
        for column in costs.values()
    ]


def split(
    work: Ints,
    sizes: Mapping[str, Ints],
    rank: Ranks,
    num_ranks: int,
    balance: Balance,
    num_microbatches: int | None = None,
) -> Shares:
    """Each rank's samples in microbatches within the caps of `sizes`, the fewest unless a number is given, level in
    `work`, int64 (n,). Raises ValueError.
    """
    columns = list(sizes.values()) or [np.zeros_like(work)]
    microbatch, number = split_microbatches(
        work,
        rank,
        num_ranks,
        sizes=np.stack(columns, axis=1),
        max_size=np.array([balance.caps[phase] for phase in sizes] or [MAX_TOTAL], np.int64),
        num_microbatches=num_microbatches,
        oversize="own" if balance.oversize == "own" else "error",
        in_step=balance.price.meets_in_micro_steps,
    )
    return Shares(rank, microbatch, number)


def dealt_shares(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int,
    below: int | None = None,
    priced: Mapping[str, Ints] | None = None,
) -> list[Shares]:
    """Samples dealt into micro-steps, each of which is then balanced by itself; no way where none was found.

    Args:
        below: only what costs less than this is of use; the rest is left as soon as bounds say so.
        priced: phases that count, where others than those balanced.
    """
    columns, caps = _capped(sizes, balance)
    by_sample = np.ascontiguousarray(np.stack(list(costs.values()), axis=1))
    groups = counted_groups(balance, num_ranks) if balance.scope == "grouped" else [range(num_ranks)]
    everything = slice(None)
    members = [
        (
            np.flatnonzero((stream_rank >= group.start) & (stream_rank < group.stop)) if groups[1:] else everything,
            len(group),
        )
        for group in groups
    ]
    many = len(stream_rank) > _MANY_SAMPLES
    counted = None if priced is None else np.ascontiguousarray(np.stack(list(priced.values()), axis=1))
    dealt = dealings(
        *(columns, caps, num_microbatches, by_sample, members, 6 if many else 18), counted=counted, below=below
    )
    tries = _Tries(costs, columns, caps, num_ranks, balance, stream_rank, priced)
    most = _DEALINGS_OF_MANY if many else _DEALINGS
    if len(stream_rank) > _HUGE:  # Looked at already; those of other phases than count are few.
        most = 1 if priced is None else _DEALINGS_OF_MANY
    return _searched(tries, dealt, num_microbatches, below, most)


@dataclass(frozen=True, slots=True)
class _Tries:
    """What dealings are balanced by: the arguments of `dealt_shares` that stay."""

    costs: Mapping[str, Ints]
    sizes: Ints
    caps: Ints
    num_ranks: int
    balance: Balance
    stream_rank: Ranks
    priced: Mapping[str, Ints] | None

    def balanced(self, dealt: Shares, below: int | None) -> tuple[Shares, int] | None:
        """`dealt`, balanced inside, and its price; None where that is not below `below`, or counts are not kept."""
        inside = balanced_inside(
            *(self.costs, self.sizes, self.caps, dealt, self.num_ranks, self.balance, self.stream_rank),
            below=below,
            priced=self.priced,
        )
        if inside is None or not counts_kept(inside.rank, self.num_ranks, self.balance):
            return None
        taken = self.balance.price.of(cells(self.priced or self.costs, inside, self.num_ranks))
        return (inside, taken) if below is None or taken < below else None


def _searched(tries: _Tries, dealt: Iterable[Dealing], num_steps: int, below: int | None, most: int) -> list[Shares]:
    """Each of the first `most` dealings balanced by itself; those below all before, the cheapest last."""
    found: list[Shares] = []
    for turn, one in enumerate(dealt, 1):
        inside = tries.balanced(Shares(one.rank, one.bins, num_steps), below)
        if inside is not None:
            found, below = [*found, inside[0]], inside[1]
        if turn == most:
            break
    return found


def sorted_and_cut(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int,
    below: int,
) -> list[Shares]:
    """The simple way: samples sorted by a phase, or by all, and cut into micro-steps of equal positions, each balanced
    within the caps. Only where it costs less than `below`, which its bounds mostly rule out; the cheapest last.
    """
    columns, caps = _capped(sizes, balance)
    by_sample = np.ascontiguousarray(np.stack(list(costs.values()), axis=1))
    positions = np.ascontiguousarray(columns[:, 0])
    if int(positions.sum()) > MAX_TOTAL // num_microbatches:
        return []  # what is compared would overflow
    largest = descending_order(positions)
    cuts: list[tuple[list[int], int, Ranks, Ranks]] = []
    stride, few = some_ranks(num_ranks) if len(positions) > _HUGE else (0, 0)
    for turn, by in enumerate((*costs.values(), by_sample.sum(axis=1))[: None if len(costs) > 1 else 1]):
        if stride:  # Some of very many ranks say most.
            some = largest[::stride]
            looked = _cut_looked_at(by_sample[some], columns[some], caps, by[some], few, num_microbatches)
            if looked is not None and looked >= below:
                continue
        order = largest[descending_order(by[largest])]
        cut = _cut(positions, order, num_microbatches)
        if bins_cost(by_sample, cut, num_microbatches, num_ranks) < below:
            steps = [np.flatnonzero(cut == number) for number in range(num_microbatches)]
            bounds = [int(bin_bound(by_sample[mine], fits_alone(columns[mine], caps), num_ranks)) for mine in steps]
            cuts.append((bounds, turn, cut, order))
    tries = _Tries(costs, columns, caps, num_ranks, balance, stream_rank, None)
    found: list[Shares] = []
    for bounds, _, cut, order in sorted(cuts, key=lambda one: (sum(one[0]), one[1])):
        if sum(bounds) >= below:
            break
        # Of very many samples the search of dealings has looked further than this.
        rank = None if stride else _dealt_inside(columns, caps, cut, largest, num_ranks, num_microbatches)
        inside = None if rank is None else tries.balanced(Shares(rank, cut, num_microbatches), below)
        if inside is not None:
            found, below = [*found, inside[0]], inside[1]
        anew = _anew_inside(by_sample, columns, caps, cut, order, num_ranks, balance, bounds, below)
        if anew is not None:
            found, below = [*found, anew], balance.price.of(cells(costs, anew, num_ranks))
    return found


def _cut(positions: Ints, order: Ranks, num_microbatches: int) -> Ranks:
    """Micro-step of each sample, int32 (n,): those in `order` in equal parts of the positions."""
    before = np.cumsum(positions[order]) - positions[order]
    cut = np.empty(len(order), np.int32)
    cut[order] = np.minimum(before * num_microbatches // max(1, int(positions.sum())), num_microbatches - 1)
    return cut


def _cut_looked_at(
    by_sample: Ints, columns: Ints, caps: Ints, by: Ints, num_ranks: int, num_microbatches: int
) -> int | None:
    """What some ranks wait for with their samples, from the largest, sorted, cut and balanced about as `balance_phases`
    does it: less than all ranks do. None where the samples are not brought within the caps.
    """
    largest = np.arange(len(by), dtype=np.int32)
    cut = _cut(columns[:, 0], descending_order(by), num_microbatches)
    rank = _dealt_inside(columns, caps, cut, largest, num_ranks, num_microbatches)
    if rank is None:
        return None
    where = (cut, rank, num_microbatches, num_ranks)
    return int(looked_peaks(by_sample, by_sample, columns, caps, *where, LOOK_PAIRS))


def _anew_inside(
    by_sample: Ints,
    columns: Ints,
    caps: Ints,
    microbatch: Ranks,
    order: Ranks,
    num_ranks: int,
    balance: Balance,
    bounds: Sequence[int],
    below: int,
) -> Shares | None:
    """Micro-steps that are given, each balanced as `balance_phases` does it of samples in `order`.

    Args:
        bounds: of what ranks wait for in each micro-step.

    Returns:
        None where that is above the caps, or not below `below`.
    """
    rank, taken = np.empty_like(microbatch), sum(bounds)
    if balance.equal_count or balance.max_samples is not None:
        return None
    for number, bound in enumerate(bounds):
        mine = order[microbatch[order] == number]
        if not len(mine):
            continue
        rank[mine] = assign_jointly(
            np.ascontiguousarray(by_sample[mine].T),
            np.array([num_ranks]),
            equal_count=False,
            max_samples=None,
            primary=by_sample.shape[1] - 1,
            sizes=columns[mine],
            caps=caps,
            effort=balance.effort,
        )
        taken += int(sum_of_peaks(by_sample[mine], rank[mine], num_ranks)) - bound
        if taken >= below or above_caps(columns[mine], caps, rank[mine], num_ranks):
            return None
    return Shares(rank, microbatch, len(bounds))


def _dealt_inside(
    columns: Ints, caps: Ints, microbatch: Ranks, largest: Ranks, num_ranks: int, num_microbatches: int
) -> Ranks | None:
    """Ranks within the caps of samples whose micro-steps are given, from the `largest`; None where none were found."""
    rank = np.empty_like(microbatch)
    for number in range(num_microbatches):
        mine = largest[microbatch[largest] == number]
        chosen, within = np.empty((2, len(mine)), np.int32)
        order = np.arange(len(mine), dtype=np.int32)
        if deal_cells(order, columns[mine], caps, caps * num_ranks, 1, num_ranks, chosen, within):
            return None
        rank[mine] = within
    return rank


def near_streams(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    shares: Shares,
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
) -> Shares:
    """`shares`, balanced over all ranks, with most samples of each micro-step near the ranks that they are drawn for.

    Where that costs less than `shares`, the search over all ranks missed something. The result is then `shares`, its
    ranks renamed so that most samples stay: so a grid never costs less than "global".
    """
    columns, caps = _capped(sizes, balance)
    near, named = shares.rank.copy(), shares.rank.copy()
    for number in range(shares.num_microbatches):
        members = np.flatnonzero(shares.microbatch == number)
        mine = {phase: column[members] for phase, column in costs.items()}
        limits = Limits(columns[members], caps, shares.rank[members])
        if len(members):
            near[members], named[members] = stay_near(
                mine, limits.within, stream_rank[members], num_ranks, balance, limits
            )
    found = replace(shares, rank=near)
    if balance.price.meets_in_micro_steps:
        taken = _prices(costs, (found, shares), num_ranks, balance)
        return found if taken[0] >= taken[1] else replace(shares, rank=named)
    return found


def _in_scope(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    shares: Shares,
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
) -> Shares:
    """`shares`, balanced over all ranks; on a grid near the streams, micro-steps numbered by what ranks wait for."""
    if balance.scope != "grid":
        return shares
    found = near_streams(costs, sizes, shares, num_ranks, balance, stream_rank)
    waits = np.sum([of_phase.max(axis=0) for of_phase in cells(costs, found, num_ranks)], axis=0)
    return _from_the_most_costly(found, waits)


def _from_the_most_costly(shares: Shares, waits: Ints) -> Shares:
    """The same, its micro-steps numbered by what ranks wait for in them, int64 (num_microbatches,)."""
    name = np.empty(shares.num_microbatches, np.int32)
    name[np.argsort(-waits, kind="stable")] = np.arange(shares.num_microbatches)
    return replace(shares, microbatch=name[shares.microbatch])


def counts_kept(rank: Ranks, num_ranks: int, balance: Balance) -> bool:
    """Whether ranks hold no more samples than `balance` allows, and as many as each other where that is asked."""
    counts = np.bincount(rank, minlength=num_ranks)
    if balance.max_samples is not None and int(counts.max()) > balance.max_samples:
        return False
    groups = counted_groups(balance, num_ranks) if balance.equal_count else []
    return all(int(np.ptp(counts[group.start : group.stop])) <= 1 for group in groups)


def _capped(sizes: Mapping[str, Ints], balance: Balance) -> tuple[Ints, Ints]:
    """What caps count, int64 (n, num_caps), and the caps. A sample above one fills it, and is alone by one more."""
    # More than all together is no cap, and would overflow.
    caps = [min(balance.caps[phase], max(1, int(column.sum()))) for phase, column in sizes.items()]
    columns = [np.minimum(column, cap) for column, cap in zip(sizes.values(), caps, strict=True)]
    above = np.any([column > cap for column, cap in zip(sizes.values(), caps, strict=True)], axis=0)
    if above.any():
        columns.append(np.where(above, len(above), 1))
        caps.append(len(above))
    return np.stack(columns, axis=1), np.array(caps, np.int64)


def balanced_inside(
    costs: Mapping[str, Ints],
    sizes: Ints,
    caps: Ints,
    dealt: Shares,
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    below: int | None = None,
    priced: Mapping[str, Ints] | None = None,
) -> Shares | None:
    """`dealt`, which keeps the caps, with each micro-step balanced by itself, and numbered from the most costly: what
    takes most memory comes first.

    Args:
        below, priced: as of `dealt_shares`.

    Returns:
        None where the bounds of the micro-steps left say that it takes no less than `below`.
    """
    rank = np.empty_like(dealt.rank)
    held, waits = np.zeros(num_ranks, np.int64), np.zeros(dealt.num_microbatches, np.int64)
    anywhere = replace(balance, scope="global", group_size=None) if balance.scope == "grid" else balance
    effort = balance.effort * min(_STEPS_EFFORT * dealt.num_microbatches, _MOST_EFFORT)
    steps = [np.flatnonzero(dealt.microbatch == number) for number in range(dealt.num_microbatches)]
    usual = min(len(rank) // dealt.num_microbatches, _MOST_SEARCHED)
    counted = np.stack(list((priced or costs).values()), axis=1)
    if below is not None:
        waits[:] = [bin_bound(counted[each], fits_alone(sizes[each], caps), num_ranks) for each in steps]
    for number, members in enumerate(steps):
        if below is not None and int(waits.sum()) >= below:
            return None
        mine = {phase: column[members] for phase, column in costs.items()}
        limits = Limits(sizes[members], caps, dealt.rank[members])
        # Of one that holds far more samples than others few more pairs are looked at: its ranks are even soon.
        searched = effort * min(1.0, usual / max(1, len(members)))
        inside = replace(anywhere, max_samples=None, effort=searched)
        found = assign(mine, inside, num_ranks, stream_rank[members], limits=limits)
        if balance.equal_count or balance.max_samples is not None:
            found = _evened(found, held, balance, num_ranks)
        rank[members] = found
        waits[number] = sum_of_peaks(counted[members], found, num_ranks)
    return _from_the_most_costly(replace(dealt, rank=rank), waits)


def _evened(rank: Ranks, held: Ints, balance: Balance, num_ranks: int) -> Ranks:
    """`rank` with other names inside each group, so that ranks of many samples are those that hold few; adds to `held`.

    Ranks are alike in a micro-step. Counts that are equal in each, give or take one, so become equal over all.
    """
    counts = np.bincount(rank, minlength=num_ranks)
    name = np.empty(num_ranks, np.int32)
    for group in counted_groups(balance, num_ranks):
        few = np.argsort(held[group.start : group.stop], kind="stable") + group.start
        many = np.argsort(-counts[group.start : group.stop], kind="stable") + group.start
        name[many] = few
    held[name] += counts
    return name[rank]
