"""Who gets which sample, and in which microbatch: several ways, and the one whose step takes least.

    ranks by all phases, or by the backbone alone --split_microbatches--+
    global batch --dealings--> micro-steps --balanced inside each-------+-> the one that costs least

Under "grid" the micro-steps are those of balancing over all ranks; in each, most samples then stay near home.

A micro-step is the m-th microbatch of all ranks. Where ranks wait for each other after each phase of it, what counts is
the largest cost in each micro-step and phase: large samples of a phase belong into the same micro-step, and every phase
is then balanced inside it. All in integers: every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import split_microbatches
from orchdata.balancers.assignment import cells_of
from orchdata.balancers.bins.micro_steps import dealings
from orchdata.balancers.checks import MAX_TOTAL
from orchdata.native.assign.phases import sum_of_peaks
from orchdata.native.microbatches.pipeline import slowest
from orchdata.native.microbatches.rough_peaks import bin_bound, fits_alone
from orchdata.planning.assign import Limits, assign, counted_groups, stay_near
from orchdata.planning.balance import Balance

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_DEALINGS, _DEALINGS_OF_MANY = 3, 2  # Balanced of those that promise most; left where the bounds say no.
_MANY_SAMPLES = 8192
_STEPS_EFFORT = 4  # Micro-steps together are searched as long as so many whole steps are.
_HUGE = 16384  # Samples from which a split of whole ranks is made only where it may pay.
_SOME_RANKS = 64  # Of which the split says whether that of all may pay,
_PAYS = 16  # namely where it takes at most this part more than what is known.
_FAR = 8  # Above its promise by this part, another way is tried.
_NEARLY = 19, 20  # full micro-steps: one more may cost less.


@dataclass(frozen=True, slots=True)
class Shares:
    """rank and microbatch of each sample, int32 (num_samples,); as many microbatches on every rank."""

    rank: Ranks
    microbatch: Ranks
    num_microbatches: int


def in_step(balance: Balance) -> bool:
    """Whether ranks wait for each other in each micro-step."""
    return balance.assignment == "per_phase" or (balance.objective == "barrier" and balance.order is None)


def cost_of_cells(cells: Sequence[Ints], *, in_step: bool) -> int:
    """What ranks wait for, of one or several phases.

    Args:
        cells: of each phase int64 (num_ranks, num_microbatches).
        in_step: ranks wait after each phase of each micro-step; else at the end only.
    """
    if in_step:
        return sum(int(of_phase.max(axis=0).sum()) for of_phase in cells)
    return int(np.sum([of_phase.sum(axis=1) for of_phase in cells], axis=0).max())


def price(cells: Sequence[Ints], balance: Balance) -> int:
    """What a step costs, by what its ranks wait for.

    Args:
        cells: of each phase, the encoders before `llm`: int64 (num_ranks, num_microbatches).

    Returns:
        The sum over micro-steps and phases of the largest cell, the largest total of a rank, or the makespan of the
        slowest pipeline, its first stage with all encoders.
    """
    if balance.num_stages is None or in_step(balance):
        return cost_of_cells(cells, in_step=in_step(balance))
    work = cells[-1].astype(np.float64)
    first = work + balance.num_stages * np.sum([np.zeros_like(work), *cells[:-1]], axis=0)
    return int(slowest(first, work, balance.num_stages))


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
    if num_ranks == 1 and not sizes and num_microbatches is None:
        return Shares(np.zeros(len(stream_rank), np.int32), np.zeros(len(stream_rank), np.int32), 1)
    chosen = None
    if num_microbatches is None and len(stream_rank) > _HUGE and in_step(balance) and sizes and num_ranks > 1:
        chosen = _micro_steps_first(costs, sizes, num_ranks, balance, stream_rank)
    if chosen is not None:
        return chosen
    rank = assign(costs, balance, num_ranks, stream_rank)
    # Of whole steps of all ranks, the joint search has looked at the backbone alone.
    looked_at = balance.scope == "global" and balance.objective == "barrier" and balance.num_stages is None
    if not sizes and num_microbatches is None and (looked_at or balance.scope == "none" or len(costs) == 1):
        return Shares(rank, np.zeros(len(rank), np.int32), 1)
    together = np.sum(list(costs.values()), axis=0)
    first = split(together, sizes, rank, num_ranks, balance)
    most = num_microbatches or first.num_microbatches
    found = _in_so_many(first, together, sizes, num_ranks, balance, most)
    if balance.scope != "none":
        if in_step(balance) and sizes and num_ranks > 1 and (most > 1 or not found):
            found += dealt_shares(costs, sizes, num_ranks, balance, stream_rank, most)
            fewer = most - 1
            while num_microbatches is None and _may_hold(sizes, balance, num_ranks, fewer):
                dealt = dealt_shares(costs, sizes, num_ranks, balance, stream_rank, fewer)
                found, fewer = found + dealt, fewer - 1 if dealt else 0
        if not in_step(balance) and balance.objective == "barrier":  # Pipelines: only what a rank does in all counts.
            level = assign(costs, replace(balance, objective="sum"), num_ranks, stream_rank)
            shares = split(together, sizes, level, num_ranks, balance)
            found += _in_so_many(shares, together, sizes, num_ranks, balance, num_microbatches)
    prices = [price(cells(costs, shares, num_ranks), balance) for shares in found]
    if balance.scope != "none" and len(costs) > 1:
        alone = _by_the_backbone(costs, sizes, num_ranks, balance, stream_rank, num_microbatches, prices)
        found += alone
        prices += [price(cells(costs, shares, num_ranks), balance) for shares in alone]
    if not found:
        raise ValueError(
            f"the samples do not fit into {most} microbatches within max_tokens={balance.max_tokens}: "
            f"{first.num_microbatches} hold them"
        )
    allowed = [number for number, shares in enumerate(found) if shares.num_microbatches <= most]
    return found[min(allowed, key=lambda number: (prices[number], found[number].num_microbatches))]


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
    least = min(price(cells(costs, shares, num_ranks), balance) for shares in found)
    if fewest <= rough[1] and (taken * _NEARLY[1] > held * (fewest - 1) * _NEARLY[0]).any():
        found += dealt_shares(costs, sizes, num_ranks, balance, stream_rank, fewest, least)
    most = max(shares.num_microbatches for shares in found)
    if rough[0] <= least + least // _PAYS:
        together, rank = np.sum(list(costs.values()), axis=0), assign(costs, balance, num_ranks, stream_rank)
        shares = split(together, sizes, rank, num_ranks, balance)
        found += [shares] if shares.num_microbatches <= most else []
    prices = [price(cells(costs, shares, num_ranks), balance) for shares in found]
    if len(costs) > 1:
        alone = _by_the_backbone(costs, sizes, num_ranks, balance, stream_rank, most, prices)
        found += alone
        prices += [price(cells(costs, shares, num_ranks), balance) for shares in alone]
    return found[min(range(len(found)), key=lambda number: (prices[number], found[number].num_microbatches))]


def _rough_split(
    costs: Mapping[str, Ints], sizes: Mapping[str, Ints], num_ranks: int, balance: Balance, stream_rank: Ranks
) -> tuple[int, int]:
    """What some ranks, balanced without a search and split by sums, wait for among themselves; their microbatches."""
    anywhere = replace(balance, scope="global", group_size=None) if balance.scope == "grid" else balance
    quick = replace(anywhere, effort=0.0)
    rank = assign(costs, quick, num_ranks, stream_rank)
    some = min(_SOME_RANKS, num_ranks)
    mine = np.flatnonzero(rank < some)
    few = {phase: column[mine] for phase, column in costs.items()}
    together = np.sum(list(few.values()), axis=0)
    shares = split(together, {phase: column[mine] for phase, column in sizes.items()}, rank[mine], some, balance)
    return price(cells(few, shares, some), balance), shares.num_microbatches


def _by_the_backbone(
    costs: Mapping[str, Ints],
    sizes: Mapping[str, Ints],
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
    num_microbatches: int | None,
    prices: Sequence[int],
) -> list[Shares]:
    """What balancing `llm` alone gives, where it may be better than what was found at `prices`."""
    alone = {"llm": costs["llm"]}
    found: list[Shares] = []
    if in_step(balance) and prices and num_microbatches and sizes and num_ranks > 1:
        found = dealt_shares(alone, sizes, num_ranks, balance, stream_rank, num_microbatches, min(prices), priced=costs)
    rank = assign(alone, balance, num_ranks, stream_rank)
    if in_step(balance) and prices:
        # Microbatches only add to what ranks wait for in the whole step.
        whole = price(cells(costs, Shares(rank, np.zeros(len(rank), np.int32), 1), num_ranks), balance)
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
        in_step=in_step(balance),
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
    found: list[Shares] = []
    for turn, one in enumerate(dealt, 1):
        shares = Shares(one.rank, one.bins, num_microbatches)
        inside = balanced_inside(costs, columns, caps, shares, num_ranks, balance, stream_rank, below, priced)
        if inside is not None and counts_kept(inside.rank, num_ranks, balance):
            taken = price(cells(priced or costs, inside, num_ranks), balance)
            if below is None or taken < below:
                found, below = [*found, inside], taken
        # Of very many samples another way is balanced only where the first came out far dearer than it promised.
        kept = found and below and below <= one.promise + one.promise // _FAR
        if turn == (_DEALINGS_OF_MANY if many else _DEALINGS) or (kept and len(stream_rank) > _HUGE):
            break
    if balance.scope == "grid" and found:
        found = [near_streams(costs, columns, caps, found[-1], num_ranks, balance, stream_rank)]
    return found


def near_streams(
    costs: Mapping[str, Ints],
    sizes: Ints,
    caps: Ints,
    shares: Shares,
    num_ranks: int,
    balance: Balance,
    stream_rank: Ranks,
) -> Shares:
    """`shares`, balanced over all ranks, with most samples of each micro-step near the ranks they are drawn for."""
    rank = shares.rank.copy()
    for number in range(shares.num_microbatches):
        members = np.flatnonzero(shares.microbatch == number)
        mine = {phase: column[members] for phase, column in costs.items()}
        limits = Limits(sizes[members], caps, shares.rank[members])
        if len(members):
            rank[members] = stay_near(mine, limits.within, stream_rank[members], num_ranks, balance, limits)
    return Shares(rank, shares.microbatch, shares.num_microbatches)


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
    rank, name = np.empty_like(dealt.rank), np.empty(dealt.num_microbatches, np.int32)
    held, waits = np.zeros(num_ranks, np.int64), np.zeros(dealt.num_microbatches, np.int64)
    anywhere = replace(balance, scope="global", group_size=None) if balance.scope == "grid" else balance
    inside = replace(anywhere, max_samples=None, effort=_STEPS_EFFORT * balance.effort * dealt.num_microbatches)
    steps = [np.flatnonzero(dealt.microbatch == number) for number in range(dealt.num_microbatches)]
    counted = np.stack(list((priced or costs).values()), axis=1)
    if below is not None:
        waits[:] = [bin_bound(counted[each], fits_alone(sizes[each], caps), num_ranks) for each in steps]
    for number, members in enumerate(steps):
        if below is not None and int(waits.sum()) >= below:
            return None
        mine = {phase: column[members] for phase, column in costs.items()}
        limits = Limits(sizes[members], caps, dealt.rank[members])
        found = assign(mine, inside, num_ranks, stream_rank[members], limits=limits)
        if balance.equal_count or balance.max_samples is not None:
            found = _evened(found, held, balance, num_ranks)
        rank[members] = found
        waits[number] = sum_of_peaks(counted[members], found, num_ranks)
    name[np.argsort(-waits, kind="stable")] = np.arange(dealt.num_microbatches)
    return Shares(rank, name[dealt.microbatch], dealt.num_microbatches)


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
