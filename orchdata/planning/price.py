"""The price of a step: its cost, as ranks wait for each other.

    Balance --price--> StepPrice; loads (num_ranks, num_microbatches) of each phase --StepPrice.of--> cost

Plans, `stats()`, profiles and benchmarks use the same value, so figures measure what the plan minimises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import lower_bound
from orchdata.native.microbatches.pipeline import slowest

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrice:
    """What a step costs, in the unit of its samples' costs.

    A micro-step is the m-th microbatch of all ranks. Where ranks wait for each other after each phase of it, a step
    costs the sum over micro-steps and phases of the largest load of a rank. Where they meet at its end, it costs the
    largest total of a rank, or the makespan of the slowest pipeline. In a pipeline the first stage has all encoders,
    every stage has an equal part of the LLM, and backward takes twice the forward.

    Attributes:
        levels_each_phase: each phase is balanced; else their sum.
        meets_in_micro_steps: ranks wait for each other after each phase of each micro-step.
        num_stages: of the pipeline with the makespan that counts; None where none counts.
    """

    levels_each_phase: bool
    meets_in_micro_steps: bool
    num_stages: int | None

    @property
    def adds_up(self) -> bool:
        """The only microbatch of the only rank costs the sum of its phases."""
        return self.num_stages is None

    def of(self, cells: Sequence[Ints]) -> int:
        """Return the cost of a step.

        Args:
            cells: loads of each phase that counts, encoders before `llm`: int64 (num_ranks, num_microbatches).
        """
        if self.meets_in_micro_steps:
            return sum(int(of_phase.max(axis=0).sum()) for of_phase in cells)
        if self.num_stages is None:
            return int(np.sum([of_phase.sum(axis=1) for of_phase in cells], axis=0).max())
        return int(slowest(*_stages(cells, self.num_stages), self.num_stages))

    def of_even(self, means: Sequence[float], num_microbatches: int) -> float:
        """Return the cost of a step in which all microbatches have the same load in each phase.

        A pipeline can be a little cheaper: small microbatches at both ends fill it sooner.

        Args:
            means: mean load of a rank in each phase, in the order of `of`.
        """
        if self.num_stages is None:
            return sum(means)
        cells = [np.full((1, num_microbatches), mean / num_microbatches) for mean in means]
        return float(slowest(*_stages(cells, self.num_stages), self.num_stages))

    def lower_bound(self, costs: Sequence[Ints], bounds: Sequence[int], num_ranks: int) -> int:
        """Return a cost that no assignment of whole samples goes below, in any number of micro-steps.

        Args:
            costs: int64 (num_samples,) of each phase, in the order of `of`.
            bounds: lower bound of the largest load of each phase.
        """
        if self.meets_in_micro_steps:
            return sum(bounds)
        if self.num_stages is None:
            return max(*bounds, int(lower_bound(np.sum(costs, axis=0), num_ranks)))
        # The first stage does all of its work, forward and twice that backward.
        return 3 * int(lower_bound(self.num_stages * np.sum(costs[:-1], axis=0, dtype=np.int64) + costs[-1], num_ranks))


def _stages(cells: Sequence[NDArray[np.generic]], num_stages: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times of forwards on the first stage and on each other stage: float64, shaped as a phase's loads."""
    work = cells[-1].astype(np.float64)
    return work + num_stages * np.sum([np.zeros_like(work), *cells[:-1]], axis=0), work
