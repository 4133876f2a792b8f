"""What searches find with more and less effort, and how long they take: of one step's costs, and of whole plans."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

from benchmarks.balance.cases import Job, Scale, measure
from benchmarks.distributions import omni_phases
from benchmarks.plans.mixes import MODELS, large_mixes, mixes
from benchmarks.plans.scopes import plans_of
from orchdata.balancers import balance_phases
from orchdata.bench import Result, WideTable
from orchdata.planning.balance import Balance

# Ranks, samples a rank, and at effort 1: sum of largest loads over that of lower bounds, milliseconds.
SIZES = ((64, 64, 1.0015, 150.0), (2_560, 16, None, None), (2_560, 64, None, None))
EFFORTS = (0.25, 1.0, 4.0)
# Mix, ranks, samples a rank.
PLANS = (
    ("instructions", 64, 32),
    ("albums", 64, 32),
    ("instructions", 512, 32),
    ("albums", 512, 32),
    ("instructions", 2_560, 16),
    ("albums", 2_560, 16),
)
PLANS_MODEL = "6B vision"
# Ranks, samples a rank: large global batches in micro-steps. Of a grid of 8 ranks a node too, where the last is true.
LARGE = (
    (512, 128, False),
    (1_024, 64, False),
    (2_560, 32, False),
    (2_560, 64, False),
    (4_096, 16, False),
    (8_192, 16, True),
    (16_384, 16, True),
)


def plans_by_effort(scale: Scale, max_tokens: int) -> WideTable:
    """What ranks wait for over the mean, and how long a step's joint plan takes, at each effort."""
    rows: list[tuple[str | float | None, ...]] = []
    for name, ranks, samples_per_rank in PLANS:
        num_ranks = scale.ranks(ranks)
        size = num_ranks * samples_per_rank
        samples = mixes()[name].draw(scale.seed, size * scale.repeats, MODELS[PLANS_MODEL])
        for cap in (max_tokens, None):
            waits, milliseconds = [], []
            for much in EFFORTS:
                balance = Balance(max_tokens=cap, oversize="own", effort=much)
                started = time.thread_time()
                found = plans_of(samples, balance, num_ranks, size, scale)
                milliseconds.append(1e3 * (time.thread_time() - started) / scale.repeats)
                mean = sum(int(column.sum()) for plan in found for column in plan.costs.values()) / num_ranks
                waits.append(sum(plan.cost(balance.price, samples.phases) for plan in found) / mean)
            words = f"at most {cap:,} tokens" if cap else "one microbatch"
            rows.append((f"{name}, {num_ranks:,} x {samples_per_rank}, {words}", *waits, *milliseconds))
    return WideTable(
        title=f"Joint plans, {PLANS_MODEL}: what ranks wait for over the mean, and CPU ms a step, at each effort",
        columns=("case", *(f"wait, {much:g}" for much in EFFORTS), *(f"ms, {much:g}" for much in EFFORTS)),
        rows=tuple(rows),
    )


def large_plans(scale: Scale, max_tokens: int) -> WideTable:
    """What large global batches wait for in micro-steps, and how long one step's plan takes."""
    rows: list[tuple[str | float | None, ...]] = []
    one = replace(scale, repeats=1)
    for ranks, samples_per_rank, in_grid in LARGE:
        num_ranks = scale.ranks(ranks)
        size = num_ranks * samples_per_rank
        for name, mix in large_mixes().items():
            samples = mix.draw(scale.seed, size, MODELS[PLANS_MODEL])
            joint = Balance(max_tokens=max_tokens, oversize="own")
            grid = replace(joint, scope="grid", group_size=8)
            ways = {"joint": joint, "effort 4": replace(joint, effort=4.0), "grid": grid}
            if in_grid:
                ways.pop("effort 4")
            waits: dict[str, float] = {}
            milliseconds: dict[str, float] = {}
            micro_steps = ""
            for way, balance in ways.items():
                (plan,) = plans_of(samples, balance, num_ranks, size, one)  # Kernels are loaded, memory is there.
                taken = []
                for _ in range(scale.repeats):
                    started = time.thread_time()
                    plans_of(samples, balance, num_ranks, size, one)
                    taken.append(1e3 * (time.thread_time() - started))
                milliseconds[way] = statistics.median(taken)
                mean = sum(int(column.sum()) for column in plan.costs.values()) / num_ranks
                waits[way] = plan.cost(balance.price, samples.phases) / mean
                micro_steps = str(plan.num_microbatches)
            figures = [each.get(way) for each in (waits, milliseconds) for way in ("joint", "effort 4", "grid")]
            rows.append((f"{name}, {num_ranks:,} x {samples_per_rank}", micro_steps, *figures))
    return WideTable(
        title=f"Large global batches, {PLANS_MODEL}, at most {max_tokens:,} tokens: wait over the mean, CPU ms a step",
        columns=(
            "case",
            "micro-steps",
            *(f"{kind}, {way}" for kind in ("wait", "ms") for way in ("joint", "effort 4", "grid")),
        ),
        rows=tuple(rows),
    )


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
