"""What balancing must reach, measured: packed, equal counts, padded, all phases of a step, the first call."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import (
    Job,
    Scale,
    bound_rows,
    measure,
    slowest,
    solve_all,
    to_bound,
    worst_ratio,
)
from benchmarks.distributions import DISTRIBUTIONS, omni_phases
from orchdata.balancers import PhaseCost, balance, balance_padded, balance_phases
from orchdata.bench import Result, WideTable

# Ranks, samples a rank, makespan / lower bound, milliseconds.
PACKED = (
    (2_560, 16, 1.002, 10.0),
    (2_560, 64, 1.001, 25.0),
    (512, 16, 1.003, 2.0),
    (64, 16, 1.008, 0.2),
    (8, 16, 1.015, 0.05),
)
AUDIO, IMAGE = "audio phase", "image phase"
ENCODERS = {name: DISTRIBUTIONS[name] for name in (AUDIO, IMAGE)}


def packed(scale: Scale) -> list[Result | WideTable]:
    """Free counts, at five sizes; and where the largest samples are the bound, a table of those cases."""
    found: list[Result | WideTable] = []
    rows: list[tuple[str | float | None, ...]] = []
    for ranks, samples_per_rank, ratio, milliseconds in PACKED:
        num_ranks = scale.ranks(ranks)
        timed = solve_all(partial(balance, num_ranks=num_ranks), scale, num_ranks * samples_per_rank)
        size = f"{num_ranks:,} x {samples_per_rank}"
        found.append(worst_ratio(f"packed, {size}: makespan/LB", timed, scale.demand(ratio)))
        found.append(slowest(f"packed, {size}: time", timed, scale.demand(milliseconds)))
        rows += bound_rows(size, timed)
    note = "whole samples cannot do better than LB/mean here: makespan/LB says little"
    columns = ("ranks x samples, distribution", "LB/mean", "makespan/LB")
    title = "Packed cases whose largest samples are the bound (LB/mean > 1.05)"
    return [WideTable(title=title, columns=columns, rows=tuple(rows), unit="x", note=note), *found]


def equal_counts(scale: Scale) -> list[Result]:
    """Against the larger of the mean and the largest sample with the cheapest k - 1 others."""
    num_ranks = scale.ranks(2_560)
    # In the encoder phases fewer samples are present than are demanded of; the audio phase has a demand of its own.
    full = {name: make for name, make in DISTRIBUTIONS.items() if "phase" not in name}
    timed = solve_all(
        lambda costs: balance(costs, num_ranks, equal_count=True), scale, num_ranks * 16, {**full, **ENCODERS}
    )
    size = f"equal counts, {num_ranks:,} x 16"
    several = (
        "where several giants share the smallest samples, no assignment reaches that; the bound that counts them: "
    )
    found = []
    for words, demand, cases in (
        (": ", 1.005, full),
        (", audio phase, about 5 a rank: ", 1.02, {AUDIO: ENCODERS[AUDIO]}),
        (", image phase, about 8 a rank: ", None, {IMAGE: ENCODERS[IMAGE]}),
    ):
        ratios = {
            name: tuple(
                each.makespan / equal_count_reference(costs, num_ranks)
                for each, costs in zip(timed[name].found, itertools.chain(*batches), strict=True)
            )
            for name, batches in ((name, scale.batches(make, num_ranks * 16)) for name, make in cases.items())
        }
        worst = max(ratios, key=lambda name: statistics.median(ratios[name]))
        largest, case = max((max(values), name) for name, values in ratios.items())
        own = max(to_bound(each) for name in cases for each in timed[name].found)
        found.append(
            Result(
                name=f"{size}{words}makespan / max(mean, largest + k-1 smallest)",
                unit="x",
                values=ratios[worst],
                demand=None if demand is None else scale.demand(demand),
                note=f"worst is {worst}; worst batch {largest:.4f}, of {case}; {several} {own:.4f} at worst",
            )
        )
    return [*found, slowest(f"{size}: time", timed, scale.demand(20.0))]


def equal_count_reference(costs: NDArray[np.int64], num_ranks: int) -> int:
    """max(mean, largest + the k - 1 smallest), for k samples a rank (of those that cost anything), rounded down."""
    present = np.sort(costs[costs > 0])
    companions = max(0, len(present) // num_ranks - 1)
    return max(-(-int(present.sum()) // num_ranks), int(present[-1] + present[:companions].sum()))


def padded(scale: Scale) -> list[Result]:
    """Exactness on random small cases, and time at scale."""
    cases = 1_000 if scale.shrink == 1 else 50
    generator = np.random.default_rng([scale.seed, 1])
    unlike = sum(not _padded_is_best(generator) for _ in range(cases))
    num_ranks = scale.ranks(2_560)
    cost = PhaseCost(1.0, 1.0 / 4096)
    lengths = {name: make for name, make in DISTRIBUTIONS.items() if "quadratic" not in name}
    timed = solve_all(lambda given: balance_padded(given, num_ranks, cost), scale, num_ranks * 16, lengths)
    return [
        Result(
            name=f"padded: cases unlike brute force, of {cases:,}",
            unit="cases",
            values=(float(unlike),),
            demand=0.0,
            note="1 to 7 samples on 1 to 3 ranks; linear and quadratic; aligned or not; capped or not",
        ),
        slowest(f"padded, {num_ranks:,} x 16: time", timed, scale.demand(1.5)),
    ]


def _padded_is_best(generator: np.random.Generator) -> bool:
    """One random small case against all assignments of it."""
    num_samples, num_ranks = int(generator.integers(1, 8)), int(generator.integers(1, 4))
    lengths = generator.integers(1, 60, num_samples)
    linear, quadratic, constant = (int(value) for value in generator.integers(0, 4, 3))
    multiple = int(generator.choice([1, 8, 64]))
    fewest = -(-num_samples // num_ranks)
    limit = int(generator.integers(fewest, num_samples + 1))
    cost = PhaseCost(float(linear + 1), float(quadratic), float(constant))
    found = balance_padded(lengths, num_ranks, cost, max_samples=limit, multiple_of=multiple)
    aligned = -(-lengths // multiple) * multiple
    prices = (linear + 1) * aligned + quadratic * aligned * aligned + constant
    owners = np.array(list(itertools.product(range(num_ranks), repeat=num_samples)))
    held = owners[:, None, :] == np.arange(num_ranks)[None, :, None]
    counts = held.sum(axis=2)
    makespans = (counts * (held * prices).max(axis=2)).max(axis=1)
    best = makespans[(counts <= limit).all(axis=1)].min()
    mine = found.rank == np.arange(num_ranks)[:, None]
    return bool((mine.sum(axis=1) * (mine * prices).max(axis=1)).max() == best and mine.sum(axis=1).max() <= limit)


def phases(scale: Scale) -> list[Result]:
    """Image, audio and backbone of one step, one assignment for all."""
    num_ranks = scale.ranks(2_560)
    groups = [
        [omni_phases(generator, num_ranks * 16) for generator in group]
        for group in scale.generators(scale.repeats, num_ranks * 16)
    ]
    timed = measure({"omni": Job(lambda costs: balance_phases(costs, num_ranks), groups)})
    ratios = tuple(sum(found.makespans) / sum(found.lower_bounds) for found in timed["omni"].found)
    name = f"all phases of a step, {num_ranks:,} x 16"
    return [
        slowest(f"{name}: time", timed, scale.demand(15.0)),
        Result(
            name=f"{name}: sum of largest loads / of lower bounds",
            unit="x",
            values=ratios,
            note=f"joint, barrier; worst batch {max(ratios):.4f}",
        ),
    ]


def first_call(scale: Scale) -> list[Result]:
    """`balance` in fresh processes, whose kernels are compiled already and lie on disk."""
    command = [sys.executable, "-m", "benchmarks.balance.first_call", str(scale.ranks(2_560)), "16"]
    starts = [_start(command) for _ in range(1 + (scale.repeats if scale.shrink == 1 else 1))]
    counted = starts[1:]  # The first one may have had to compile.
    cpu, second = (statistics.median(start[name] for start in counted) for name in ("first_cpu", "second"))
    return [
        Result(
            name="first call of balance in a fresh process, cache warm, after imports",
            unit="s",
            values=tuple(start["first"] for start in counted),
            demand=scale.demand(0.3),
            note=f"CPU time {cpu:.2g} s; the second call takes {1e3 * second:.2g} ms",
        )
    ]


def _start(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
