"""Both reorderings of DistTrain in a 1F1B pipeline: sequences to groups, then their order in each group.

image tokens (groups * microbatches,) --dealt, or balanced with equal counts--> groups
each group's microbatches --as dealt, or ordered--> simulate_1f1b --the slowest group--> time of the step
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.cases import PipelineCase
from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import balance, order_microbatches, simulate_1f1b

COLUMNS = ("none", "intra", "inter", "both", "both, our order", "perfect")
LEGEND = (
    "Speedup over none. Intra: sequences to groups by image tokens, equal counts; inter: the order of a group's "
    "microbatches after DistTrain's description (its code is not public); our order: order_microbatches; perfect: all "
    "sequences have the mean of image tokens, so that the pipeline's own start and end are all that is lost"
)


def speedups(case: PipelineCase, seed: int, steps: int) -> tuple[float, ...]:
    """Of each of `COLUMNS`, time of the steps without reordering over time with it."""
    times = np.array([_step_times(case, np.random.default_rng([seed, step])) for step in range(steps)]).sum(axis=0)
    return tuple((times[0] / times).tolist())


def _step_times(case: PipelineCase, generator: np.random.Generator) -> list[float]:
    tokens = case.image_tokens.draw(generator, case.groups * case.microbatches)
    even = np.full_like(tokens, round(tokens.mean()))
    dealt = tokens.reshape(case.groups, case.microbatches)
    rank = balance(tokens, case.groups, equal_count=True).rank
    intra = np.stack([tokens[rank == group] for group in range(case.groups)])
    mean = float(tokens.mean())

    def slowest(groups: NDArray[np.int64], order: str = "as given") -> float:
        return max(_makespan(case, group / mean, order) for group in groups)

    return [
        slowest(dealt),
        slowest(intra),
        slowest(dealt, "after DistTrain"),
        slowest(intra, "after DistTrain"),
        slowest(intra, "ours"),
        slowest(even.reshape(case.groups, case.microbatches)[:1]),
    ]


def _makespan(case: PipelineCase, images: NDArray[np.float64], order: str) -> float:
    """Of one group; `images` float64 (num_microbatches,), image tokens over their mean."""
    forward = np.ones((case.stages, len(images)))
    forward[[0, -1]] = case.heavy * images
    backward = 2 * forward
    if order == "ours":
        return order_microbatches(forward, backward).makespan
    return simulate_1f1b(forward, backward, None if order == "as given" else order_after_disttrain(forward, backward))
