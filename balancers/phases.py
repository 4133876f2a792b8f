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
    checked_caps,
    checked_costs,
    checked_effort,
    checked_flag,
    checked_max_samples,
    checked_pins,
    checked_ranks_count,
    checked_sizes,
)
from orchdata.balancers.packed import balance
from orchdata.native.assign.bounds import phase_bounds
from orchdata.native.assign.few import FEW_FREE, search_few
from orchdata.native.assign.packed import solve
from orchdata.native.assign.phase_refine import phase_loads
from orchdata.native.assign.phases import above_caps, solve_joint
from orchdata.native.jit import Ints, Ints32
from orchdata.native.microbatches.within_caps import FEW, solve_within, start_within

_FEW_SAMPLES = 2048  # Up to this number, the primary phase alone is balanced as a start, although another is known.
PAIRS, PAIRS_OF_MANY = 8, 3  # The joint search looks at this many pairs for each pair of samples that share a rank.
GOOD, GOOD_OF_MANY = 1000, 200  # The search ends when peaks are at most this part above their bounds.
_MANY_SAMPLES = 16_384


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
        pins = None
        if pinned is not None:
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
            equal_count=equal_count,
            max_samples=max_samples,
            primary=names.index(primary) if apart else 0,
            sizes=columns,
            caps=caps,
            effort=effort,
            pinned=pins,
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


def assign_jointly(
    costs: Ints,
    group_sizes: Ints,
    *,
    group: Ints | None = None,
    equal_count: bool,
    max_samples: int | None,
    primary: int,
    sizes: Ints,
    caps: Ints,
    within: Ints32 | None = None,
    effort: float,
    pinned: Ints32 | None = None,
) -> Ints32:
    """Return one rank for each sample, int32 (num_samples,): `balance_phases` of checked arguments, costs (num_phases,
    num_samples), in groups of so many consecutive ranks; `group` is that of each sample, None for a single one. The
    result keeps the caps if `within` does, else if the search finds a way.
    """
    together = costs.sum(axis=0)
    if not together.all():
        raise ValueError(
            f"sample {int((together == 0).argmax())} costs 0 in every phase: leave it out, or give it a cost of 1"
        )
    num_samples, num_ranks = len(together), int(group_sizes.sum())
    order, offsets, first = _grouped(group, group_sizes, num_samples, max_samples)
    by_sample, weights = np.ascontiguousarray(costs.T[order]), np.ascontiguousarray(sizes[order])
    most = max_samples or max(1, num_samples)
    kept = np.empty(0, np.int32) if within is None else within[order] - first
    own = kept
    if within is None or num_samples <= _FEW_SAMPLES * len(group_sizes):
        own = _alone(np.maximum(by_sample[:, primary], 1), offsets, group_sizes, most, equal_count, pinned)
    if len(costs) > 1 or len(caps):
        # (Part above the bounds at which peaks are good enough, pairs to look at) of a joint search.
        good, pairs = (GOOD_OF_MANY, PAIRS_OF_MANY) if num_samples > _MANY_SAMPLES else (GOOD, PAIRS)
        limits = max(1, round(min(good * effort, MAX_TOTAL))), pairs * effort
        free_counts = max_samples is None and not equal_count
        # Next to few pinned samples that nearly fill ranks, what ignores the caps cannot be brought within them.
        is_tight = len(caps) > 0 and free_counts and num_samples <= FEW * num_ranks
        if pinned is not None and within is None and is_tight:
            budget = search_pairs(num_samples, num_ranks, effort)
            start, is_within = start_within(by_sample, weights, caps, num_ranks, primary, budget, pinned)
            kept = start if is_within else kept
        if (within is not None or len(kept)) and free_counts:
            own = solve_within(by_sample, weights, caps, own, kept, offsets, group_sizes, primary, *limits, pinned)
        else:
            search = (offsets, group_sizes, primary, most, equal_count, *limits, pinned)
            start, own = own, solve_joint(by_sample, weights, caps, own, kept, *search)
            if within is None and len(caps) and above_caps(weights, caps, first + own, num_ranks):
                # Spreading sizes evenly keeps the caps in most cases.
                spread = _alone(np.maximum(weights[:, 0], 1), offsets, group_sizes, most, equal_count, pinned)
                own = solve_joint(by_sample, weights, caps, start, spread, *search)
    if pinned is not None and np.count_nonzero(pinned < 0) <= FEW_FREE:
        bounds = phase_bounds(by_sample, num_ranks, pinned)
        limit, extras = divmod(num_samples, num_ranks) if equal_count else (most, 0)
        search_few(by_sample, weights, caps, own, pinned, num_ranks, bounds, limit, extras)
    rank = np.empty(num_samples, np.int32)
    rank[order] = first + own
    return rank


def _grouped(
    group: Ints | None, group_sizes: Ints, num_samples: int, max_samples: int | None
) -> tuple[NDArray[np.intp] | slice, Ints, Ints32]:
    """Return (order of the samples by group, offsets int64 (num_groups + 1,), first rank of each one's group). Raises
    ValueError if `max_samples` is too small.
    """
    order = slice(None) if group is None else np.argsort(group, kind="stable")
    counts = np.array([num_samples]) if group is None else np.bincount(group, minlength=len(group_sizes))
    if max_samples is not None:
        for count, ranks in zip(counts.tolist(), group_sizes.tolist(), strict=True):
            checked_max_samples(max_samples, count, ranks)
    first = np.repeat(np.cumsum(group_sizes) - group_sizes, counts).astype(np.int32)
    return order, np.concatenate([[0], np.cumsum(counts)]), first


def _alone(
    costs: Ints, offsets: Ints, group_sizes: Ints, max_samples: int, equal_count: bool, pinned: Ints32 | None
) -> Ints32:
    """Balance each group's samples by one cost: int32 (num_samples,), ranks from 0 in each group."""
    parts = [
        solve(costs[start:stop], ranks, max_samples, 0, equal_count, 1e-3, pinned)[0]
        for start, stop, ranks in zip(offsets[:-1].tolist(), offsets[1:].tolist(), group_sizes.tolist(), strict=True)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def search_pairs(num_samples: int, num_ranks: int, effort: float = 1.0) -> int:
    """Return the number of pairs of samples that a search may look at: the same on every machine."""
    return int(min(PAIRS * effort * (num_samples * num_samples // num_ranks), MAX_TOTAL))
