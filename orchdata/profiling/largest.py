"""The samples that cost the most, and how much longer a step with one of them takes at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.costs import IndexCosts
from orchdata.planning.price import StepPrice
from orchdata.profiling.lengths import LengthCounts, Lengths

Ints = NDArray[np.int64]

MOST_LARGEST: Final = 10
_CHUNK_ROWS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestSample:
    """One of the samples, or pieces of split samples, that cost the most over the phases of the cost model.

    Attributes:
        row: its row in the index.
        positions: phase -> positions.
        cost: its cost over that of the mean sample.
        step: the least that a step costs if one rank has the whole sample, on any number of ranks, over a perfectly
            even step of the same number of samples a rank: 1 if it fits into a rank's share.
    """

    shard: str
    key: str
    row: int
    positions: Mapping[str, int]
    cost: float
    step: float


def measure_phases(
    source: IndexCosts, rows: Ints, excluded: Ints, price: StepPrice, samples_per_rank: float
) -> tuple[dict[str, Lengths], tuple[LargestSample, ...], int]:
    """Return positions of each phase, the samples that cost the most, and the most positions of `llm`.

    Args:
        rows: of usable samples, ascending.
        excluded: rows that are in no step, ascending: only the positions of each phase count them.
        price: of a step.
        samples_per_rank: samples of a step for each rank.
    """
    counts = {phase: LengthCounts() for phase in source.phases}
    sums = dict.fromkeys(source.balanced, 0)
    largest: list[tuple[int, int]] = []  # cost and row
    trained = longest = 0
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        positions = {phase: source.positions(phase, chunk) for phase in counts}
        for phase, counted in counts.items():
            counted.add(positions[phase])
        kept = ~np.isin(chunk, excluded[slice(*np.searchsorted(excluded, [chunk[0], chunk[-1] + 1]))])
        longest = max(longest, int(positions["llm"][kept].max(initial=0)))
        chunk = chunk[kept]
        trained += len(chunk)
        total = np.zeros(len(chunk), np.int64)
        for phase in source.balanced:
            costs = source.costs(phase, chunk)
            sums[phase] += int(costs.sum())
            total += costs
        top = np.argsort(-total, kind="stable")[:MOST_LARGEST]
        largest += zip(total[top].tolist(), chunk[top].tolist(), strict=True)
        largest = sorted(largest, key=lambda each: (-each[0], each[1]))[:MOST_LARGEST]
    mean = {phase: total / max(1, trained) for phase, total in sums.items()}
    loads = {phase: max(samples_per_rank * cost, 1.0) for phase, cost in mean.items()}
    return (
        {phase: counted.lengths() for phase, counted in counts.items()},
        tuple(_largest(source, row, price, sum(mean.values()), loads) for _, row in largest),
        longest,
    )


def _largest(source: IndexCosts, row: int, price: StepPrice, mean: float, loads: Mapping[str, float]) -> LargestSample:
    """Describe a sample.

    Args:
        mean: cost of the mean sample.
        loads: phase -> mean load of a rank in a step.
    """
    index, one = source.index, np.array([row], np.int64)
    costs = {phase: int(source.costs(phase, one)[0]) for phase in loads}
    # Some rank has the whole sample: in each phase where ranks meet, it takes at least as long as the sample.
    alone = sum(max(load, costs[phase]) for phase, load in loads.items())
    if not price.meets_in_micro_steps:
        alone = max(sum(loads.values()), sum(costs.values()))
    return LargestSample(
        shard=index.shard_of(row).url,
        key=index.key(row),
        row=row,
        positions={phase: int(source.positions(phase, one)[0]) for phase in source.phases},
        cost=sum(costs.values()) / mean if mean else 1.0,
        step=alone / sum(loads.values()),
    )
