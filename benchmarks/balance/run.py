"""`python -m benchmarks.balance`: how well and how fast batches are balanced, compared to peers and demands.

seeded costs of each distribution --each method, in turn--> tables of quality, time and memory
                                  --each regime--> demands met or missed
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance import against, demands, moves, orders, peers, scopes
from benchmarks.balance.cases import SAMPLES_A_MEASUREMENT, Job, Scale, Timed, measure
from benchmarks.balance.memory import peak_bytes
from benchmarks.balance.real_lengths import lengths_folder, real_distributions
from benchmarks.distributions import DISTRIBUTIONS, Distribution
from orchdata.balancers import balance, lower_bound
from orchdata.balancers.assignment import loads_of
from orchdata.bench import Result, WideTable

Method = Callable[[NDArray[np.int64], int], peers.Ranks]
Row = tuple[str | float | None, ...]

METHODS: Mapping[str, Method] = {
    "dealt": peers.dealt,
    "LPT": peers.longest_first,
    "FFD": peers.first_fit_decreasing,
    "ours": lambda costs, num_ranks: balance(costs, num_ranks).rank,
}
DIFFERENCING_RANKS = 512  # Largest differencing takes too long at more.
METHODS_WITH_DIFFERENCING: Mapping[str, Method] = {
    **{name: METHODS[name] for name in ("dealt", "LPT", "FFD")},
    "KK": peers.karmarkar_karp,
    "ours": METHODS["ours"],
}
LEGEND = (
    "dealt: in turn, no balancing. LPT: longest first, a heap in plain Python. FFD: first-fit decreasing in numba. "
    "KK: Karmarkar-Karp in numba. MB: most resident memory during a call beyond what was there before"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceBench:
    """What to measure.

    Attributes:
        ranks: of the table over distributions.
        samples_per_rank: of the table over distributions.
        repeats: measurements of everything, each on batches of other seeds.
        seed: of all batches.
        quick: numbers of ranks divided by 64 and no demands: to see that everything runs.
    """

    ranks: int = 2_560
    samples_per_rank: int = 16
    repeats: int = 5
    seed: int = 0
    quick: bool = False


def run(config: BalanceBench) -> list[Result | WideTable]:
    """Measure; raises ValueError where a number is below 1."""
    for name in ("ranks", "samples_per_rank", "repeats"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    scale = Scale(seed=config.seed, repeats=config.repeats, shrink=64 if config.quick else 1)
    return [*tables(config, scale), *all_demands(scale)]


def all_demands(scale: Scale) -> list[Result | WideTable]:
    """All that is demanded of the balancers."""
    return [
        *against.oracle(scale),
        *demands.packed(scale),
        *demands.equal_counts(scale),
        *demands.padded(scale),
        *against.against_karmarkar_karp(scale),
        *moves.minimal_move(scale),
        *moves.grid(scale),
        *scopes.by_phase(scale),
        *demands.phases(scale),
        *orders.order_demands(scale),
        *demands.first_call(scale),
    ]


def tables(config: BalanceBench, scale: Scale) -> list[WideTable]:
    """Quality and time of each method on each distribution, made-up and real."""
    real = real_distributions(lengths_folder())
    distributions = {**DISTRIBUTIONS, **real}
    note = LEGEND
    if not real:
        note += f". No real lengths: {lengths_folder()} is not there; ORCHDATA_FIXTURES names the folder above it"
    found = [
        *_tables(config.ranks, config.samples_per_rank, METHODS, distributions, scale, note),
    ]
    if config.ranks > DIFFERENCING_RANKS:
        found += _tables(
            scale.ranks(DIFFERENCING_RANKS),
            config.samples_per_rank,
            METHODS_WITH_DIFFERENCING,
            distributions,
            scale,
            note,
        )
    return found


def _tables(
    num_ranks: int,
    samples_per_rank: int,
    methods: Mapping[str, Method],
    distributions: Mapping[str, Distribution],
    scale: Scale,
    note: str,
) -> list[WideTable]:
    quality: list[Row] = []
    speed: list[Row] = []
    size = num_ranks * samples_per_rank
    few = max(1, SAMPLES_A_MEASUREMENT // 8 // size)  # Differencing takes its time.
    for name, make in distributions.items():
        groups = [group[:few] for group in scale.batches(make, size)]
        timed = measure({method: Job(_solver(solve, num_ranks), groups) for method, solve in methods.items()})
        batches = [costs for group in groups for costs in group]
        bounds = [lower_bound(costs, num_ranks) for costs in batches]
        means = [int(costs.sum()) / num_ranks for costs in batches]
        quality.append((name, _median_ratio(bounds, means), *_qualities(timed, batches, bounds, means, num_ranks)))
        speed.append((name, *_speeds(timed), *(_megabytes(solve, batches[0], num_ranks) for solve in methods.values())))
    words = f"{num_ranks:,} ranks x {samples_per_rank} samples, {scale.repeats} measurements"
    ratios = [f"{method} {ratio}" for ratio in ("max/mean", "/LB") for method in methods]
    times = [f"{method} {value}" for value in ("ms", "worst") for method in methods]
    memory = [f"{method} MB" for method in methods]
    return [
        WideTable(
            title=f"Quality: largest load over mean, and over the lower bound (LB); {words}, medians",
            columns=("distribution", "LB/mean", *ratios),
            rows=tuple(quality),
            unit="x",
            note=note,
        ),
        WideTable(
            title=f"Time: median and worst ms; memory: MB; {words}",
            columns=("distribution", *times, *memory),
            rows=tuple(speed),
        ),
    ]


def _solver(solve: Method, num_ranks: int) -> Callable[[NDArray[np.int64]], peers.Ranks]:
    return lambda costs: solve(costs, num_ranks)


def _qualities(
    timed: Mapping[str, Timed],
    batches: list[NDArray[np.int64]],
    bounds: list[int],
    means: list[float],
    num_ranks: int,
) -> list[float]:
    """max/mean of each method, then makespan/LB of each."""
    peaks = {
        method: [int(loads_of(costs, rank, num_ranks).max()) for costs, rank in zip(batches, each.found, strict=True)]
        for method, each in timed.items()
    }
    return [_median_ratio(values, base) for base in (means, bounds) for values in peaks.values()]


def _speeds(timed: Mapping[str, Timed]) -> list[float]:
    return [pick(each.wall) for pick in (statistics.median, max) for each in timed.values()]


def _megabytes(solve: Method, costs: NDArray[np.int64], num_ranks: int) -> float | None:
    found = peak_bytes(lambda: solve(costs, num_ranks))
    return None if found is None else round(found / 1e6, 2)


def _median_ratio(values: list[int], base: list[int] | list[float]) -> float:
    return statistics.median(value / max(1, other) for value, other in zip(values, base, strict=True))
