"""What each way to balance gains, from few ranks to many: the numbers of the plots in benchmarks/balancing.md.

Each regime is a function (generator, num_ranks) -> value of each series, before and after, for one
batch of an omni mixture: text in all samples, images in half, speech in a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance import peers
from benchmarks.balance.cases import owners
from benchmarks.balance.orders import pipeline_times
from benchmarks.distributions import omni_lengths, omni_phases
from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import (
    PhaseCost,
    balance,
    balance_from,
    balance_grid,
    balance_grouped,
    balance_padded,
    balance_phases,
    order_microbatches,
    simulate_1f1b,
    split_microbatches,
)
from orchdata.balancers.assignment import loads_of

RANKS = (8, 32, 128, 512, 2_560)
SAMPLES_PER_RANK = 16
RANKS_PER_NODE = 8
MOST_PADDED = 4 * SAMPLES_PER_RANK  # Else one rank collects thousands of tiny samples.
MICROBATCH_TOKENS = 16_384

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Regime:
    """One plot.

    Attributes:
        title: what is balanced.
        value: what is plotted, with its unit.
        measure: values of each series for one batch; the first series is without balancing.
        steps: what grows along the axis.
        axis: its name.
    """

    title: str
    value: str
    measure: Callable[[np.random.Generator, int], Values]
    steps: tuple[int, ...] = RANKS
    axis: str = "data-parallel ranks, 16 samples each"


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one series at one number of ranks, over seeds."""

    series: str
    step: int
    mean: float
    low: float
    high: float


def rows(regime: Regime, *, seeds: int, steps: Sequence[int] | None = None) -> Iterator[Row]:
    """Mean, least and most over seeds of each series, step by step."""
    for step in steps or regime.steps:
        found = [regime.measure(np.random.default_rng([seed, step]), step) for seed in range(seeds)]
        for series in found[0]:
            values = [each[series] for each in found]
            yield Row(series, step, sum(values) / seeds, min(values), max(values))


def _imbalance(loads: NDArray[np.int64]) -> float:
    return float(loads.max() / loads.mean())


def _dealt(costs: NDArray[np.int64], num_ranks: int) -> float:
    return _imbalance(loads_of(costs, peers.dealt(costs, num_ranks), num_ranks))


def packed(generator: np.random.Generator, num_ranks: int) -> Values:
    costs = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    return {"dealt in turn": _dealt(costs, num_ranks), "balanced": balance(costs, num_ranks).imbalance}


def equal_counts(generator: np.random.Generator, num_ranks: int) -> Values:
    costs = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    return {
        "dealt in turn": _dealt(costs, num_ranks),
        "equal-size differencing": _imbalance(
            loads_of(costs, peers.karmarkar_karp(costs, num_ranks, equal_count=True), num_ranks)
        ),
        "balanced": balance(costs, num_ranks, equal_count=True).imbalance,
    }


def padded(generator: np.random.Generator, num_ranks: int) -> Values:
    """Largest padded load over the mean of what is not padding."""
    lengths = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    mean = float(lengths.sum()) / num_ranks
    dealt = lengths.reshape(SAMPLES_PER_RANK, num_ranks).max(axis=0).max() * SAMPLES_PER_RANK
    return {
        "dealt in turn": float(dealt) / mean,
        "balanced": balance_padded(lengths, num_ranks, PhaseCost(1.0), max_samples=MOST_PADDED).makespan / mean,
    }


def phases(generator: np.random.Generator, num_ranks: int) -> Values:
    """Sum over phases of the largest load, over the sum of mean loads."""
    costs = omni_phases(generator, num_ranks * SAMPLES_PER_RANK)
    mean = sum(int(row.sum()) for row in costs.values()) / num_ranks

    def step(rank: peers.Ranks) -> float:
        return sum(int(loads_of(row, rank, num_ranks).max()) for row in costs.values()) / mean

    joint = balance_phases(costs, num_ranks)
    apart = balance_phases(costs, num_ranks, assignment="per_phase")
    return {
        "dealt in turn": step(peers.dealt(costs["llm"], num_ranks)),
        "backbone alone": step(balance(costs["llm"], num_ranks).rank),
        "joint": sum(joint.makespans) / mean,
        "per phase": sum(apart.makespans) / mean,
    }


def minimal_move(generator: np.random.Generator, num_ranks: int) -> Values:
    """Per cent of the cost that moves; both are balanced to 0.1 %."""
    costs = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    owner = owners(len(costs), num_ranks)
    from_scratch = balance(costs, num_ranks).rank
    found = balance_from(costs, owner, num_ranks)
    moved = found.moved_cost_within + found.moved_cost_between
    return {
        "from scratch (balance)": 100 * float(costs[from_scratch != owner].sum() / costs.sum()),
        "minimal move (balance_from)": 100 * moved / int(costs.sum()),
    }


def grouped_and_grid(generator: np.random.Generator, num_ranks: int) -> Values:
    costs = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    owner = owners(len(costs), num_ranks)
    return {
        "as read": _imbalance(loads_of(costs, owner.astype(np.int32), num_ranks)),
        f"grouped, {RANKS_PER_NODE} a node": balance_grouped(costs, owner, num_ranks, RANKS_PER_NODE).imbalance,
        f"row/column, {RANKS_PER_NODE} a node": balance_grid(costs, owner, num_ranks, RANKS_PER_NODE).imbalance,
    }


def microbatches(generator: np.random.Generator, num_ranks: int) -> Values:
    """Sum over microbatches of the largest load, over the mean load of a rank: ranks wait in each of them."""
    costs = omni_lengths(generator, num_ranks * SAMPLES_PER_RANK)
    mean = float(costs.sum()) / num_ranks

    def step(rank: peers.Ranks, in_step: bool) -> float:
        microbatch, count = split_microbatches(costs, rank, num_ranks, max_size=MICROBATCH_TOKENS, in_step=in_step)
        loads = loads_of(costs, (microbatch * num_ranks + rank).astype(np.int32), count * num_ranks)
        return float(loads.reshape(count, num_ranks).max(axis=1).sum()) / mean

    balanced = balance(costs, num_ranks).rank
    return {
        "dealt in turn": step(peers.dealt(costs, num_ranks), False),
        "ranks balanced": step(balanced, False),
        "in step": step(balanced, True),
    }


def order_1f1b(generator: np.random.Generator, num_microbatches: int) -> Values:
    """Makespan over the lower bound, on 8 stages."""
    times = pipeline_times(generator, 8, num_microbatches)
    found = order_microbatches(*times)
    # The times are drawn independently, so that the given order is a random one.
    return {
        "random order": simulate_1f1b(*times) / found.lower_bound,
        "after DistTrain": simulate_1f1b(*times, order_after_disttrain(*times)) / found.lower_bound,
        "ordered": found.makespan / found.lower_bound,
    }


REGIMES: Mapping[str, Regime] = {
    "packed": Regime("Packed batches", "largest / mean load", packed),
    "equal_counts": Regime("Packed batches, equal counts", "largest / mean load", equal_counts),
    "padded": Regime(
        f"Padded batches, at most {MOST_PADDED} samples a rank", "largest padded / mean unpadded load", padded
    ),
    "phases": Regime("Image, audio and backbone; ranks wait after each", "sum of largest / sum of mean loads", phases),
    "minimal_move": Regime("Moving as little as possible", "cost that changes its rank, %", minimal_move),
    "grid": Regime("Groups, and rows and columns, of ranks", "largest / mean load", grouped_and_grid),
    "microbatches": Regime(
        f"Microbatches of at most {MICROBATCH_TOKENS:,} tokens, ranks in step",
        "sum of largest / mean load of a rank",
        microbatches,
    ),
    "order_1f1b": Regime(
        "Order of microbatches, 8 pipeline stages, uneven first stage",
        "makespan / lower bound",
        order_1f1b,
        (4, 8, 16, 32, 64),
        "microbatches of a step",
    ),
}
