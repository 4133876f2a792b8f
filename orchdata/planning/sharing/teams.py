"""Sharing out a step whose long sequences several ranks share.

whole samples, as without teams ---------------------------------------------------+
teams of one micro-step, cut into as many as caps and sizes need, the largest first +-> the cheapest, by Balance.price
teams in micro-steps, each filled up to a load ------------------------------------+
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL, lower_bound
from orchdata.balancers.microbatches import split_microbatches
from orchdata.balancers.phases import balance_phases
from orchdata.native.assign.teams import NEVER, PARTS, fill_micro_steps, least_works, solve_teams
from orchdata.native.microbatches.micro_steps import bins_cost, deal_cells, packing_orders
from orchdata.native.sorting import descending_order
from orchdata.planning.balance import Balance, StepTeams, Teams
from orchdata.planning.sharing.accumulated import SAMPLES, counted, share_out_in
from orchdata.planning.sharing.micro_steps import MANY_SAMPLES, balanced_inside
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Shares, StepSamples, one_microbatch

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_MORE_STEPS = 5  # Micro-steps more than the fewest that are tried, each with
_ABOVE = (0, 200, 500, 1000, 2000)  # loads of so many parts above an even share of the work,
_FURTHER = (*_ABOVE, 4000, 7000, PARTS, 2 * PARTS)  # or where their number is given, and
_LONGEST = (PARTS, 11_000, 12_000, 13_000, 15_000, 17_500, 20_000, 25_000)  # parts of what the longest costs.
_BALANCED = 3  # Ways with the lowest estimates are balanced.
_SHORT = 8  # Sequences below this part of an even share of a micro-step are not shared,
_MOST_LONG = 1024  # nor more of them that are within the caps.
_ABOVE_MANY = 5  # Of many samples every so many load is tried.
_DEAL_BITS = 40  # Costs are dealt in so many bits.


def share_in_teams(
    step: StepSamples,
    teams: Teams,
    exponent: int,
    accumulate: int,
    may_share: NDArray[np.bool_],
    multiple_of: int = 1,
) -> Shares:
    """Return ranks and microbatches, with teams where these lower the price by `Teams.gain` or a sample is above a cap.
    `may_share`: samples without media where these are encoded with their sample. Slices are padded to `multiple_of`.
    Raises ValueError for a sample that no team holds within its cap, or too few micro-steps.
    """

    def whole() -> Shares:
        return share_out_in(step, NO_PADDING, accumulate) if accumulate > 1 else NO_PADDING.share_out(step)

    step = replace(step, balance=without_teams(step.balance, multiple_of))
    ways = _Ways(step, teams, exponent, accumulate, may_share, multiple_of)
    if ways.sizes[-1] == 1:
        return whole()
    must, keeps, found = bool((ways.table[:, 0] == NEVER).any()), 1 - teams.gain, None
    bounds = [int(lower_bound(costs, step.num_ranks)) for costs in step.costs.values()]
    least = step.balance.price.lower_bound(list(step.costs.values()), bounds, step.num_ranks)
    # Whole samples may come down to `least`: where teams could not gain on that, see how far they do.
    if not must and ways.lower_bound > keeps * least:
        found = whole()
        least = step.price(found)
        if ways.lower_bound > keeps * least:
            return found
    shared = min(ways.found(), key=lambda way: (way[0], way[1].num_microbatches), default=None)
    if shared is not None and (must or shared[0] <= keeps * least):
        return shared[1]
    found = found or whole()
    return found if shared is None or shared[0] > keeps * step.price(found) else shared[1]


def without_teams(balance: Balance, multiple_of: int) -> Balance:
    """Return the same for whole samples: they fill what slices, each rounded up, leave of the rounded cap."""
    caps = {phase: cap - (cap % multiple_of if phase == "llm" else 0) or cap for phase, cap in balance.caps.items()}
    return replace(balance, teams=None, max_tokens=caps or None)


class _Ways:
    """Ways to share out a step in teams. `step` has the samples as if all were whole, and where the number of
    micro-steps is given, a cap on those of a cell.
    """

    def __init__(
        self,
        step: StepSamples,
        teams: Teams,
        exponent: int,
        number: int,
        may_share: NDArray[np.bool_],
        multiple_of: int,
    ) -> None:
        self.step, self.number, self.mixed = counted(step, number) if number > 1 else step, number, teams.mixed
        self.sizes, cap = teams.sizes(step.num_ranks), step.balance.caps.get("llm", MAX_TOTAL)
        # What a member pays at each size, NEVER if a sample cannot take it, and tokens of its slice, at most the cap:
        # int64 (n, num_sizes).
        self.table = teams.member_costs(step.costs["llm"], step.positions, self.sizes, exponent)
        self.table[~may_share, 1:] = NEVER
        self.slices = -(-step.positions[:, None] // (self.sizes * multiple_of)) * multiple_of
        above = (self.slices > cap) & may_share[:, None]
        oversize = above[:, -1].copy()
        if oversize.any() and step.balance.oversize != "own":
            longest = int(step.positions[oversize].max())
            ranks = 1 << (-(-longest // cap) - 1).bit_length()
            raise ValueError(
                f"a sample has {longest} tokens: with max_tokens={cap} it needs a team of {ranks} ranks, and the teams "
                f"of {step.num_ranks} ranks have at most {self.sizes[-1]}. Take {ranks} ranks or more, or raise "
                "max_tokens"
            )
        above[oversize, -1] = False
        self.table[above] = NEVER
        self.slices[may_share] = np.minimum(self.slices[may_share], cap)

    @cached_property
    def lower_bound(self) -> int:
        """No plan costs less."""
        encoders = [costs for phase, costs in self.step.costs.items() if phase != "llm"]
        meets, whole = self.step.balance.price.meets_in_micro_steps, self._teams(np.ones(len(self.table), np.int32))
        return whole.cost_bound(self.step.num_ranks, encoders, meets=meets)

    def _teams(self, size: Ranks) -> StepTeams:
        return StepTeams(size, self.sizes, self.table)

    def found(self) -> Iterator[tuple[int, Shares]]:
        """Yield (price, ranks, microbatches and teams) of ways that share something; of many samples, the first."""
        ways = [self._filled, self._largest_first] if self.step.sizes or not self.mixed else [self._largest_first]
        for way in ways if self.step.meets_in_micro_steps else ways[::-1]:
            found = list(way())
            yield from found
            if found and self.step.num_samples > MANY_SAMPLES:
                return

    @cached_property
    def _balanced(self) -> tuple[Ranks, Ranks, int]:
        """Sizes and first ranks as if there was one micro-step, int32 (n,) each, and the largest load."""
        table = self.table.copy()
        if not self.step.balance.price.levels_each_phase:
            encoders = self.step.total_costs - self.step.costs["llm"]
            table[:, 0] += np.where(table[:, 0] == NEVER, 0, encoders)
        size, rank, loads, _ = solve_teams(table, self.sizes, self.step.num_ranks)
        return size, rank, int(loads.max())

    def _largest_first(self) -> Iterator[tuple[int, Shares]]:
        """Yield teams of one micro-step, cut into as many as caps and sizes need."""
        size, rank, _ = self._balanced
        step, owner, pinned = self._members(size, rank)
        if not (size > 1).any():
            return
        if self.mixed and not step.sizes:
            if len(step.costs) > 1 and step.balance.price.levels_each_phase:
                owner = balance_phases(step.costs, step.num_ranks, effort=step.balance.effort, pinned=pinned).rank
            yield self._priced(step, one_microbatch(owner), size)
            return

        # Each team goes into the first micro-step with room, after all of larger ones if sizes must not mix.
        tokens, cap = self._teams(size).own(self.slices), step.balance.caps.get("llm", MAX_TOTAL)
        filled = np.zeros((1 + int(np.count_nonzero(size > 1)), step.num_ranks), np.int64)
        microbatch, first = np.zeros_like(rank), np.zeros(step.num_ranks, np.int64)
        for width in self.sizes[:0:-1].tolist():
            last = first.copy()
            for sample in np.flatnonzero(size == width):
                ranks, at = slice(rank[sample], rank[sample] + width), int(first[rank[sample]])
                while filled[at, rank[sample]] + tokens[sample] > cap:
                    at += 1
                filled[at, ranks] += tokens[sample]
                microbatch[sample], last[ranks] = at, np.maximum(last[ranks], at if self.mixed else at + 1)
            first = last

        # Each rank's whole samples go next to them, where they level the cost, and into more micro-steps if needed.
        stay = np.where(pinned < 0, np.int32(-1), np.repeat(microbatch, size))
        sizes, caps = self._columns(step, pinned, stay)
        wanted = self.number if self.number > 1 else None
        with contextlib.suppress(ValueError):  # The number that is wanted may be too small.
            if wanted:
                most, total = step.balance.caps[SAMPLES] * wanted, {"llm": step.total_costs}
                kept = balance_phases(total, step.num_ranks, sizes=step.sizes[SAMPLES], max_size=most, pinned=pinned)
                owner = kept.rank
            cut, number = split_microbatches(
                step.total_costs,
                owner,
                step.num_ranks,
                sizes=sizes,
                max_size=caps,
                num_microbatches=wanted,
                pinned=stay,
            )
            yield self._priced(step, Shares(owner, cut, number), size)

    def _filled(self) -> Iterator[tuple[int, Shares]]:
        """Yield ways to fill micro-steps up to a load, or more where the longest sequence costs more."""
        step, num_ranks, works = self.step, self.step.num_ranks, least_works(self.table, self.sizes)
        caps = {phase: step.balance.caps[phase] for phase in step.sizes}
        fewest = max([1, *(-(-int(sizes.sum()) // (caps[phase] * num_ranks)) for phase, sizes in step.sizes.items())])
        given = self.number if self.number > 1 or not caps else None
        even = int(works.sum()) // num_ranks + 1
        many = step.num_samples > MANY_SAMPLES
        if given is None:
            numbers = np.arange(fewest, fewest + _MORE_STEPS)[:, None]
            groups = list(even * (PARTS + np.array(_ABOVE)) // (numbers * PARTS) + 1)
            groups = [np.concatenate(groups)[:: _ABOVE_MANY if many else 1], *([] if many else groups)]
        else:
            groups = list((even * (PARTS + np.array(_FURTHER)) // (given * PARTS) + 1)[:, None])
        # Sequences that may be shared, from the most work; the others fill the gaps.
        is_long = (self.table[:, 0] > even // (_SHORT * (given or fewest + 1))) & (self.table[:, 1:] < NEVER).any(
            axis=1
        )
        most_work = np.partition(works[is_long], -_MOST_LONG)[-_MOST_LONG] if is_long.sum() > _MOST_LONG else 0
        is_long &= (works >= most_work) | (self.table[:, 0] == NEVER)
        long = np.flatnonzero(is_long)[descending_order(works[is_long])]
        table, slices = self.table[long], self.slices[long]
        rest = int(self.table[~is_long, 0].sum()), int(step.positions[~is_long].sum())
        room = np.array([caps.get("llm", MAX_TOTAL), caps.get(SAMPLES, MAX_TOTAL)])
        ways: dict[tuple[int, int], tuple[NDArray[np.intp], Ints, Ints]] = {}
        while groups:
            for targets in groups:
                estimate, placed, aims = fill_micro_steps(
                    *(table, slices, self.sizes, num_ranks, room, targets, np.array(_LONGEST)),
                    *(given or MAX_TOTAL, self.mixed, rest),
                )
                if estimate >= 0 and (placed[0] > 1).any():
                    ways.setdefault((int(estimate), len(aims)), (long, placed, aims))
            groups = [2 * groups[-1]] if not ways and groups[-1].max() < even * num_ranks else []
        if fewest == 1 and self.mixed:
            size, rank, peak = self._balanced
            if len(shared := np.flatnonzero(size > 1)):
                placed = np.stack([size, rank, np.zeros_like(rank)]).astype(np.int64)[:, shared]
                ways[peak, 0] = shared, placed, np.array([peak])
        for key in sorted(ways)[: 1 if many else _BALANCED]:
            (at, placed, aims), whole = ways[key], np.array([[1], [-1], [-1]], np.int32)
            size, rank, microbatch = (found := np.repeat(whole, step.num_samples, axis=1))
            found[:, at] = placed
            members, owner, pinned = self._members(size, rank)
            stay, number = np.repeat(microbatch, size), given or max(len(aims), fewest)
            for more in range(1 if given else _MORE_STEPS):
                dealt, is_late = self._dealt(members, owner, pinned, stay, aims, number + more)
                if dealt is not None:
                    yield self._priced(members, dealt, size)
                if not is_late:
                    break

    def _dealt(
        self, step: StepSamples, owner: Ranks, pinned: Ranks, stay: Ranks, aims: Ints, number: int
    ) -> tuple[Shares | None, bool]:
        """Deal members without a micro-step, -1 in `stay`, within the caps and if possible up to the aims; balance.
        Return (shares, None if the caps are not kept; whether some do not fit within the aims).
        """
        columns, caps = self._columns(step, pinned, stay)
        free, at = np.flatnonzero(stay < 0), np.flatnonzero(stay >= 0)
        # The load is one more size, in fewer bits. Micro-steps with lower aims hold the difference.
        shift = max(0, int(aims.max()).bit_length() - _DEAL_BITS)
        top = np.int64(aims.max() >> shift) + 1
        loads = np.minimum((step.costs["llm"] >> shift) + 1, top)
        sizes, limits = np.column_stack([columns, loads]), np.append(caps, top)
        held = np.zeros((number, step.num_ranks, len(limits)), np.int64)
        np.add.at(held, (stay[at], owner[at]), sizes[at])
        if (held[:, :, :-1] > caps).any():
            return None, False
        held[: len(aims), :, -1] += (top - (aims >> shift))[:, None]
        best, least, is_late = None, MAX_TOTAL, True
        for order in packing_orders(step.by_sample[free], sizes[free], len(step.costs) - 1):
            bins, rank = np.empty((2, len(free)), np.int32)
            into = (number, step.num_ranks, bins, rank)
            late = deal_cells(order, sizes[free], limits, limits * step.num_ranks, *into, held)
            if late:
                full, last = held[:, :, :-1].copy(), order[bins[order] < 0]
                np.add.at(full, (bins[bins >= 0], rank[bins >= 0]), columns[free[bins >= 0]])
                if deal_cells(last, columns[free], caps, caps * step.num_ranks, *into, full):
                    continue
            dealt = Shares(owner.copy(), stay.copy(), number)
            dealt.rank[free], dealt.microbatch[free] = rank, bins
            cost = int(bins_cost(step.by_sample, dealt.microbatch, number, step.num_ranks))
            if cost < least:
                best, least, is_late = dealt, cost, late > 0
        return best and balanced_inside(step, best, (columns, caps), pinned=pinned), is_late

    def _members(self, size: Ranks, rank: Ranks) -> tuple[StepSamples, Ranks, Ranks]:
        """Return the members of all teams as a step in which nothing is shared, their ranks, and those of which may not
        move, or -1.
        """
        step, of = self.step, self._teams(size)
        sample, owner = of.members(rank)
        is_shared, taken = (size > 1)[sample], {"llm": of.own(self.slices)[sample]}
        is_first = owner == rank[sample]
        sizes = {
            phase: np.where(is_shared, taken.get(phase, is_first * column[sample]), column[sample])
            for phase, column in step.sizes.items()
        }
        members = replace(
            step,
            costs={**{phase: costs[sample] for phase, costs in step.costs.items()}, "llm": of.member_costs[sample]},
            sizes=sizes,
            positions=step.positions[sample],
            stream_rank=step.stream_rank[sample],
            balance=replace(step.balance, max_samples=None),
        )
        return members, owner, np.where(is_shared, owner, np.int32(-1))

    def _columns(self, step: StepSamples, pinned: Ranks, stay: Ranks) -> tuple[Ints, Ints]:
        """Return sizes and caps of members; without `Teams.mixed`, a slice is as much as all whole samples."""
        columns, caps = step.capped if step.sizes else (np.empty((len(pinned), 0), np.int64), np.empty(0, np.int64))
        if self.mixed:
            return columns, caps
        alone = np.where(pinned < 0, 1, 0)
        at = np.flatnonzero(pinned >= 0)
        alone[at[np.unique(stay[at] * np.int64(step.num_ranks) + pinned[at], return_index=True)[1]]] = len(pinned)
        return np.column_stack([columns, alone]), np.append(caps, len(pinned))

    def _priced(self, members: StepSamples, shares: Shares, size: Ranks) -> tuple[int, Shares]:
        first = np.cumsum(size) - size
        own = Shares(shares.rank[first], shares.microbatch[first], shares.num_microbatches, self._teams(size))
        return members.price(shares), own
