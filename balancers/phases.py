"""Balancing of several phases: costs by phase (num_samples,) each -> one rank per sample, or one per phase.

With one assignment for all phases (joint), a sample's encoder work is done where its backbone work is, and any model
runs unchanged. Where ranks wait for each other after every phase (barrier), a step takes the sum over phases of the
largest load; where they only wait at its end (sum), the largest sum over phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.balancers.checks import MAX_TOTAL, checked_costs, checked_flag, checked_ranks_count
from orchdata.balancers.packed import balance
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import solve_barrier


@dataclass(frozen=True, slots=True, eq=False)
class PhaseAssignment:
    """Samples of one global batch assigned to ranks, in all phases.

    Attributes:
        phases: names, in the order of the rows below.
        rank: joint: int32 (num_samples,), never -1. per_phase: int32 (num_phases, num_samples), -1 for a sample that
            costs 0 in that phase.
        loads: int64 (num_phases, num_ranks).
        makespans: the largest load of each phase.
        lower_bounds: the smallest each could be if the phase were balanced alone.
    """

    phases: tuple[str, ...]
    rank: NDArray[np.int32]
    loads: NDArray[np.int64]
    makespans: tuple[int, ...]
    lower_bounds: tuple[int, ...]

    @property
    def imbalances(self) -> tuple[float, ...]:
        """Largest over mean load of each phase; 1.0 for a phase without any load."""
        totals = [int(total) for total in self.loads.sum(axis=1)]
        return tuple(
            peak * self.loads.shape[1] / total if total else 1.0
            for peak, total in zip(self.makespans, totals, strict=True)
        )


def balance_phases(
    costs_by_phase: Mapping[str, ArrayLike],
    num_ranks: int,
    *,
    assignment: Literal["joint", "per_phase"] = "joint",
    objective: Literal["barrier", "sum"] = "barrier",
    equal_count: bool = False,
    max_samples: int | None = None,
    primary: str = "llm",
) -> PhaseAssignment:
    """Assign samples to ranks so that a step over all phases takes as little as can be found quickly.

    Joint under `barrier` is never worse than balancing the primary phase alone. Per phase, each phase is balanced
    alone; the two objectives then give the same.

    Args:
        costs_by_phase: integers (num_samples,) of each phase, in one unit, with a sum over all of at most 2**62.
        num_ranks: at least 1.
        assignment: one rank for each sample, or one for each sample and phase.
        objective: what ranks wait for.
        equal_count: all ranks hold the same number of samples (per phase: of those with a cost), give or take one.
        max_samples: largest number of samples on a rank.
        primary: the phase all samples take part in.

    Raises:
        ValueError: bad costs or counts, an unknown option, or a sample that costs nothing in any phase (joint).
    """
    if assignment not in ("joint", "per_phase"):
        raise ValueError(f"assignment must be 'joint' or 'per_phase', got {assignment!r}")
    if objective not in ("barrier", "sum"):
        raise ValueError(f"objective must be 'barrier' or 'sum', got {objective!r}")
    num_ranks = checked_ranks_count(num_ranks)
    equal_count = checked_flag(equal_count, "equal_count")
    names, costs = checked_phases(costs_by_phase, primary)
    if assignment == "per_phase":
        parts = [balance(row, num_ranks, equal_count=equal_count, max_samples=max_samples) for row in costs]
        rank = np.stack([part.rank for part in parts])
        loads = np.stack([part.loads for part in parts])
        bounds = tuple(part.lower_bound for part in parts)
    else:
        bounds = tuple(lower_bound(row, num_ranks) for row in costs)
        rank = _joint(costs, bounds, num_ranks, objective, equal_count, max_samples, names.index(primary))
        loads = np.ascontiguousarray(phase_loads(np.ascontiguousarray(costs.T), rank, num_ranks).T)
    return PhaseAssignment(names, rank, loads, tuple(int(peak) for peak in loads.max(axis=1)), bounds)


def checked_phases(costs_by_phase: Mapping[str, ArrayLike], primary: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Names of the phases, `primary` among them, and their costs int64 (num_phases, num_samples)."""
    if not isinstance(costs_by_phase, Mapping):
        raise ValueError(f"costs_by_phase must map names of phases to costs, got {type(costs_by_phase).__name__}")
    names = tuple(costs_by_phase)
    if primary not in names:
        raise ValueError(
            f"costs_by_phase needs the primary phase {primary!r}, got {', '.join(map(str, names)) or 'no phase'}: "
            "name yours with primary="
        )
    rows = [checked_costs(costs_by_phase[name], f"costs of {name}") for name in names]
    lengths = {name: len(row) for name, row in zip(names, rows, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all phases must have one cost for each sample, got {lengths}")
    total = sum(int(row.sum()) for row in rows)
    if total > MAX_TOTAL:
        raise ValueError(f"costs of all phases sum to {total}, above the limit of 2**62: scale them down")
    return names, np.stack(rows)


def _joint(
    costs: NDArray[np.int64],
    bounds: tuple[int, ...],
    num_ranks: int,
    objective: str,
    equal_count: bool,
    max_samples: int | None,
    primary: int,
) -> NDArray[np.int32]:
    together = costs.sum(axis=0)
    if not together.all():
        raise ValueError(f"sample {int((together == 0).argmax())} costs 0 in every phase: leave it out, or cost it 1")
    if objective == "sum" or len(costs) == 1:
        return balance(together, num_ranks, equal_count=equal_count, max_samples=max_samples).rank
    # Samples without a primary cost still need a rank.
    alone = balance(np.maximum(costs[primary], 1), num_ranks, equal_count=equal_count, max_samples=max_samples)
    num_samples = len(together)
    limit, extras = (max_samples or num_samples), 0
    if equal_count:
        limit, extras = divmod(num_samples, num_ranks)
    rank: NDArray[np.int32] = solve_barrier(
        np.ascontiguousarray(costs.T),
        alone.rank,
        num_ranks,
        primary,
        np.array(bounds, np.int64),
        limit,
        extras,
        equal_count,
    )
    return rank
