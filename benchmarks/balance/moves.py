"""What minimal move and row/column balancing must reach, measured from ranks that have each read their share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import (
    NOTABLE_BOUND,
    Scale,
    Timed,
    bound_to_mean,
    owners,
    slowest,
    solve_all,
    worst_ratio,
)
from orchdata.balancers import MovedAssignment, balance_from, balance_grid, balance_grouped
from orchdata.bench import Result

RANKS_PER_NODE = 8


def minimal_move(scale: Scale) -> list[Result]:
    """Ratio, cost moved and time of `balance_from`."""
    num_ranks = scale.ranks(2_560)
    owner = owners(num_ranks * 16, num_ranks)

    def solve(costs: NDArray[np.int64]) -> MovedAssignment:
        return balance_from(costs, owner, num_ranks)

    timed = solve_all(solve, scale, num_ranks * 16)
    at_cap = solve_all(solve, scale, num_ranks * 16, {"images at a cap": images_at_a_cap})
    name = f"minimal move, {num_ranks:,} x 16"
    return [
        worst_ratio(f"{name}: makespan/LB", timed, scale.demand(1.003)),
        _mean_share(f"{name}: cost moved, mean of distributions", timed, _moved, scale.demand(20.0)),
        slowest(f"{name}: time", timed, None),
        worst_ratio(f"{name}, 85 % at a cap: makespan/LB", at_cap, scale.demand(1.01)),
        _mean_share(f"{name}, 85 % at a cap: cost moved", at_cap, _moved, scale.demand(10.0)),
    ]


def images_at_a_cap(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    """Patches of large images, 85 % of them at the most that is allowed: many equal costs leave little to choose."""
    patches = generator.lognormal(8.0, 0.8, num_samples).clip(64, 4_096).astype(np.int64)
    return np.where(generator.random(num_samples) < 0.85, 4_096, patches // 4 * 4)


def grid(scale: Scale) -> list[Result]:
    """Ratio, metadata, cost moved between nodes and time of `balance_grid`; for comparison, `balance_grouped`."""
    num_ranks = max(2 * RANKS_PER_NODE, scale.ranks(2_560))
    owner = owners(num_ranks * 16, num_ranks)
    timed = solve_all(lambda costs: balance_grid(costs, owner, num_ranks, RANKS_PER_NODE), scale, num_ranks * 16)
    free = {case: each for case, each in timed.items() if _is_free(each)} or timed
    grouped = solve_all(lambda costs: balance_grouped(costs, owner, num_ranks, RANKS_PER_NODE), scale, num_ranks * 16)
    name = f"row/column, {num_ranks:,} x 16, {RANKS_PER_NODE} a node"
    most = max(found.metadata_bytes for each in timed.values() for found in each.found)
    return [
        worst_ratio(f"{name}: makespan/LB", free, scale.demand(1.002), note=_left_out(timed, free)),
        Result(
            name=f"{name}: metadata a rank receives",
            unit="KiB",
            values=(most / 1024,),
            demand=scale.demand(24.0),
            note=f"both rounds, most of all; all costs to every rank: {num_ranks * 16 * 4 / 1024:.3g} KiB",
        ),
        _mean_share(f"{name}: cost between nodes, mean of distributions", timed, _moved_between, scale.demand(10.0)),
        slowest(f"{name}: time", timed, None),
        worst_ratio(
            f"grouped, {num_ranks:,} x 16, groups of {RANKS_PER_NODE}: max/mean",
            {case: grouped[case] for case in free},
            None,
            _max_to_mean,
        ),
    ]


def _is_free(timed: Timed) -> bool:
    """Whether the lower bound is about the mean."""
    return statistics.median(map(bound_to_mean, timed.found)) <= NOTABLE_BOUND


def _left_out(timed: Mapping[str, Timed], free: Mapping[str, Timed]) -> str:
    left = sorted(set(timed) - set(free))
    return f"left out, LB/mean above {NOTABLE_BOUND}: {', '.join(left)}" if left else ""


def _max_to_mean(found: Any) -> float:
    return float(found.imbalance)


def _moved(found: Any) -> float:
    """Per cent of all cost that moves."""
    return 100 * float(found.moved_cost_within + found.moved_cost_between) / int(found.loads.sum())


def _moved_between(found: Any) -> float:
    return 100 * float(found.moved_cost_between) / int(found.loads.sum())


def _shares(timed: Mapping[str, Timed], share: Callable[[Any], float]) -> dict[str, NDArray[np.float64]]:
    return {case: np.array([share(found) for found in each.found]) for case, each in timed.items()}


def _mean_share(name: str, timed: Mapping[str, Timed], share: Callable[[Any], float], demand: float | None) -> Result:
    """The mean over distributions, for each batch; those bound by their largest samples would flatter it."""
    free = {case: each for case, each in timed.items() if _is_free(each)} or timed
    shares = _shares(free, share)
    worst = max(shares, key=lambda case: float(shares[case].mean()))
    every = {case: float(values.mean()) for case, values in _shares(timed, share).items()}
    note = (
        f"most is {worst} with {shares[worst].mean():.1f}; mean of all {len(every)} {np.mean(list(every.values())):.1f}"
    )
    left_out = _left_out(timed, free)
    values = tuple(float(value) for value in np.mean(list(shares.values()), axis=0))
    return Result(name=name, unit="%", values=values, demand=demand, note=f"{note}{left_out and '; '}{left_out}")
