"""What the balancing benchmark shares: seeded batches, timed solutions of them, and results over all distributions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.distributions import DISTRIBUTIONS, Distribution
from orchdata.bench import Result, interleave

SAMPLES_A_MEASUREMENT = 40_960  # Small batches are solved many at a time, so that what is timed is not the clock.
NOTABLE_BOUND = 1.05  # LB/mean above which the largest samples, not the balancer, set the pace.

Batch = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes and repeats of a run.

    Attributes:
        seed: of the first batches.
        repeats: measurements, each on batches of other seeds.
        shrink: numbers of ranks are divided by it; demands are then not asked.
    """

    seed: int = 0
    repeats: int = 5
    shrink: int = 1

    def ranks(self, num_ranks: int) -> int:
        """Sizes stay apart when shrunk, so that names do."""
        return num_ranks if self.shrink == 1 else num_ranks // self.shrink + 2

    def demand(self, value: float) -> float | None:
        return value if self.shrink == 1 else None

    def generators(self, count: int, num_samples: int) -> list[list[np.random.Generator]]:
        """One group of generators for each of `count` measurements, enough of them to be timed."""
        group = max(1, SAMPLES_A_MEASUREMENT // self.shrink // num_samples)
        return [[np.random.default_rng([self.seed, turn, number]) for number in range(group)] for turn in range(count)]

    def batches(self, make: Distribution, num_samples: int, least: int = 1) -> list[list[NDArray[np.int64]]]:
        """Batches of a distribution, grouped as they are measured."""
        groups = self.generators(max(self.repeats, least), num_samples)
        return [[make(generator, num_samples) for generator in group] for group in groups]


class Solved(Protocol):
    """What all assignments have."""

    @property
    def makespan(self) -> int: ...
    @property
    def lower_bound(self) -> int: ...
    @property
    def loads(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """Something to solve, and groups of batches: one group for each measurement."""

    solve: Callable[[Batch], Any]
    groups: Sequence[Sequence[Batch]]


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds for one batch, a value for each measurement, and what was found for each batch."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    found: tuple[Any, ...]


@dataclass(slots=True)
class _Run:
    job: Job
    turn: int = -1  # The warm-up comes first, with the first group.
    cpu: list[float] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)

    def __call__(self) -> None:
        group = self.job.groups[max(self.turn, 0)]
        started = time.thread_time()
        found = [self.job.solve(batch) for batch in group]
        elapsed = time.thread_time() - started
        if self.turn >= 0:
            self.cpu.append(1e3 * elapsed / len(group))
            self.found.extend(found)
        self.turn += 1


def measure(jobs: Mapping[str, Job]) -> dict[str, Timed]:
    """Run jobs in turn, all with the same number of groups."""
    runs = {name: _Run(job) for name, job in jobs.items()}
    seconds = interleave(runs, repeats=min(len(job.groups) for job in jobs.values()))
    return {
        name: Timed(
            tuple(1e3 * value / len(run.job.groups[0]) for value in seconds[name]), tuple(run.cpu), tuple(run.found)
        )
        for name, run in runs.items()
    }


def solve_all(
    solve: Callable[[NDArray[np.int64]], Any],
    scale: Scale,
    num_samples: int,
    distributions: Mapping[str, Distribution] = DISTRIBUTIONS,
) -> dict[str, Timed]:
    """Measure one way to balance on batches of each distribution."""
    return measure({name: Job(solve, scale.batches(make, num_samples)) for name, make in distributions.items()})


def to_bound(found: Solved) -> float:
    """makespan / lower bound."""
    return found.makespan / max(1, found.lower_bound)


def bound_to_mean(found: Solved) -> float:
    """lower bound / mean load."""
    return found.lower_bound * len(found.loads) / max(1, int(found.loads.sum()))


def worst_ratio(
    name: str,
    timed: Mapping[str, Timed],
    demand: float | None,
    ratio: Callable[[Any], float] = to_bound,
    note: str = "",
) -> Result:
    """The ratio on the distribution where its median over batches is the largest."""
    ratios = {case: tuple(ratio(found) for found in each.found) for case, each in timed.items()}
    worst = max(ratios, key=lambda case: (statistics.median(ratios[case]), max(ratios[case])))
    seed_worst, seed_case = max((max(values), case) for case, values in ratios.items())
    bound = statistics.median(bound_to_mean(found) for found in timed[worst].found)
    words = f"worst is {worst} (LB/mean {bound:.3f}); worst batch {seed_worst:.4f}, of {seed_case}"
    return Result(name=name, unit="x", values=ratios[worst], demand=demand, note=f"{words}{note and '; '}{note}")


def slowest(name: str, timed: Mapping[str, Timed], demand: float | None) -> Result:
    """Milliseconds on the distribution with the largest median."""
    case = max(timed, key=lambda case: statistics.median(timed[case].wall))
    cpu = statistics.median(timed[case].cpu)
    note = f"slowest is {case}; CPU time {cpu:.3g} ms"
    return Result(name=name, unit="ms", values=timed[case].wall, demand=demand, note=note)


def bound_rows(size: str, timed: Mapping[str, Timed]) -> list[tuple[str | float | None, ...]]:
    """(case, LB/mean, makespan/LB) of each distribution where the largest samples set the pace."""
    rows: list[tuple[str | float | None, ...]] = []
    for case, each in timed.items():
        bound = statistics.median(map(bound_to_mean, each.found))
        if bound > NOTABLE_BOUND:
            rows.append((f"{size}, {case}", bound, statistics.median(map(to_bound, each.found))))
    return rows


def owners(num_samples: int, num_ranks: int) -> NDArray[np.int64]:
    """Who holds which sample where each rank has read its share: consecutive samples, equally many."""
    return np.arange(num_samples) * num_ranks // num_samples
