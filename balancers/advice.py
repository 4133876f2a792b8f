"""Advice: costs (num_samples,) -> what holds a step back however it is balanced, and what would help by how much.

Two things can: a sample that costs more than the mean load of a rank (whoever holds it is waited for), and too few
samples per rank (whole samples do not fill the ranks evenly). Every remedy is balanced for real, not estimated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import Assignment
from orchdata.balancers.checks import MAX_TOTAL, checked_costs, checked_ranks_count
from orchdata.balancers.packed import balance

# Largest over mean load that needs no advice.
ENOUGH = 1.02
# Larger steps are not tried.
MAX_FACTOR = 64
MAX_SAMPLES = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """Something to change, and what balancing gives then.

    Attributes:
        remedy: samples above the mean load shared by several ranks each, or more samples in every step.
        factor: the most ranks that share a sample; or how many times the samples.
        makespan: the largest load, as of a step of the present size: that of `factor` times the samples, divided by
            `factor` and rounded up.
        imbalance: largest over mean load.
    """

    remedy: Literal["context parallel", "more samples"]
    factor: int
    makespan: int
    imbalance: float

    @property
    def action(self) -> str:
        """What to do, in words."""
        if self.remedy == "context parallel":
            return f"share each sample above the mean load among up to {self.factor} ranks (context parallelism)"
        return f"take {self.factor} times the samples per rank and step"

    def __str__(self) -> str:
        per_step = ", per step of the present size" if self.remedy == "more samples" else ""
        return f"{self.action}: makespan {self.makespan:,}, {self.imbalance:.3f} x the mean{per_step}"


@dataclass(frozen=True, slots=True)
class Advice:
    """What holds a step back, and what would help.

    Attributes:
        makespan: largest load as balanced now.
        mean: load of a rank if it were spread evenly.
        lower_bound: no assignment of whole samples has a smaller makespan.
        limit: what holds the step back most.
        reason: that in words and numbers.
        giants: positions of the samples that cost more than the mean load, from the largest.
        options: remedies of both kinds, each at 2, 4, 8, ... up to the first that is enough (within 2 % of the mean),
            or to what is possible (64 times the samples); none where nothing holds the step back.
    """

    makespan: int
    mean: float
    lower_bound: int
    limit: Literal["nothing", "giant sample", "few samples"]
    reason: str
    giants: tuple[int, ...]
    options: tuple[Option, ...]

    def __str__(self) -> str:
        lines = [
            f"makespan {self.makespan:,}, mean {self.mean:,.1f}, lower bound {self.lower_bound:,}",
            f"{self.limit} {'holds' if self.limit != 'few samples' else 'hold'} the step back: {self.reason}",
            *(f"- {option}" for option in self.options),
        ]
        return "\n".join(lines)


def advise(costs: ArrayLike, num_ranks: int) -> Advice:
    """Say what holds a step back when its samples are balanced, and what would help.

    A step within 2 % of the mean load needs nothing. Otherwise the giant is to blame where the largest sample, above
    an even share of the ranks that can have work, makes up at least half of what the makespan is above the mean; else
    there are too few samples.

    Context parallelism of degree d replaces each sample above the mean load by equal pieces on different ranks: the
    fewest of 2, 4, ... d whose pieces are within the mean, else d. What ranks then tell each other is not counted. More
    samples means the same costs several times over.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62.
        num_ranks: at least 1; may exceed the number of samples.

    Raises:
        ValueError: costs that are not non-negative integers, or num_ranks below 1.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    found = balance(checked, num_ranks)
    total = int(checked.sum())
    mean = total / num_ranks
    order = np.argsort(-checked, kind="stable")
    giants = tuple(int(sample) for sample in order[: np.count_nonzero(checked > mean)])
    limit = _limit(checked, num_ranks, found)
    options: tuple[Option, ...] = ()
    if limit != "nothing":
        options = (*_shared(checked, num_ranks, mean, found), *_repeated(checked, num_ranks, mean, found))
    reason = _reason(checked, num_ranks, found, limit, giants)
    return Advice(found.makespan, mean, found.lower_bound, limit, reason, giants, options)


def _limit(
    costs: NDArray[np.int64], num_ranks: int, found: Assignment
) -> Literal["nothing", "giant sample", "few samples"]:
    if found.imbalance <= ENOUGH:
        return "nothing"
    total, mean = int(costs.sum()), int(costs.sum()) / num_ranks
    even_share = total / min(num_ranks, int(np.count_nonzero(costs)))
    if int(costs.max()) - even_share >= (found.makespan - mean) / 2:
        return "giant sample"
    return "few samples"


def _reason(costs: NDArray[np.int64], num_ranks: int, found: Assignment, limit: str, giants: tuple[int, ...]) -> str:
    total = int(costs.sum())
    if not total:
        return "no sample costs anything"
    mean, present = total / num_ranks, np.count_nonzero(costs)
    if limit == "nothing":
        return f"the fullest rank holds {found.imbalance:.3f} x the mean load"
    least = math.floor(1000 * found.lower_bound / mean) / 1000  # Rounded down, so that it stays a bound.
    bound = f"no assignment of whole samples is below {least:.3f} x the mean load"
    if limit == "giant sample":
        largest = (
            f"sample {giants[0]} costs {math.floor(1000 * int(costs[giants[0]]) / mean) / 1000:.3f} x the mean load"
        )
        more = f" ({len(giants):,} samples cost more than the mean)" if len(giants) > 1 else ""
        return f"{largest}{more}; {bound}"
    return (
        f"{present / num_ranks:.2f} samples per rank do not fill the ranks evenly;"
        f" the fullest holds {found.imbalance:.3f} x the mean load, and {bound}"
    )


def _shared(costs: NDArray[np.int64], num_ranks: int, mean: float, found: Assignment) -> Iterator[Option]:
    """Context parallelism of degree 2, 4, ... as long as it helps, until that is enough."""
    degree, largest, best = 2, int(costs.max()), float(found.makespan)
    # At twice the degree that brings the largest within the mean nothing would change.
    while degree <= num_ranks and degree * mean < 2 * largest and largest > mean:
        shares = np.ones(len(costs), np.int64)
        while (above := (costs > mean * shares) & (shares < degree)).any():
            shares[above] *= 2
        # In units of 1 / degree pieces are whole, where there is room for that.
        unit = degree if int(costs.sum()) <= MAX_TOTAL // degree else 1
        makespan = _makespan_apart(costs * unit, shares, num_ranks)
        option = Option("context parallel", degree, -(-makespan // unit), makespan / unit / mean)
        if makespan < best * unit:
            best = makespan / unit
            yield option
        if option.imbalance <= ENOUGH:
            return
        degree *= 2


def _makespan_apart(costs: NDArray[np.int64], shares: NDArray[np.int64], num_ranks: int) -> int:
    """Makespan with each sample in equal pieces, as many as `shares` says, on different ranks."""
    found = balance(np.repeat(costs // shares, shares), num_ranks)
    sample = np.repeat(np.arange(len(costs)), shares)
    shared = (found.rank >= 0) & (shares[sample] > 1)
    places = sample[shared] * num_ranks + found.rank[shared]
    if len(np.unique(places)) == len(places):
        return found.makespan
    # Two pieces of a sample met, as they may where samples are few: longest first, all pieces of a sample in one go.
    ranks = [(0, rank) for rank in range(num_ranks)]
    for index in np.argsort(-(costs // shares), kind="stable"):
        piece = int(costs[index] // shares[index])
        for load, rank in [heapq.heappop(ranks) for _ in range(shares[index])]:
            heapq.heappush(ranks, (load + piece, rank))
    return max(ranks)[0]


def _repeated(costs: NDArray[np.int64], num_ranks: int, mean: float, found: Assignment) -> Iterator[Option]:
    """2, 4, ... times the samples where that helps, until it is enough."""
    factor, best = 2, float(found.makespan)
    while factor <= MAX_FACTOR and factor * len(costs) <= MAX_SAMPLES and int(costs.sum()) <= MAX_TOTAL // factor:
        makespan = balance(np.tile(costs, factor), num_ranks).makespan
        option = Option("more samples", factor, -(-makespan // factor), makespan / factor / mean)
        if makespan / factor < best:
            best = makespan / factor
            yield option
        if option.imbalance <= ENOUGH:
            return
        factor *= 2
