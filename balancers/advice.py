"""Advice: costs (num_samples,) -> what slows a step under any balancing, and how much each remedy would help.

Two things can: a sample that costs more than the mean load of a rank (all ranks wait for its rank), and too few samples
per rank (whole samples do not fill the ranks evenly). Every remedy is balanced for real, not estimated.
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

# Up to this largest over mean load, no advice is needed.
ENOUGH = 1.02
# Larger steps are not tried.
MAX_FACTOR = 64
MAX_SAMPLES = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """A change, and the result of balancing after it.

    Attributes:
        remedy: samples above the mean load shared by several ranks each, or more samples in every step.
        factor: the most ranks that share a sample; or how many times the samples.
        makespan: the largest load for a step of the present size: that of `factor` times the samples, divided by
            `factor` and rounded up.
        imbalance: largest over mean load.
    """

    remedy: Literal["context parallel", "more samples"]
    factor: int
    makespan: int
    imbalance: float

    @property
    def action(self) -> str:
        """What to do, as text."""
        if self.remedy == "context parallel":
            return f"share each sample above the mean load among up to {self.factor} ranks (context parallelism)"
        return f"take {self.factor} times the samples per rank and step"

    def __str__(self) -> str:
        per_step = ", per step of the present size" if self.remedy == "more samples" else ""
        return f"{self.action}: makespan {self.makespan:,}, {self.imbalance:.3f} x the mean{per_step}"


@dataclass(frozen=True, slots=True)
class Advice:
    """What slows a step, and what would help.

    Attributes:
        makespan: largest load of the balanced step.
        mean: load of a rank with costs spread evenly.
        lower_bound: no assignment of whole samples has a smaller makespan.
        limit: what slows the step most.
        reason: the same as text with numbers.
        giants: positions of the samples that cost more than the mean load, from the largest.
        options: remedies of both kinds, each at 2, 4, 8, ... up to the first that is enough (within 2 % of the mean),
            or to the limit of what is possible (64 times the samples); empty if nothing slows the step.
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
    """Return what slows a step with balanced samples, and what would help.

    A step within 2 % of the mean load needs nothing. Otherwise the limit is the giant sample if the excess of the
    largest sample over an even share of the ranks that can have work is at least half of the excess of the makespan
    over the mean; else it is too few samples.

    Context parallelism of degree d replaces each sample above the mean load by equal pieces on different ranks: the
    smallest number of 2, 4, ... d with pieces within the mean, else d. Communication is not counted. More samples means
    the same costs several times.

    Args:
        costs: integers (num_samples,), at least 0, with a sum of at most 2**62.
        num_ranks: at least 1; may exceed the number of samples.

    Raises:
        ValueError: costs that are not non-negative integers, or num_ranks below 1.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    balanced = balance(checked, num_ranks)
    total = int(checked.sum())
    mean = total / num_ranks
    order = np.argsort(-checked, kind="stable")
    giants = tuple(int(sample) for sample in order[: np.count_nonzero(checked > mean)])
    limit = _limit(checked, num_ranks, balanced)
    options: tuple[Option, ...] = ()
    if limit != "nothing":
        options = (*_shared(checked, num_ranks, mean, balanced), *_repeated(checked, num_ranks, mean, balanced))
    reason = _reason(checked, num_ranks, balanced, limit, giants)
    return Advice(balanced.makespan, mean, balanced.lower_bound, limit, reason, giants, options)


def _limit(
    costs: NDArray[np.int64], num_ranks: int, balanced: Assignment
) -> Literal["nothing", "giant sample", "few samples"]:
    if balanced.imbalance <= ENOUGH:
        return "nothing"
    total, mean = int(costs.sum()), int(costs.sum()) / num_ranks
    even_share = total / min(num_ranks, int(np.count_nonzero(costs)))
    if int(costs.max()) - even_share >= (balanced.makespan - mean) / 2:
        return "giant sample"
    return "few samples"


def _reason(costs: NDArray[np.int64], num_ranks: int, balanced: Assignment, limit: str, giants: tuple[int, ...]) -> str:
    total = int(costs.sum())
    if not total:
        return "no sample costs anything"
    mean, present = total / num_ranks, np.count_nonzero(costs)
    if limit == "nothing":
        return f"the fullest rank holds {balanced.imbalance:.3f} x the mean load"
    least = math.floor(1000 * balanced.lower_bound / mean) / 1000  # Rounded down, so that it stays a bound.
    bound = f"no assignment of whole samples is below {least:.3f} x the mean load"
    if limit == "giant sample":
        largest = (
            f"sample {giants[0]} costs {math.floor(1000 * int(costs[giants[0]]) / mean) / 1000:.3f} x the mean load"
        )
        more = f" ({len(giants):,} samples cost more than the mean)" if len(giants) > 1 else ""
        return f"{largest}{more}; {bound}"
    return (
        f"{present / num_ranks:.2f} samples per rank do not fill the ranks evenly;"
        f" the fullest holds {balanced.imbalance:.3f} x the mean load, and {bound}"
    )


def _shared(costs: NDArray[np.int64], num_ranks: int, mean: float, balanced: Assignment) -> Iterator[Option]:
    """Yield context parallelism of degree 2, 4, ... while it helps, until it is enough."""
    degree, largest, best = 2, int(costs.max()), float(balanced.makespan)
    # Twice the degree that brings the largest sample within the mean would change nothing.
    while degree <= num_ranks and degree * mean < 2 * largest and largest > mean:
        shares = np.ones(len(costs), np.int64)
        while (above := (costs > mean * shares) & (shares < degree)).any():
            shares[above] *= 2
        # In units of 1 / degree, pieces are whole numbers, if int64 has room.
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
    """Return the makespan with each sample in `shares` equal pieces, on different ranks."""
    balanced = balance(np.repeat(costs // shares, shares), num_ranks)
    sample = np.repeat(np.arange(len(costs)), shares)
    shared = (balanced.rank >= 0) & (shares[sample] > 1)
    pairs = sample[shared] * num_ranks + balanced.rank[shared]
    if len(np.unique(pairs)) == len(pairs):
        return balanced.makespan
    # Few samples may put two pieces of one on a rank: then longest first, all pieces of a sample together.
    ranks = [(0, rank) for rank in range(num_ranks)]
    for index in np.argsort(-(costs // shares), kind="stable"):
        piece = int(costs[index] // shares[index])
        for load, rank in [heapq.heappop(ranks) for _ in range(shares[index])]:
            heapq.heappush(ranks, (load + piece, rank))
    return max(ranks)[0]


def _repeated(costs: NDArray[np.int64], num_ranks: int, mean: float, balanced: Assignment) -> Iterator[Option]:
    """Yield 2, 4, ... times the samples while that helps, until it is enough."""
    factor, best = 2, float(balanced.makespan)
    while factor <= MAX_FACTOR and factor * len(costs) <= MAX_SAMPLES and int(costs.sum()) <= MAX_TOTAL // factor:
        makespan = balance(np.tile(costs, factor), num_ranks).makespan
        option = Option("more samples", factor, -(-makespan // factor), makespan / factor / mean)
        if makespan / factor < best:
            best = makespan / factor
            yield option
        if option.imbalance <= ENOUGH:
            return
        factor *= 2
