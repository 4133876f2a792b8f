"""Ours against its peers: largest differencing with free and equal counts, and the optimum on small cases."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance import peers
from benchmarks.balance.cases import Job, Scale, Timed, measure
from benchmarks.distributions import DISTRIBUTIONS
from orchdata.balancers import Assignment, balance
from orchdata.balancers.assignment import loads_of
from orchdata.bench import Result, WideTable, interleave

SOME_ABSENT = ("audio phase", "image phase")  # Distributions in which some samples cost nothing.
# Ranks and samples a rank of the cases the oracle gets.
SMALL = ((4, 4), (4, 8), (6, 8), (8, 4), (8, 8), (8, 16))
ORACLE_SECONDS = 1.0
ORACLE_DISTRIBUTIONS = ("text", "image", "speech", "omni")


def against_karmarkar_karp(scale: Scale) -> list[Result]:
    """Ratio and time of ours over largest differencing's, with free and with equal counts.

    Ours stops within its tolerance of the bound, 0.1 % by default, where differencing may come nearer.
    """
    num_ranks = scale.ranks(512)
    ours, exact, theirs = {}, {}, {}
    for name, make in DISTRIBUTIONS.items():
        groups = [group[:1] for group in scale.batches(make, num_ranks * 16)]
        timed = measure(
            {
                "ours": Job(lambda costs: balance(costs, num_ranks), groups),
                "exact": Job(lambda costs: balance(costs, num_ranks, tolerance=0.0), groups),
                "theirs": Job(lambda costs: peers.karmarkar_karp(costs, num_ranks), groups),
            }
        )
        ours[name], exact[name] = timed["ours"], timed["exact"]
        ranks = zip(itertools.chain(*groups), timed["theirs"].found, strict=True)
        # Loads are summed up outside what is timed.
        theirs[name] = replace(timed["theirs"], found=tuple(_assigned(costs, rank, num_ranks) for costs, rank in ranks))
    size = f"{num_ranks} x 16"
    factors = {name: statistics.median(theirs[name].wall) / statistics.median(ours[name].wall) for name in ours}
    slower = min(statistics.median(theirs[name].wall) / statistics.median(exact[name].wall) for name in ours)
    least = min(factors, key=lambda name: factors[name])
    return [
        *_against(f"ours / Karmarkar-Karp, {size}", ours, theirs, scale.demand(1.0)),
        *_against(f"ours with tolerance=0 / Karmarkar-Karp, {size}", exact, theirs, scale.demand(1.0)),
        Result(
            name=f"Karmarkar-Karp in numba / ours, {size}: time",
            unit="x",
            values=tuple(a / b for a, b in zip(theirs[least].wall, ours[least].wall, strict=True)),
            demand=scale.demand(1.0),
            better="high",
            note=f"least on {least}; most {max(factors.values()):,.0f} x; least with tolerance=0 {slower:.1f} x",
        ),
        _plain_python(scale, num_ranks),
        *_equal_sizes(scale, num_ranks),
    ]


def _plain_python(scale: Scale, num_ranks: int) -> Result:
    """On a usual distribution and on the one that takes ours longest; the lesser factor counts."""
    factors = {name: _python_factors(scale, num_ranks, name) for name in ("text", "audio phase")}
    least = min(factors, key=lambda name: statistics.median(factors[name]))
    medians = ", ".join(f"{name} {statistics.median(values):,.0f} x" for name, values in factors.items())
    return Result(
        name=f"Karmarkar-Karp in plain Python / ours, {num_ranks} x 16: time",
        unit="x",
        values=factors[least],
        demand=scale.demand(1_000.0),
        better="high",
        note=f"{medians}; garbage collection is off, which helps theirs",
    )


def _python_factors(scale: Scale, num_ranks: int, name: str) -> tuple[float, ...]:
    batches = [group[0] for group in scale.batches(DISTRIBUTIONS[name], num_ranks * 16, 3)][:3]
    turns = {"ours": iter(batches), "theirs": iter(batches)}
    seconds = interleave(
        {
            "ours": lambda: balance(next(turns["ours"]), num_ranks),
            # It knows no absent samples: lengths are at least 1 where it is used.
            "theirs": lambda: peers.karmarkar_karp_python(np.maximum(next(turns["theirs"]), 1), num_ranks),
        },
        repeats=len(batches),
        warmup=0,
    )
    return tuple(a / b for a, b in zip(seconds["theirs"], seconds["ours"], strict=True))


def _equal_sizes(scale: Scale, num_ranks: int) -> list[Result]:
    ours, theirs = {}, {}
    for name, make in DISTRIBUTIONS.items():
        if name not in SOME_ABSENT:  # Differencing with equal counts needs a multiple of the ranks.
            batches = [group[0] for group in scale.batches(make, num_ranks * 16)]
            differenced = [peers.karmarkar_karp(costs, num_ranks, equal_count=True) for costs in batches]
            ours[name] = _found([balance(costs, num_ranks, equal_count=True) for costs in batches])
            pairs = zip(batches, differenced, strict=True)
            theirs[name] = _found([_assigned(costs, rank, num_ranks) for costs, rank in pairs])
    return _against(f"equal counts, ours / BLDM, {num_ranks} x 16", ours, theirs, scale.demand(1.0))


def _found(found: list[Assignment]) -> Timed:
    return Timed((), (), tuple(found))


def _assigned(costs: NDArray[np.int64], rank: peers.Ranks, num_ranks: int) -> Assignment:
    loads = loads_of(costs, rank, num_ranks)
    return Assignment(rank, loads, int(loads.max()), 0)


def _against(name: str, ours: Mapping[str, Timed], theirs: Mapping[str, Timed], demand: float | None) -> list[Result]:
    """Our makespan/LB over theirs: each on its worst distribution, and on the one worst for us against them."""
    mine, other = ({case: _ratios(ours[case], each[case]) for case in ours} for each in (ours, theirs))
    worst_mine, worst_other = (max(each, key=lambda case: statistics.median(each[case])) for each in (mine, other))
    apart = {case: tuple(a / b for a, b in zip(mine[case], other[case], strict=True)) for case in ours}
    worst = max(apart, key=lambda case: statistics.median(apart[case]))
    best = min(apart, key=lambda case: statistics.median(apart[case]))
    return [
        Result(
            name=f"{name}: makespan/LB on each one's worst distribution",
            unit="x",
            values=tuple(a / b for a, b in zip(mine[worst_mine], other[worst_other], strict=True)),
            demand=demand,
            note=f"ours {statistics.median(mine[worst_mine]):.4f} on {worst_mine}, "
            f"theirs {statistics.median(other[worst_other]):.4f} on {worst_other}",
        ),
        Result(
            name=f"{name}: makespan where ours does worst against theirs",
            unit="x",
            values=apart[worst],
            note=f"{worst}; where ours does best: {statistics.median(apart[best]):.4f}, {best}",
        ),
    ]


def _ratios(ours: Timed, timed: Timed) -> tuple[float, ...]:
    """Makespans over our lower bounds: a peer's assignment carries none."""
    return tuple(each.makespan / mine.lower_bound for mine, each in zip(ours.found, timed.found, strict=True))


def oracle(scale: Scale) -> list[Result | WideTable]:
    """Ours over the optimum on small cases; nothing without ortools."""
    try:
        import ortools  # noqa: F401
    except ImportError:
        note = "needs ortools: make peers-ortools, and its interpreter"
        return [WideTable(title="Against the optimum: not measured", columns=("case",), rows=(), note=note)]
    rows: list[tuple[str | float | None, ...]] = []
    proved: list[float] = []
    for num_ranks, samples_per_rank in SMALL if scale.shrink == 1 else SMALL[:1]:
        for name in ORACLE_DISTRIBUTIONS:
            costs = DISTRIBUTIONS[name](np.random.default_rng([scale.seed, 2]), num_ranks * samples_per_rank)
            best = peers.optimum(costs, num_ranks, seconds=ORACLE_SECONDS)
            ours, exact = balance(costs, num_ranks), balance(costs, num_ranks, tolerance=0.0)
            if best.proved:
                proved.append(ours.makespan / best.makespan)
            rows.append(
                (
                    f"{num_ranks} x {samples_per_rank}, {name}",
                    ours.makespan / best.makespan,
                    exact.makespan / best.makespan,
                    best.makespan / ours.lower_bound,
                    best.makespan / best.lower_bound,
                    "yes" if best.proved else "no",
                )
            )
    columns = ("ranks x samples", "ours", "ours, tolerance 0", "oracle/LB", "oracle/its bound", "proved")
    title = f"Makespan over the best that CP-SAT finds in {ORACLE_SECONDS:g} s"
    table = WideTable(title=title, columns=columns, rows=tuple(rows), unit="x")
    if not proved:
        return [table]
    note = f"{len(proved)} of {len(rows)} proved optimal; worst {max(proved):.4f}"
    return [table, Result(name="ours / optimum on small cases", unit="x", values=tuple(proved), note=note)]
