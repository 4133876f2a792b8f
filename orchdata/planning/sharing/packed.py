"""Sharing out packed and padded steps: several candidates, and the cheapest of them. All in integers.

    ranks by all phases, or by the backbone alone --split into microbatches--+
    global batch --candidate packings--> micro-steps --balanced inside each--+-> the one that costs least
    padded: rank by balance_padded, equal blocks of lengths --split----------+
    padded: cells of neighbours in length, one a rank in each micro-step ----+

Under "grid" the micro-steps are those of balancing over all ranks; in each, most samples then stay near the ranks that
they are drawn for. A padded microbatch costs its number of rows times its longest row; only `llm` is padded in the
costs. Each candidate is priced with its encoder phases: a padded plan never costs more than the packed one there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_of, lower_bound
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.balancers.packed import balance_padded
from orchdata.native.sorting import descending_order
from orchdata.planning.sharing.micro_steps import (
    MANY_SAMPLES,
    VERY_MANY_SAMPLES,
    balanced_packings,
    in_scope,
    sorted_and_cut,
)
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, assign, dealt, one_microbatch

Ints = NDArray[np.int64]

_SOME_RANKS = 64  # A split on this number of ranks says whether a split on all may pay.
_NEARLY = 19, 20  # full micro-steps: one more may cost less.


@dataclass(frozen=True, slots=True)
class NoPadding(Padding):
    """Sequences one after another: a microbatch costs what its samples cost together. With `joined_to` its sequences
    are joined, and padded once to a multiple of this; None where each has padding of its own.
    """

    adds_up: ClassVar[bool] = True
    joined_to: int | None = None

    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """The cheapest of the candidates above, none with more micro-steps than the split of ranks by all phases. Ties:
        fewer micro-steps, then the first found.
        """
        shares = _cheapest(step, num_microbatches)
        used = np.bincount(shares.microbatch, minlength=shares.num_microbatches) > 0
        if num_microbatches is not None or used.all() or not used.any():
            return shares
        # Without micro-steps in which no rank has a sample.
        name = np.cumsum(used, dtype=np.int32) - np.int32(1)
        return Shares(shares.rank, name[shares.microbatch], int(used.sum()))

    def loads(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        return shares.loads(costs, num_ranks)

    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """A rank's samples are cut in their order into microbatches of even counts, as by torch's samplers."""
        rank = dealt(len(costs), num_ranks)
        if num_microbatches == 1:
            return loads_of(costs, rank, num_ranks)[:, None]
        counts = -(-(len(costs) - np.arange(num_ranks)) // num_ranks)
        turn = np.arange(len(costs)) // num_ranks
        cell = rank * num_microbatches + turn * num_microbatches // counts[rank]
        return loads_of(costs, cell, num_ranks * num_microbatches).reshape(num_ranks, num_microbatches)


NO_PADDING = NoPadding()


class _Candidates:
    """Ways to share out a step, each with its price, in the order of adding."""

    def __init__(self, step: StepSamples) -> None:
        self.step = step
        self.priced: list[tuple[int, Shares]] = []

    def add(self, ways: Iterable[Shares]) -> None:
        self.priced += [(self.step.price(shares), shares) for shares in ways]

    @property
    def least(self) -> int:
        """The lowest price of at least one candidate."""
        return min(price for price, _ in self.priced)

    def cheapest(self, most: int | None = None) -> Shares:
        """Return the cheapest of at most `most` micro-steps. Ties: fewer micro-steps, then the first."""
        allowed = [each for each in self.priced if most is None or each[1].num_microbatches <= most]
        return min(allowed, key=lambda each: (each[0], each[1].num_microbatches))[1]


class _DoesNotFit(ValueError):
    """The samples do not fit into as many micro-steps as are asked for."""


def _cheapest(step: StepSamples, num_microbatches: int | None) -> Shares:
    """As `NoPadding.share_out`, but micro-steps may be empty."""
    balance = step.balance
    if step.num_ranks == 1 and not step.sizes and num_microbatches is None:
        return one_microbatch(np.zeros(step.num_samples, np.int32))
    # Very many samples: a split of whole ranks takes too long.
    everywhere = step.over_all_ranks()
    very_many = num_microbatches is None and step.num_samples > VERY_MANY_SAMPLES and step.meets_in_micro_steps
    if very_many and (chosen := _micro_steps_first(everywhere)) is not None:
        return in_scope(step, chosen)
    # One microbatch: done where the joint search has considered the backbone alone, as in whole steps of all ranks.
    rank = step.assign()
    considered = balance.scope == "global" and balance.price.levels_each_phase and balance.num_stages is None
    if not step.sizes and num_microbatches is None and (considered or balance.scope == "none" or len(step.costs) == 1):
        return one_microbatch(rank)
    first = step.split(rank)
    most = num_microbatches or first.num_microbatches
    # A grid starts from balancing over all ranks.
    if everywhere is not step and step.meets_in_micro_steps and most > 1:
        with suppress(_DoesNotFit):  # the ranks' own samples may
            chosen = NO_PADDING.share_out(everywhere, num_microbatches)
            return first if chosen.num_microbatches > most else in_scope(step, chosen)
    # Otherwise compare all candidates.
    ways = _Candidates(step)
    ways.add(_in_number(step, first, most))
    if balance.scope != "none":
        _add_balanced(ways, most, num_microbatches)
    if not ways.priced:
        if everywhere is not step and step.meets_in_micro_steps and most == 1:  # not tried above
            return in_scope(step, NO_PADDING.share_out(everywhere, num_microbatches))
        raise _DoesNotFit(
            f"the samples do not fit into {most} microbatches within max_tokens={balance.max_tokens}: "
            f"{first.num_microbatches} are enough"
        )
    return ways.cheapest(most)


def _add_balanced(ways: _Candidates, most: int, num_microbatches: int | None) -> None:
    """Add all candidates but the split of ranks by all phases, which has `most` micro-steps."""
    step, price = ways.step, ways.step.balance.price
    if step.meets_in_micro_steps and (most > 1 or not ways.priced):
        _add_dealt(ways, most, or_fewer=num_microbatches is None)
    if price.levels_each_phase and not price.meets_in_micro_steps:  # The sum over phases counts: balance that too.
        level = assign({"llm": step.total_costs}, step.balance, step.num_ranks, step.stream_rank)
        ways.add(_in_number(step, step.split(level), num_microbatches))
    if len(step.costs) > 1:
        least = ways.least if ways.priced else None
        ways.add(_by_the_backbone(step, num_microbatches, least, several=most > 1))


def _add_dealt(ways: _Candidates, most: int, *, or_fewer: bool) -> None:
    """Add packings into `most` micro-steps, or fewer while these are enough; then cuts into as many as the cheapest
    has.
    """
    step, number = ways.step, most
    ways.add(balanced_packings(step, number))
    while or_fewer and _may_hold(step, number - 1):
        number -= 1
        fewer = balanced_packings(step, number)
        ways.add(fewer)
        if not fewer:
            break
    if step.balance.scope == "global" and ways.priced:
        least = ways.least
        number = [shares.num_microbatches for price, shares in ways.priced if price == least][-1]
        if number > 1:
            ways.add(sorted_and_cut(step, number, least))


def _may_hold(step: StepSamples, num_microbatches: int) -> bool:
    """Return whether micro-steps may have room for the samples; many samples must leave 1/64, as packing takes time."""
    caps, count = step.balance.caps, step.num_ranks * num_microbatches
    filled, of = (63, 64) if step.num_samples > MANY_SAMPLES else (1, 1)
    return count > 0 and all(
        int(np.minimum(column, caps[phase]).sum()) <= caps[phase] * count * filled // of
        for phase, column in step.sizes.items()
    )


def _micro_steps_first(step: StepSamples) -> Shares | None:
    """Pack very many samples into the fewest micro-steps with room, or one more if those are nearly full; None if one
    may be enough, or no packing exists. Splits of whole ranks take as long as all micro-steps together: they are made
    only where a split of some ranks, without a search, says that they may cost less.
    """
    columns, caps = step.capped
    sums, room = columns.sum(axis=0), caps * step.num_ranks
    least_number = fewest = int(np.max(-(-sums // room)))
    refused = step.balance.oversize != "own" and len(caps) > len(step.sizes)  # A sample is above a cap.
    if step.balance.scope == "none" or fewest == 1 or refused:
        return None
    # Pack into the fewest micro-steps that some way holds, or one more if they are nearly full.
    rough, rough_number = _rough_split(step)
    packed: list[Shares] = []
    while not packed and fewest <= max(rough_number, least_number):
        packed, fewest = balanced_packings(step, fewest), fewest + 1
    if not packed:
        return None
    ways = _Candidates(step)
    ways.add(packed)
    if fewest <= rough_number and (sums * _NEARLY[1] > room * (fewest - 1) * _NEARLY[0]).any():
        ways.add(balanced_packings(step, fewest, ways.least))
    _add_simple(ways, rough)
    return ways.cheapest()


def _add_simple(ways: _Candidates, rough: int) -> None:
    """Add what may be cheaper than the packings so far: cuts, splits of whole ranks, and ways by the backbone alone.
    Some ranks wait for `rough` after a split.
    """
    step, least = ways.step, ways.least
    numbers = [shares.num_microbatches for _, shares in ways.priced]
    most = max(numbers)
    if step.balance.scope == "global":
        for number in range(min(numbers), most + 1):
            ways.add(sorted_and_cut(step, number, least))
    if rough < least:
        shares = step.split(step.assign())
        ways.add([shares] if shares.num_microbatches <= most else [])
    if len(step.costs) > 1:
        least = ways.least
        if _rough_split(step, "llm")[0] < least:
            ways.add(_by_the_backbone(step, most, least))
        else:
            ways.add(balanced_packings(step.of_phases("llm"), most, least, priced=step))


def _rough_split(step: StepSamples, *by: str) -> tuple[int, int]:
    """Return what some ranks wait for, balanced by the phases `by` without a search and split by sums, and their number
    of microbatches: every k-th sample from the most costly, on the k-th part of the ranks.
    """
    stride = max(1, step.num_ranks // _SOME_RANKS)
    mine = descending_order(step.total_costs)[::stride]
    balance = replace(step.balance, scope="global", group_size=None, effort=0.0)
    some = replace(step.take(mine), num_ranks=step.num_ranks // stride, balance=balance)
    used = some.of_phases(*by) if by else some
    shares = used.split(used.assign())
    return some.price(shares), shares.num_microbatches


def _by_the_backbone(
    step: StepSamples, num_microbatches: int | None, least: int | None, *, several: bool = False
) -> list[Shares]:
    """Return ways by balancing `llm` alone, if they may cost less than `least`; in `several` micro-steps also its whole
    plan, but for very many samples only packings that may cost less.
    """
    alone = step.of_phases("llm")
    shares: list[Shares] = []
    if step.meets_in_micro_steps and least is not None and (several or num_microbatches):
        if step.num_samples <= VERY_MANY_SAMPLES and step.balance.scope == "global":
            with suppress(ValueError):  # It may need more microbatches.
                shares = [NO_PADDING.share_out(alone, num_microbatches)]
        elif num_microbatches:
            shares = balanced_packings(alone, num_microbatches, least, priced=step)
    rank = alone.assign()
    # Microbatches only add to what ranks wait for in the whole step.
    if least is not None and step.balance.price.meets_in_micro_steps and step.price(one_microbatch(rank)) >= least:
        return shares
    return shares + _in_number(alone, alone.split(rank), num_microbatches)


def _in_number(step: StepSamples, fewest: Shares, num_microbatches: int | None) -> list[Shares]:
    """Return the fewest microbatches, or the wanted number; empty if that is not enough."""
    if num_microbatches is None or fewest.num_microbatches == num_microbatches:
        return [fewest]
    if fewest.num_microbatches > num_microbatches:
        return []
    return [step.split(fewest.rank, num_microbatches)]


Ranks = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PaddedCost(Padding):
    """`llm` batches padded to their longest sample: what a row costs, and the multiple of its length. `StepSamples` has
    costs of rows as long as each sample; positions are aligned and at least 1. The cap counts rows times the longest.
    """

    cost: PhaseCost
    multiple_of: int = 1

    def share_out(self, step: StepSamples, num_microbatches: int | None = None) -> Shares:
        """The cheapest of the candidates above, none with more micro-steps than packed balancing, which alone is tried
        where samples may not go to any rank, or nothing is balanced. Ties: fewer micro-steps, then the first, as packed
        balancing keeps samples where they were.
        """
        balance, num_ranks, positions = step.balance, step.num_ranks, step.positions
        ranks = [step.assign()]
        balanced = balance.scope != "none" and num_ranks > 1 and len(positions) > 0
        if balanced and len(step.costs) > 1:
            ranks.append(step.of_phases("llm").assign())
        anywhere = balanced and balance.scope == "global"
        if anywhere and balance.equal_count:
            ranks.append(assign_blocks(positions, num_ranks))
        elif anywhere:
            ranks.append(self.assign(positions, num_ranks, balance.max_samples))
        shares = [split_padded(step, rank) for rank in ranks]
        most = num_microbatches or shares[0].num_microbatches
        if anywhere and step.meets_in_micro_steps:
            shares += _in_blocks(step, most, num_microbatches)
        allowed = [one for one in shares if one.num_microbatches == num_microbatches]
        allowed = allowed or [one for one in shares if one.num_microbatches <= most] or shares[:1]
        return allowed[0] if len(allowed) == 1 else self.cheapest(step, allowed)

    def assign(self, positions: Ints, num_ranks: int, max_samples: int | None = None) -> Ranks:
        """The rank of each sample, int32 (n,), with the smallest makespan of one microbatch a rank."""
        return balance_padded(
            positions, num_ranks, self.cost, max_samples=max_samples, multiple_of=self.multiple_of
        ).rank

    def loads(self, costs: Ints, positions: Ints, shares: Shares, num_ranks: int) -> Ints:
        shape = (num_ranks, shares.num_microbatches)
        counts, longest = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        np.add.at(counts, (shares.rank, shares.microbatch), 1)
        np.maximum.at(longest, (shares.rank, shares.microbatch), costs)
        return counts * longest

    def cells_in_turn(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> Ints:
        """A rank's samples are cut by length into even microbatches."""
        rank, microbatch = dealt(len(positions), num_ranks), np.zeros(len(positions), np.int32)
        for mine in _by_rank(rank, positions, num_ranks):
            microbatch[mine] = np.arange(len(mine)) * num_microbatches // max(1, len(mine))
        return self.loads(costs, positions, Shares(rank, microbatch, num_microbatches), num_ranks)

    def lower_bound(self, costs: Ints, positions: Ints, num_ranks: int, num_microbatches: int) -> int:
        if num_microbatches > 1:
            return lower_bound(costs, num_ranks)
        shares = one_microbatch(self.assign(positions, num_ranks))
        return int(self.loads(costs, positions, shares, num_ranks).max(initial=0))


def assign_blocks(positions: Ints, num_ranks: int) -> Ranks:
    """Equal counts, give or take one: rank 0 gets the longest samples, the last rank the shortest. No other assignment
    of these counts has smaller loads: see `balance_padded`. Ranks of short samples take one more.
    """
    few, rest = divmod(len(positions), num_ranks)
    counts = np.full(num_ranks, few)
    counts[num_ranks - rest :] += 1
    rank = np.empty(len(positions), np.int32)
    rank[np.argsort(-positions, kind="stable")] = np.repeat(np.arange(num_ranks, dtype=np.int32), counts)
    return rank


def split_padded(step: StepSamples, rank: Ranks) -> Shares:
    """Cut each rank's samples, from the longest, into as few microbatches as the caps allow: neighbours in length, so
    the m-th of all ranks, which run in step, have about the same length. Raises ValueError for a sample above a cap,
    unless `balance.oversize` is "own".
    """
    sizes, caps = step.sizes, step.balance.caps
    if not sizes:
        return one_microbatch(rank)
    for phase, column in sizes.items():
        if step.balance.oversize != "own" and int(column.max(initial=0)) > caps[phase]:
            raise ValueError(
                f"a sample has {int(column.max())} {phase} positions, max_tokens allows {caps[phase]}; raise it, or "
                "use Balance(oversize='own')"
            )
    microbatch, num_microbatches = np.zeros(len(rank), np.int32), 1
    for mine in _by_rank(rank, _lengths(step), step.num_ranks):
        cuts = _Cutter(step, mine).cut()
        microbatch[mine] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        num_microbatches = max(num_microbatches, len(cuts) - 1)
    return Shares(rank, microbatch, num_microbatches)


def _in_blocks(step: StepSamples, most: int, wanted: int | None) -> Iterator[Shares]:
    """All samples from the longest, cut into cells within the caps; `num_ranks` consecutive cells are a micro-step.
    Cells as large as caps allow give the fewest micro-steps; of that number, or the number that is wanted, cells with
    the smallest largest cost give the cheapest. Without those that break a limit on counts, or need more than `most`.
    """
    costs, num_ranks = step.costs["llm"], step.num_ranks
    order = np.lexsort((-_lengths(step), -costs))
    cutter, descending = _Cutter(step, order), costs[order]
    largest_cells = cutter.cut()
    low, high = int(costs.max()), int(costs.max()) * len(order)
    room = (wanted or -(-(len(largest_cells) - 1) // num_ranks)) * num_ranks
    while low < high:  # The least that a cell may cost with no more micro-steps.
        middle = (low + high) // 2
        if len(cutter.cut(middle // descending, room)) - 1 <= room:
            high = middle
        else:
            low = middle + 1
    for cuts in (cutter.cut(low // descending), largest_cells):
        cell = np.empty(len(order), np.int32)
        cell[order] = np.repeat(np.arange(len(cuts) - 1, dtype=np.int32), np.diff(cuts))
        shares = Shares(cell % np.int32(num_ranks), cell // np.int32(num_ranks), -(-(len(cuts) - 1) // num_ranks))
        if shares.num_microbatches <= most and step.keeps_counts(shares.rank):
            yield shares


def _lengths(step: StepSamples) -> Ints:
    """The key by which microbatches are cut: positions of `llm`, or equal ones where it is not capped."""
    return step.sizes.get("llm", np.ones(step.num_samples, np.int64))


class _Cutter:
    """Cuts samples, given from the longest, into microbatches, each as large as the caps allow."""

    def __init__(self, step: StepSamples, order: NDArray[np.intp]) -> None:
        caps = step.balance.caps
        self._rows = caps.get("llm", len(order)) // _lengths(step)[order]
        self._sums = [
            (np.concatenate([[0], np.cumsum(column[order])]), caps[phase])
            for phase, column in step.sizes.items()
            if phase != "llm"
        ]

    def cut(self, most_rows: Ints | None = None, enough: int | None = None) -> list[int]:
        """Where microbatches begin, and the end. `most_rows` are of one that begins with each sample; after `enough`
        microbatches the rest does not matter.
        """
        rows = self._rows if most_rows is None else np.minimum(self._rows, most_rows)
        cuts = [0]
        while (start := cuts[-1]) < len(rows) and (enough is None or len(cuts) <= enough + 1):
            stop = start + int(rows[start])
            for sum_to, cap in self._sums:
                stop = min(stop, int(np.searchsorted(sum_to, sum_to[start] + cap, side="right")) - 1)
            cuts.append(min(max(stop, start + 1), len(rows)))
        return cuts


def _by_rank(rank: Ranks, lengths: Ints, num_ranks: int) -> list[NDArray[np.intp]]:
    """Indices of each rank's samples, from the longest, ties in order."""
    order = np.lexsort((-lengths, rank))
    return np.split(order, np.searchsorted(rank[order], np.arange(1, num_ranks)))
