"""Padded balancing: lengths (num_samples,) -> rank of each sample, where a rank costs its count times its longest.

A padded batch is a rectangle: every row costs as much as its longest one. So samples of about the same length belong
together, and the best assignment can be found exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import Assignment
from orchdata.balancers.checks import MAX_TOTAL, checked_costs, checked_count, checked_max_samples, checked_ranks_count
from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost
from orchdata.balancers.costs.transformer import TransformerCost
from orchdata.native.assign.padded import solve_padded
from orchdata.native.costs import Coefficients, longest_sequence, sequence_costs


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
    if present:
        _check_longest(checked, present, multiple_of, coefficients)
    else:
        multiple_of = 1
    rank, loads = solve_padded(checked, num_ranks, limit, multiple_of, coefficients)
    makespan = int(loads.max())
    return Assignment(rank, loads, makespan, makespan)


def _check_longest(lengths: NDArray[np.int64], present: int, multiple_of: int, coefficients: Coefficients) -> None:
    """Raise ValueError if the aligned longest sample does not fit int64, or all rows of that length cost over 2**62."""
    longest = int(lengths.max())
    aligned = -(-longest // multiple_of) * multiple_of
    limit = int(longest_sequence(*coefficients))
    if aligned > limit:
        padded = f", {aligned} as a multiple of {multiple_of}" if aligned > longest else ""
        raise ValueError(
            f"lengths[{int(lengths.argmax())}] is {longest}{padded}, above {limit}, the longest with a cost that"
            " fits into int64: limit the positions of a sample"
        )
    row = int(sequence_costs(np.array([aligned]), *coefficients)[0])
    if present * row > MAX_TOTAL:
        raise ValueError(
            f"{present} samples padded to lengths[{int(lengths.argmax())}] = {longest} cost {present * row} together,"
            " above the limit of 2**62: limit the positions of a sample or take fewer samples"
        )
