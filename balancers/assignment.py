"""Assignment: the rank of each sample, the loads, and a lower bound of the makespan; checks of arguments; and the joint
assignment of several phases, of arguments that are checked.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.native.assign.bounds import NO_PINS, phase_bounds, strong_lower_bound
from orchdata.native.assign.few import FEW_FREE, search_few
from orchdata.native.assign.packed import solve
from orchdata.native.assign.phases import above_caps, solve_joint
from orchdata.native.jit import Ints, Ints32
from orchdata.native.microbatches.microbatch import cell_sums
from orchdata.native.microbatches.within_caps import FEW, solve_within, start_within
from orchdata.native.sorting import descending_order, first_invalid

_FEW_SAMPLES = 2048  # Up to this number, the primary phase alone is balanced as a start, although another is known.
PAIRS, PAIRS_OF_MANY = 8, 3  # The joint search looks at this many pairs for each pair of samples that share a rank.
GOOD, GOOD_OF_MANY = 1000, 200  # The search ends when peaks are at most this part above their bounds.
_MANY_SAMPLES = 16_384


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Samples of one phase of one global batch, assigned to ranks.

    Attributes:
        rank: int32 (num_samples,), -1 for a sample that costs 0.
        loads: int64 (num_ranks,), the sum of costs on each rank.
        makespan: the largest load.
        lower_bound: no assignment under the same rules has a smaller makespan.
    """

    rank: NDArray[np.int32]
    loads: NDArray[np.int64]
    makespan: int
    lower_bound: int

    @property
    def imbalance(self) -> float:
        """Largest over mean load: 1.0 is perfect, and the value without any load."""
        total = int(self.loads.sum())
        return self.makespan * len(self.loads) / total if total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class MovedAssignment(Assignment):
    """An assignment of samples that ranks have already, and what it moves between them.

    Samples that cost 0 have rank -1 and do not move. Without nodes, every rank counts as a node.

    Attributes:
        moved_samples: the number of samples that change their rank.
        moved_cost_within, moved_cost_between: their costs, inside nodes and between nodes.
        moved_size_within, moved_size_between: their sizes, in the unit of `sizes`.
    """

    moved_samples: int
    moved_cost_within: int
    moved_cost_between: int
    moved_size_within: int
    moved_size_between: int

    @property
    def moved_share(self) -> float:
        """Share of all cost that changes its rank; 0.0 without any load."""
        total = int(self.loads.sum())
        return (self.moved_cost_within + self.moved_cost_between) / total if total else 0.0


def moved_counts(costs: Ints, sizes: Ints, owner: Ints32, rank: Ints32, ranks_per_node: int) -> dict[str, int]:
    """Count what moves, by the names of a `MovedAssignment`."""
    moved = (rank >= 0) & (rank != owner)
    between = moved & (rank // ranks_per_node != owner // ranks_per_node)
    within = moved & ~between
    return {
        "moved_samples": int(np.count_nonzero(moved)),
        "moved_cost_within": int(costs[within].sum()),
        "moved_cost_between": int(costs[between].sum()),
        "moved_size_within": int(sizes[within].sum()),
        "moved_size_between": int(sizes[between].sum()),
    }


loads_by_rank_and_microbatch = cell_sums
"""(costs, rank, microbatch, num_ranks, num_microbatches) -> the cost of each rank's microbatches, int64 (num_ranks,
num_microbatches)."""


def loads_of(costs: ArrayLike, rank: Ints32, num_ranks: int) -> Ints:
    """Return the sum of costs on each rank, int64 (num_ranks,); samples of rank -1 are left out."""
    loads = np.zeros(num_ranks, np.int64)
    present = rank >= 0
    np.add.at(loads, rank[present], np.asarray(costs, np.int64)[present])
    return loads


def lower_bound(costs: ArrayLike, num_ranks: int) -> int:
    """Return a lower bound of the makespan of any assignment of the samples to `num_ranks` ranks.

    The larger of the mean (rounded up) and, over all k >= 0, the sum of the k+1 smallest among the k*num_ranks+1
    largest costs: some rank has k+1 of those.

    Args:
        costs: integers (num_samples,), at least 0.
        num_ranks: at least 1.

    Raises:
        ValueError: costs that are not non-negative integers, or num_ranks below 1.
    """
    checked = checked_costs(costs)
    num_ranks = checked_ranks_count(num_ranks)
    return int(strong_lower_bound(checked[descending_order(checked)], num_ranks))


# Checks of arguments: array-likes -> contiguous int64, or a ValueError with value and limit.

MAX_TOTAL = 1 << 62
MAX_RANKS = 1 << 24


def checked_count(value: int, name: str, least: int = 1) -> int:
    """Return an integer of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def checked_epoch(epoch: int) -> int:
    """Return an epoch number of at least 0 that orders and states can store."""
    count = checked_count(epoch, "epoch", 0)
    if count >= 1 << 63:
        raise ValueError(f"epoch must be below 2**63, got {count}")
    return count


def checked_ranks_count(num_ranks: int) -> int:
    """Return a number of ranks, from 1 to 2**24."""
    count = checked_count(num_ranks, "num_ranks")
    if count > MAX_RANKS:
        raise ValueError(f"num_ranks must be at most {MAX_RANKS:,}, got {count:,}")
    return count


def checked_flag(value: bool, name: str) -> bool:
    """Return True or False, also for numpy's; a non-empty string would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def checked_costs(costs: ArrayLike, name: str = "costs") -> Ints:
    """Return contiguous int64 (num_samples,), each at least 0, with a sum of at most 2**62.

    Floats are accepted if each is a whole number.

    Raises:
        ValueError: for anything else; it names the first wrong sample.
    """
    array = np.asarray(costs)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, one entry a sample, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = _whole_numbers(array, name)
    elif array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}{_hint(name)}")
    # Kernels are compiled for writable arrays only, although they do not write to these.
    checked = np.require(array, np.int64, ["C", "W"])
    index, total_exceeded = first_invalid(checked, MAX_TOTAL)
    if index >= 0:
        if total_exceeded:
            raise ValueError(f"{name} sum to more than 2**62 at sample {index} ({checked[index]}): scale them down")
        raise ValueError(f"{name}[{index}] is {checked[index]}; it must be at least 0")
    return checked


def checked_ranks(ranks: ArrayLike, num_ranks: int, num_samples: int, name: str, *, least: int = 0) -> Ints32:
    """Return contiguous int32 (num_samples,), each from `least` (-1 allows left-out samples) to num_ranks - 1."""
    array = np.asarray(ranks)
    if array.shape != (num_samples,):
        raise ValueError(f"{name} must have one entry for each of the {num_samples} costs, got shape {array.shape}")
    if num_samples and array.dtype.kind not in "iu":
        hint = ": pass Assignment.rank" if least < 0 else ""
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}{hint}")
    outside = (array < least) | (array >= num_ranks)
    if outside.any():
        sample = int(outside.argmax())
        lowest = f"{least} (left out)" if least < 0 else least
        raise ValueError(f"{name}[{sample}] is {array[sample]}; it must be from {lowest} to {num_ranks - 1}")
    return np.require(array, np.int32, ["C", "W"])


def checked_pins(
    pinned: ArrayLike | None, num_ranks: int, present: NDArray[np.bool_], most: int | None, equal_count: bool
) -> Ints32:
    """Return the ranks of samples that stay where they are, -1 for others; empty without any. Of those `present`, at
    most `most` are on a rank; with `equal_count`, an even share.
    """
    pins = NO_PINS if pinned is None else checked_ranks(pinned, num_ranks, len(present), "pinned", least=-1)
    if not (pins >= 0).any():
        return NO_PINS
    counts, num_present = np.bincount(pins[present & (pins >= 0)], minlength=num_ranks), int(np.count_nonzero(present))
    limit, extras = divmod(num_present, num_ranks) if equal_count else (num_present if most is None else most, 0)
    if int(counts.max()) > limit + (extras > 0) or int(np.count_nonzero(counts > limit)) > extras:
        allowed = f"equal_count, {limit} and one more on {extras} ranks" if equal_count else f"max_samples={limit}"
        raise ValueError(f"pinned holds {counts.max()} samples on rank {int(counts.argmax())}, above {allowed}")
    return pins


def _table(values: ArrayLike, name: str) -> Ints:
    """Return int64 (num_items, num_columns) of values (num_items,) or (num_items, num_columns)."""
    array = np.asarray(values)
    if array.ndim not in (1, 2) or array.shape[1:] == (0,):
        raise ValueError(f"{name} must be (num_items,) or (num_items, num_columns), got shape {array.shape}")
    if array.ndim == 1:
        return checked_costs(array, name)[:, None]
    columns = [checked_costs(array[:, k], f"{name}[:, {k}]") for k in range(array.shape[1])]
    return np.stack(columns, axis=1)


def checked_phases(costs: ArrayLike) -> Ints:
    """Return costs int64 (num_items, num_phases)."""
    table = _table(costs, "costs")
    total = sum(int(column.sum()) for column in table.T)
    if total > MAX_TOTAL:
        raise ValueError(f"costs of all phases sum to {total}, above the limit of 2**62: scale them down")
    return table


def checked_max_samples(max_samples: int, present: int, num_ranks: int) -> int:
    """Return a cap on the samples of a rank with room for all; at most their number, as more does not bind."""
    most = checked_count(max_samples, "max_samples")
    if present > num_ranks * most:
        raise ValueError(
            f"max_samples={most} on {num_ranks} ranks allows {num_ranks * most} samples, but there are"
            f" {present}: raise it to at least {-(-present // num_ranks)}"
        )
    return min(most, max(1, present))


def checked_tolerance(tolerance: float) -> float:
    """Return a share from 0 to below 1."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be from 0 to below 1, got {tolerance!r}")
    return float(tolerance)


def _whole_numbers(array: NDArray[np.floating], name: str) -> Ints:
    """Return floats as int64 if that loses nothing."""
    array = array.astype(np.float64)  # float16 cannot represent the limit.
    bad = ~(np.isfinite(array) & (np.abs(array) <= MAX_TOTAL) & (np.floor(array) == array))
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(f"{name}[{index}] is {array[index]}; it must be a whole number from 0 to 2**62{_hint(name)}")
    return array.astype(np.int64)


def _hint(name: str) -> str:
    return ": use a CostModel to make costs" if name.startswith("costs") else ""


def checked_sizes(sizes: ArrayLike, num_samples: int) -> Ints:
    """Return sizes int64 (num_samples, num_caps)."""
    table = _table(sizes, "sizes")
    if len(table) != num_samples:
        raise ValueError(f"sizes must have one row for each of the {num_samples} costs, got shape {table.shape}")
    return table


def checked_caps(value: int | ArrayLike, num_caps: int, name: str = "max_size") -> Ints:
    """Return caps int64 (num_caps,), each at least 1; larger ones than 2**62 do not bind."""
    caps = np.atleast_1d(np.asarray(value))
    if caps.shape != (num_caps,) or caps.dtype.kind not in "iu":
        raise ValueError(f"{name} must be {num_caps} integer(s), one for each column of sizes, got {value!r}")
    if (caps < 1).any():
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return np.ascontiguousarray(np.minimum(caps, MAX_TOTAL), dtype=np.int64)


def checked_effort(value: float, name: str) -> float:
    """Return a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


class Limits(NamedTuple):
    """Caps of a rank: its `sizes`, int64 (num_items, num_caps), sum to at most `caps`, int64 (num_caps,). `within`,
    int32 (num_items,), keeps the caps and the scope; `pinned` has the rank in it of an item that may not move, or -1.
    """

    sizes: Ints
    caps: Ints
    within: Any = None  # None where none is known
    pinned: Ints32 = NO_PINS


def assign_jointly(
    costs: Ints,
    group_sizes: Ints,
    primary: int,
    limits: Limits | None = None,
    *,
    group: Ints | None = None,
    equal_count: bool = False,
    max_samples: int | None = None,
    effort: float,
) -> Ints32:
    """Return one rank for each sample, int32 (num_samples,): `balance_phases` of checked arguments, costs (num_phases,
    num_samples), in groups of so many consecutive ranks; `group` is that of each sample, None for a single one. The
    result keeps the caps if `limits.within` does, else if the search finds a way.
    """
    together = costs.sum(axis=0)
    if not together.all():
        raise ValueError(
            f"sample {int((together == 0).argmax())} costs 0 in every phase: leave it out, or give it a cost of 1"
        )
    num_samples, num_ranks = len(together), int(group_sizes.sum())
    sizes, caps, within, pinned = limits or Limits(np.empty((num_samples, 0), np.int64), np.empty(0, np.int64))
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
        reach = max(1, round(min(good * effort, MAX_TOTAL))), pairs * effort
        free_counts = max_samples is None and not equal_count
        # Next to few pinned samples that nearly fill ranks, what ignores the caps cannot be brought within them.
        is_tight = len(caps) > 0 and free_counts and num_samples <= FEW * num_ranks
        if len(pinned) and within is None and is_tight:
            budget = search_pairs(num_samples, num_ranks, effort)
            start, is_within = start_within(by_sample, weights, caps, num_ranks, primary, budget, pinned)
            kept = start if is_within else kept
        if (within is not None or len(kept)) and free_counts:
            own = solve_within(by_sample, weights, caps, own, kept, offsets, group_sizes, primary, *reach, pinned)
        else:
            search = (offsets, group_sizes, primary, most, equal_count, *reach, pinned)
            start, own = own, solve_joint(by_sample, weights, caps, own, kept, *search)
            if within is None and len(caps) and above_caps(weights, caps, first + own, num_ranks):
                # Spreading sizes evenly keeps the caps in most cases.
                spread = _alone(np.maximum(weights[:, 0], 1), offsets, group_sizes, most, equal_count, pinned)
                own = solve_joint(by_sample, weights, caps, start, spread, *search)
    if len(pinned) and np.count_nonzero(pinned < 0) <= FEW_FREE:
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
    costs: Ints, offsets: Ints, group_sizes: Ints, max_samples: int, equal_count: bool, pinned: Ints32
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
