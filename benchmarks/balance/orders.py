"""What the order of microbatches must reach under 1F1B: against all orders of few, against random ones of many."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import Job, Scale, measure
from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import order_microbatches, simulate_1f1b
from orchdata.bench import Result

Times = NDArray[np.float64]


def order_demands(scale: Scale) -> list[Result]:
    """Ratios to the best of all orders at 8 microbatches, and of random orders to ours at 32."""
    full = scale.shrink == 1
    few = [
        pipeline_times(np.random.default_rng([scale.seed, stages, number]), stages, 8 if full else 5)
        for stages in range(4, 9)
        for number in range(4 if full else 1)
    ]
    many = [pipeline_times(np.random.default_rng([scale.seed, 3, number]), 8, 32) for number in range(16)]
    ratios = tuple(order_microbatches(*times).makespan / best_of_all_orders(*times) for times in few)
    timed = measure({"order": Job(lambda times: order_microbatches(*times), [many[:1]] * scale.repeats)})["order"]
    return [
        Result(
            name="1F1B order, 8 microbatches, 4 to 8 stages: mean of makespan / best of all orders",
            unit="x",
            values=(statistics.fmean(ratios),),
            demand=1.01,
            note=f"{len(few)} cases; worst {max(ratios):.4f}; {sum(r <= 1 + 1e-9 for r in ratios)} optimal",
        ),
        *_against_random(many),
        Result(
            name="1F1B order, 8 stages x 32: time", unit="ms", values=timed.wall, note=f"CPU {min(timed.cpu):.3g} ms"
        ),
    ]


def _against_random(many: list[tuple[Times, Times]]) -> list[Result]:
    mine = [order_microbatches(*times) for times in many]
    # The mean over random orders: what not ordering costs.
    chance = [
        statistics.fmean(simulate_1f1b(*times, order) for order in _random_orders(times[0].shape[1], number))
        for number, times in enumerate(many)
    ]
    theirs = [simulate_1f1b(*times, order_after_disttrain(*times)) for times in many]
    bounds = [found.makespan / found.lower_bound for found in mine]
    return [
        Result(
            name="1F1B order, 8 stages x 32, stage 0 heterogeneous: random / ours",
            unit="x",
            values=tuple(a / b.makespan for a, b in zip(chance, mine, strict=True)),
            demand=1.1,
            better="high",
            note=f"{len(many)} cases, mean of 20 random orders; ours / lower bound {statistics.median(bounds):.3f}",
        ),
        Result(
            name="1F1B order, 8 stages x 32: order after DistTrain / ours",
            unit="x",
            values=tuple(a / b.makespan for a, b in zip(theirs, mine, strict=True)),
            better="high",
        ),
    ]


def _random_orders(num_microbatches: int, seed: int) -> list[NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    return [generator.permutation(num_microbatches) for _ in range(20)]


def pipeline_times(
    generator: np.random.Generator, num_stages: int, num_microbatches: int, spread: float = 1.0
) -> tuple[Times, Times]:
    """Forward and backward times: stage 0 holds the image encoder, so its times are log-normal with this spread.

    The other stages hold layers of the backbone, over microbatches packed to about the same length (within 10 %).
    All stages take as long on average; a backward takes twice its forward.
    """
    backbone = generator.uniform(0.9, 1.1, num_microbatches)
    encoder = generator.lognormal(-(spread**2) / 2, spread, num_microbatches)
    forward = np.vstack([encoder, np.tile(backbone, (num_stages - 1, 1))])
    return forward, 2 * forward


def best_of_all_orders(forward: Times, backward: Times) -> float:
    """Smallest makespan over all orders, each simulated operation by operation, all orders at once."""
    num_stages, num_microbatches = forward.shape
    orders = np.array(list(itertools.permutations(range(num_microbatches))))
    ends: dict[tuple[str, int, int], Times] = {}
    programs = [_program(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    clocks = [np.zeros(len(orders)) for _ in range(num_stages)]
    while any(programs):
        for stage, program in enumerate(programs):
            while program:
                kind, place = program[0]
                last = stage == num_stages - 1
                before = ("forward", stage - 1, place) if kind == "forward" else ("backward", stage + 1, place)
                if kind == "backward" and last:
                    before = ("forward", stage, place)
                starts_freely = kind == "forward" and stage == 0
                if not starts_freely and before not in ends:
                    break
                times = (forward if kind == "forward" else backward)[stage, orders[:, place]]
                ready = clocks[stage] if starts_freely else np.maximum(clocks[stage], ends[before])
                clocks[stage] = ends[kind, stage, place] = ready + times
                program.pop(0)
    return float(np.max(clocks, axis=0).min())


def _program(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """Operations of a stage: forwards to warm up, then one forward and one backward in turn, then backwards."""
    warm_up = min(num_stages - stage - 1, num_microbatches)
    program = [("forward", place) for place in range(warm_up)]
    for place in range(num_microbatches - warm_up):
        program += [("forward", warm_up + place), ("backward", place)]
    return program + [("backward", place) for place in range(num_microbatches - warm_up, num_microbatches)]
