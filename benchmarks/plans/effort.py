"""What the joint search finds with more and less effort, and how long it takes."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.balance.cases import Job, Scale, measure
from orchdata.balancers import balance_phases
from orchdata.bench.distributions import omni_phases
from orchdata.bench.harness import Result

# Ranks, samples a rank, and at effort 1: sum of largest loads over that of lower bounds, milliseconds.
SIZES = ((64, 64, 1.0015, 150.0), (2_560, 16, None, 20.0), (2_560, 64, None, None))
EFFORTS = (0.25, 1.0, 4.0)


def effort(scale: Scale) -> list[Result]:
    """Each size at each effort, on the same batches."""
    found: list[Result] = []
    for ranks, samples_per_rank, ratio, milliseconds in SIZES:
        num_ranks = scale.ranks(ranks)
        size = num_ranks * samples_per_rank
        groups = [
            [omni_phases(generator, size) for generator in group[:4]] for group in scale.generators(scale.repeats, size)
        ]
        timed = measure(
            {str(much): Job(partial(balance_phases, num_ranks=num_ranks, effort=much), groups) for much in EFFORTS}
        )
        for much in EFFORTS:
            each = timed[str(much)]
            name = f"joint search, {num_ranks:,} x {samples_per_rank}, effort {much:g}"
            ratios = tuple(sum(one.makespans) / sum(one.lower_bounds) for one in each.found)
            asked = much == 1.0 and scale.shrink == 1
            found += [
                Result(
                    name=f"{name}: sum of largest loads / of lower bounds",
                    unit="x",
                    values=ratios,
                    demand=ratio if asked else None,
                    note=f"worst batch {max(ratios):.4f}",
                ),
                Result(
                    name=f"{name}: time",
                    unit="ms",
                    values=each.wall,
                    demand=milliseconds if asked else None,
                    note=f"CPU time {statistics.median(each.cpu):.3g} ms",
                ),
            ]
    return found
