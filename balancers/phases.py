"""Balancing of several phases: costs by phase (num_samples,) each -> one rank per sample, or one per phase.

With one assignment for all phases (joint), a sample's encoder work is on the rank of its backbone work, and any model
runs unchanged. If ranks wait for each other after every phase (barrier), a step takes the sum over phases of the
largest load; if they wait only at its end (sum), the largest sum over phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import (
    MAX_TOTAL,
    Limits,
    assign_jointly,
    checked_caps,
    checked_costs,
    checked_effort,
    checked_flag,
    checked_pins,
    checked_ranks_count,
    checked_sizes,
)
from orchdata.balancers.packed import balance
from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps
from orchdata.native.jit import Ints


@dataclass(frozen=True, slots=True, eq=False)
class PhaseAssignment:
    """Samples of one global batch assigned to ranks, in all phases.

    Attributes:
        phases: names, in the order of the rows below.
        rank: joint: int32 (num_samples,), never -1. per_phase: int32 (num_phases, num_samples), -1 for a sample that
            costs 0 in that phase.
        loads: int64 (num_phases, num_ranks).
        makespans: the largest load of each phase.
        lower_bounds: bound of each makespan if the phase were balanced alone.
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
    sizes: ArrayLike | None = None,
    max_size: int | ArrayLike | None = None,
    effort: float = 1.0,
    pinned: ArrayLike | None = None,
) -> PhaseAssignment:
    """Assign samples to ranks so that a step over all phases takes as little as a quick search finds.

    Joint under `barrier` is never worse than balancing the primary phase alone. Per phase, each phase is balanced
    alone; the two objectives then give the same result.

    Args:
        costs_by_phase: integers (num_samples,) of each phase, in one unit, with a sum over all of at most 2**62.
        num_ranks: at least 1.
        assignment: one rank for each sample, or one for each sample and phase.
        objective: what ranks wait for.
        equal_count: all ranks get the same number of samples (per phase: of those with a cost), give or take one.
        max_samples: largest number of samples on a rank.
        primary: the phase that all samples take part in.
        sizes: integers (num_samples,) or (num_samples, num_caps), with
        max_size: the most that the samples of a rank may sum to, one for each column of sizes; joint `barrier` only.
        effort: factor of the work of the joint search under `barrier`. 1 is 8 * num_ranks * (samples a rank)**2 pairs
            of samples (3 instead of 8 above 16,384 samples): work, not time, so all machines find the same.
        pinned: integers (num_samples,), the rank of a sample that may not move, in all phases, or -1. Counts, sizes,
            loads and bounds include pinned samples.

    Raises:
        ValueError: bad costs or counts, pinned ranks out of range, an unknown option, a sample that costs nothing in
            any phase (joint), or caps within which no assignment was found.
    """
    if assignment not in ("joint", "per_phase"):
        raise ValueError(f"assignment must be 'joint' or 'per_phase', got {assignment!r}")
    if objective not in ("barrier", "sum"):
        raise ValueError(f"objective must be 'barrier' or 'sum', got {objective!r}")
    if (sizes is None) != (max_size is None):
        raise ValueError("sizes and max_size go together: give both, or neither")
    if sizes is not None and (assignment, objective) != ("joint", "barrier"):
        raise ValueError(
            f"sizes are capped in a joint assignment under 'barrier' only, got {assignment!r} under {objective!r}: use"
            " split_microbatches"
        )
    effort = checked_effort(effort, "effort")
    num_ranks = checked_ranks_count(num_ranks)
    equal_count = checked_flag(equal_count, "equal_count")
    names, costs = checked_phases(costs_by_phase, primary)
    if assignment == "per_phase":
        parts = [
            balance(row, num_ranks, equal_count=equal_count, max_samples=max_samples, pinned=pinned) for row in costs
        ]
        rank = np.stack([part.rank for part in parts])
        loads = np.stack([part.loads for part in parts])
        bounds = tuple(part.lower_bound for part in parts)
    else:
        pins = checked_pins(pinned, num_ranks, np.ones(costs.shape[1], np.bool_), max_samples, equal_count)
        by_sample = np.ascontiguousarray(costs.T)
        bounds = tuple(int(bound) for bound in phase_bounds(by_sample, num_ranks, pins))
        columns, caps = np.empty((costs.shape[1], 0), np.int64), np.empty(0, np.int64)
        if sizes is not None and max_size is not None:
            columns = checked_sizes(sizes, costs.shape[1])
            caps = checked_caps(max_size, columns.shape[1])
        apart = objective == "barrier"
        rank = assign_jointly(
            costs if apart else costs.sum(axis=0)[None, :],
            np.array([num_ranks]),
            names.index(primary) if apart else 0,
            Limits(columns, caps, None, pins),
            equal_count=equal_count,
            max_samples=max_samples,
            effort=effort,
        )
        if above_caps(columns, caps, rank, num_ranks):
            raise ValueError(
                f"no assignment to {num_ranks} ranks within max_size={caps.tolist()} was found: raise it, or take fewer"
                " samples"
            )
        loads = np.ascontiguousarray(phase_loads(by_sample, rank, num_ranks).T)
    return PhaseAssignment(names, rank, loads, tuple(int(peak) for peak in loads.max(axis=1)), bounds)


def checked_phases(costs_by_phase: Mapping[str, ArrayLike], primary: str) -> tuple[tuple[str, ...], Ints]:
    """Return the names of the phases, `primary` among them, and their costs int64 (num_phases, num_samples)."""
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
