"""Packed and padded balancing: costs or lengths (num_samples,) -> rank of each sample, or first rank of its team.

Without padding the load of a rank is the sum of its samples' costs. Quadratic costs also add up, as packed attention
never crosses samples. Longest-first greedy alone is within a few per cent of the best. Moves and swaps with the
lightest ranks then help the ranks above the tolerance; where ranks have only two to four large samples each, the
capacity is bisected instead. A sequence that costs more than a rank's fair share sets the pace of a step: 2, 4, 8, ...
ranks may share it as a team, each of which pays what one of so many pays.

A padded batch is a rectangle: every row costs as much as its longest one. So samples of about the same length belong
together, and the best assignment can be found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import (
    MAX_TOTAL,
    Assignment,
    checked_costs,
    checked_count,
    checked_flag,
    checked_max_samples,
    checked_phases,
    checked_pins,
    checked_ranks_count,
    checked_tolerance,
    loads_of,
)
from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost, TransformerCost
from orchdata.native.assign.bounds import NO_PINS
from orchdata.native.assign.few import search_few
from orchdata.native.assign.packed import solve
from orchdata.native.assign.padded import solve_padded
from orchdata.native.assign.teams import NEVER, solve_teams
from orchdata.native.costs import sequence_costs
from orchdata.native.jit import Ints


def balance(
    costs: ArrayLike,
    num_ranks: int,
    *,
    equal_count: bool = False,
    max_samples: int | None = None,
    max_cost: int | None = None,
    tolerance: float = 1e-3,
    pinned: ArrayLike | None = None,
) -> Assignment:
    """Assign samples to ranks so that the largest sum of costs is as small as can be found quickly.

    Deterministic to the bit: samples are taken by (cost descending, position), ties go to the lowest load, then count,
    then rank. Permuting the samples does not change the makespan.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62. A sample of cost 0 gets rank -1,
            unless it is pinned.
        num_ranks: at least 1; may exceed the number of samples.
        equal_count: all ranks get the same number of samples (of those that cost anything), give or take one.
        max_samples: largest number of samples on a rank.
        max_cost: largest load of a rank.
        tolerance: stop once makespan <= lower_bound * (1 + tolerance).
        pinned: integers (num_samples,), the rank of a sample that may not move, or -1. Counts, loads and the bound
            include pinned samples.

    Raises:
        ValueError: costs that are not non-negative integers, pinned ranks out of range, or a cap that no assignment
            can respect.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    equal_count = checked_flag(equal_count, "equal_count")
    tolerance = checked_tolerance(tolerance)
    if max_samples is not None:
        max_samples = checked_max_samples(max_samples, int(np.count_nonzero(checked)), num_ranks)
    if max_cost is not None:
        max_cost = min(checked_count(max_cost, "max_cost"), MAX_TOTAL)
    pins = checked_pins(pinned, num_ranks, checked > 0, max_samples, equal_count)
    rank, loads, bound = solve(
        checked, num_ranks, max_samples or max(1, len(checked)), max_cost or 0, equal_count, tolerance, pins
    )
    if len(pins) and loads.max() > bound:
        present = np.flatnonzero(checked)
        costs_here, own, here = checked[present][:, None], rank[present], pins[present]
        limit, extras = divmod(len(present), num_ranks) if equal_count else (max_samples or max(1, len(present)), 0)
        nothing, least = np.empty((len(present), 0), np.int64), np.array([bound])
        search_few(costs_here, nothing, nothing[0], own, here, num_ranks, least, limit, extras)
        rank[present], loads = own, loads_of(costs_here[:, 0], own, num_ranks)
    makespan = int(loads.max())
    if max_cost is not None and makespan > max_cost:
        raise ValueError(
            f"no assignment within max_cost={max_cost} was found: the best has {makespan}, and none is below {bound}: "
            "raise it, or take fewer samples"
        )
    return Assignment(rank, loads, makespan, int(bound))


_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class TeamAssignment(Assignment):
    """Sequences assigned to teams of ranks; `rank` is the first member of each, and `loads` count every member.

    Attributes:
        size: int32 (num_sequences,), the number of ranks that share each: `rank` to `rank + size - 1`.
    """

    size: NDArray[np.int32]


def balance_teams(
    costs: ArrayLike,
    num_ranks: int,
    *,
    sizes: Sequence[int] | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> TeamAssignment:
    """Choose how many ranks share each sequence, and which, so that the largest load is as small as is found quickly.

    A team of s ranks begins at a multiple of s and ends at the last rank or before: 6 ranks have one team of 4 (0 to 3)
    and three of 2. Ranks that no large team has get more of the rest. Where whole sequences come within 0.1 % of the
    lower bound, or as low as teams, nothing is shared, and the result is that of `balance`.

    For a target of the largest load, each sequence gets the size of least work at which it keeps the target (Turek,
    Wolf and Yu 1992). Sizes are placed from the largest, so that a team's ranks are level when it comes; each sequence
    goes into the fullest team in which it keeps the target (as in MULTIFIT; Coffman, Garey and Johnson 1978), and one
    that finds none gets a larger team in the next trial. Targets rise from the lower bound until all sequences fit.
    Deterministic to the bit.

    The lower bound is the smallest T at which, for every size s, the sequences that keep T only at s ranks or more fit
    into floor(num_ranks / s) teams of s, each at the size of its least work that keeps T.

    Args:
        costs: integers (num_sequences, num_sizes), at least 0, what one member pays for each sequence in a team of each
            size, in any unit. A size that costs no less than a smaller one is not taken, so a sequence whose costs are
            all equal stays whole, within `max_tokens`. The largest cost of each, times the largest size, sum to at most
            2**62. A sequence that stays whole and costs 0 gets rank -1.
        num_ranks: at least 1. Sizes above it are not taken.
        sizes: of the columns of `costs`, ascending powers of two from 1; by default 1, 2, 4, ....
        tokens: integers (num_sequences,), the length of each sequence, with
        max_tokens: the most tokens of a slice, which is tokens / size rounded up. It does not cap what a rank gets in
            several sequences: `split_microbatches` does that.

    Raises:
        ValueError: costs that are not non-negative integers, wrong shapes or sizes, or a sequence that no team holds.
    """
    if np.ndim(costs) != 2:
        raise ValueError(f"costs must have a row for each sequence and a column for each size, got {np.shape(costs)}")
    table = checked_phases(costs)
    num_ranks = checked_ranks_count(num_ranks)
    widths = _checked_sizes(sizes, table.shape[1])
    if int(table.max(axis=1).sum()) * int(widths[-1]) > MAX_TOTAL:
        raise ValueError(f"costs sum to more than 2**62 in teams of {widths[-1]}: scale them down")
    if (tokens is None) != (max_tokens is None):
        raise ValueError("tokens and max_tokens go together: give both, or neither")
    widths = widths[widths <= num_ranks]
    table = np.ascontiguousarray(table[:, : len(widths)])
    if tokens is not None and max_tokens is not None:
        lengths, most = checked_costs(tokens, "tokens"), checked_count(max_tokens, "max_tokens")
        if len(lengths) != len(table):
            raise ValueError(f"tokens must have one entry for each of the {len(table)} sequences, got {len(lengths)}")
        longest = int(lengths.max(initial=0))
        if longest > int(widths[-1]) * most:
            raise ValueError(
                f"sequence {int(lengths.argmax())} has {longest} tokens, but the largest team of {widths[-1]} ranks "
                f"holds {int(widths[-1]) * most} with max_tokens={most}: raise it, or take larger teams or more ranks"
            )
        table[-(-lengths[:, None] // widths) > most] = NEVER
    size, rank, loads, bound = solve_teams(table, widths, num_ranks)
    whole = np.ascontiguousarray(table[:, 0])
    if whole.max(initial=0) <= loads.max():
        whole_rank, whole_loads, _ = solve(whole, num_ranks, max(1, len(whole)), 0, False, _TOLERANCE, NO_PINS)
        if (size == 1).all() or whole_loads.max() <= max(loads.max(), bound + int(bound * _TOLERANCE)):
            size, rank, loads = np.ones_like(size), whole_rank, whole_loads
    rank[(size == 1) & (whole == 0)] = -1
    return TeamAssignment(rank, loads, int(loads.max()), int(bound), size)


def _checked_sizes(sizes: Sequence[int] | None, num_sizes: int) -> Ints:
    given = (
        [1 << column for column in range(num_sizes)] if sizes is None else [checked_count(s, "sizes") for s in sizes]
    )
    powers = sorted({s for s in given if s & (s - 1) == 0 and s <= MAX_TOTAL})
    if len(given) != num_sizes or given[0] != 1 or given != powers:
        raise ValueError(
            f"sizes must be ascending powers of two from 1, one for each of {num_sizes} columns of costs, got {given}"
        )
    return np.array(given, np.int64)


def balance_padded(
    lengths: ArrayLike,
    num_ranks: int,
    cost: PhaseCost | TransformerCost,
    *,
    max_samples: int | None = None,
    multiple_of: int = 1,
) -> Assignment:
    """Assign samples to ranks so that the largest count times cost of the longest is the smallest possible.

    Exact. Take any assignment, with ranks sorted by their longest sample, descending. Deal the sorted samples out
    again, consecutively, in the same counts: no rank's longest grows, because the samples of the ranks before it
    cannot be all of those longer than its own longest. So consecutive groups of the sorted samples suffice. Then each
    rank may take as many as its capacity allows, min(max_samples, capacity // cost of the longest left), since leaving
    fewer never hurts the others. The capacity is bisected over the loads that occur.

    Among the assignments with that makespan, it is one with the smallest largest count; within both limits loads are
    levelled, and no rank is empty while there are enough samples. One rank may still get very many short samples where
    lengths differ much: `max_samples` limits that, at a price in makespan.

    Deterministic to the bit: samples are taken by (length descending, position), ranks in turn from 0.

    Args:
        lengths: integers (num_samples,), at least 0: positions of each sample. A sample of length 0 gets rank -1.
        num_ranks: at least 1; may exceed the number of samples.
        cost: of one sequence, on its own scale: loads are those of `CostModel(llm=cost)`.
        max_samples: largest number of samples on a rank.
        multiple_of: lengths are padded up to a multiple of it.

    Returns:
        Assignment: loads with padding, and lower_bound equals makespan.

    Raises:
        ValueError: lengths that are not non-negative integers or too long, loads above 2**62, or a max_samples that
            cannot hold.
    """
    checked = checked_costs(lengths, "lengths")
    num_ranks = checked_ranks_count(num_ranks)
    multiple_of = checked_count(multiple_of, "multiple_of")
    if not isinstance(cost, PhaseCost | TransformerCost):
        raise ValueError(f"cost must be a PhaseCost or a TransformerCost, got {cost!r}")
    coefficients = CostModel(llm=cost).coefficients("llm")
    present = int(np.count_nonzero(checked))
    limit = max(1, present) if max_samples is None else checked_max_samples(max_samples, present, num_ranks)
    if not present:
        multiple_of = 1
    longest = int(checked.max(initial=0))
    # Raises ValueError for a sample that is too long by itself.
    aligned = min(-(-longest // multiple_of) * multiple_of, 1 << 62)
    row = int(sequence_costs(np.array([aligned]), *coefficients)[0])
    if present * row > MAX_TOTAL:
        raise ValueError(
            f"{present} samples padded to lengths[{int(checked.argmax())}] = {longest} cost {present * row} together, "
            "above the limit of 2**62: limit the positions of a sample or take fewer samples"
        )
    rank, loads = solve_padded(checked, num_ranks, limit, multiple_of, coefficients)
    makespan = int(loads.max())
    return Assignment(rank, loads, makespan, makespan)
