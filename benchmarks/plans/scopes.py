"""Plans of every scope, compared to each other and to a simple way: what ranks wait for over the mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.cases import Scale
from benchmarks.papers.mixes import Mix, Samples
from benchmarks.plans.mixes import MODELS, mixes
from orchdata.balancers import CostModel, balance_phases
from orchdata.bench import Result, WideTable
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan
from orchdata.planning.sharing.shares import StepSamples

Ints = NDArray[np.int64]

SIZES = ((64, 32), (512, 32), (2_560, 16))  # Ranks, samples a rank.
GROUP_SIZE = 8
COLUMNS = ("none", "LLM only", "by sums", "joint", "simple", "per phase", "grouped", "grid")


@dataclass(frozen=True, slots=True)
class Found:
    """Some steps planned in one way.

    Attributes:
        cost: what ranks wait for: the sum over steps, micro-steps and phases of the largest load.
        micro_steps: of all steps.
    """

    cost: int
    micro_steps: int


def scopes(scale: Scale, max_tokens: int) -> list[Result | WideTable]:
    """Each mix under each model, within the cap and without."""
    tables: list[WideTable] = []
    found: dict[str, dict[str, Found]] = {}
    for ranks, samples_per_rank in ((scale.ranks(number), samples) for number, samples in SIZES):
        for cap in (max_tokens, None):
            balance = Balance(max_tokens=cap, oversize="own")
            words = f"microbatches of at most {cap:,} LLM tokens" if cap else "a step is one microbatch"
            rows: list[tuple[str | float | None, ...]] = []
            for name, mix, model in _cases():
                one, bound, mean = _planned(mix, model, balance, ranks, samples_per_rank, scale)
                found[f"{name}, {ranks:,} x {samples_per_rank}, {words}"] = one
                ratios = [one[way].cost / mean for way in COLUMNS]
                counts = " ".join(f"{one[way].micro_steps / scale.repeats:.3g}" for way in COLUMNS if way != "simple")
                rows.append((name, *ratios, bound / mean, counts))
            tables.append(
                WideTable(
                    title=f"{ranks:,} ranks x {samples_per_rank}, {words}: what ranks wait for over the mean",
                    columns=("mix, model", *COLUMNS, "bound", "micro-steps"),
                    rows=tuple(rows),
                    unit="x",
                    note=_NOTE,
                )
            )
    return [*_mixes(), *tables, *_demands(found, scale)]


_NOTE = (
    "Sum over micro-steps and phases of the largest load of a rank. By sums: ranks by all phases, each rank's samples "
    "split by the sum of their costs. Simple: samples sorted by a phase or by the sum, then cut into as many "
    "micro-steps as joint has, of equal LLM tokens, or dealt in turn, each balanced by balance_phases; the best of "
    "these, with any caps. Bound: of whole samples in one micro-step. Groups of "
    f"{GROUP_SIZE}. Micro-steps: in the order of the columns, simple left out"
)


def simple(costs: Mapping[str, Ints], llm_positions: Ints, num_ranks: int, num_micro_steps: int) -> int:
    """Sort by a phase or by the sum, cut into micro-steps of equal LLM tokens or deal in turn, balance each: the least.

    Args:
        costs: phase -> int64 (num_samples,).
        llm_positions: int64 (num_samples,).
    """
    found = []
    for by in (*costs.values(), np.sum(list(costs.values()), axis=0)):
        order = np.lexsort((-llm_positions, -by))
        before = np.cumsum(llm_positions[order]) - llm_positions[order]
        cut = before * num_micro_steps // max(1, int(llm_positions.sum()))
        for micro_step in (cut, np.arange(len(order)) % num_micro_steps):
            steps = [order[micro_step == number] for number in range(num_micro_steps)]
            parts = [{phase: column[mine] for phase, column in costs.items()} for mine in steps if len(mine)]
            found.append(sum(sum(balance_phases(part, num_ranks).makespans) for part in parts))
    return min(found)


def _planned(
    mix: Mix, model: CostModel, balance: Balance, num_ranks: int, samples_per_rank: int, scale: Scale
) -> tuple[dict[str, Found], int, float]:
    """Each way; with the lower bound and the mean load, summed over steps and phases."""
    size = num_ranks * samples_per_rank
    samples = mix.draw(scale.seed, size * scale.repeats, model)
    ways: dict[str, tuple[Samples, Balance]] = {
        "none": (samples, replace(balance, scope="none")),
        "LLM only": (replace(samples, balanced=("llm",)), balance),
        "joint": (samples, balance),
        "per phase": (samples, replace(balance, assignment="per_phase")),
        "grouped": (samples, replace(balance, scope="grouped", group_size=GROUP_SIZE)),
        "grid": (samples, replace(balance, scope="grid", group_size=GROUP_SIZE)),
    }
    plans = {way: plans_of(of, each, num_ranks, size, scale) for way, (of, each) in ways.items()}
    found = {
        way: Found(
            sum(plan.cost(balance.price, samples.phases) for plan in each),
            sum(plan.num_microbatches for plan in each),
        )
        for way, each in plans.items()
    }
    joint = plans["joint"]
    found["by sums"] = _by_sums(joint, balance)
    found["simple"] = Found(
        sum(simple(plan.costs, plan.llm_positions, num_ranks, plan.num_microbatches) for plan in joint),
        found["joint"].micro_steps,
    )
    total = sum(int(column.sum()) for plan in joint for column in plan.costs.values())
    return found, sum(plan.cost_bound(balance.price, samples.phases) for plan in joint), total / num_ranks


def plans_of(
    samples: Samples, balance: Balance, num_ranks: int, size: int, scale: Scale, num_peers: int = 1
) -> list[Plan]:
    spec = PlanSpec(
        costs=samples,
        order=Order(len(samples.llm), shuffle=Shuffle(streams=-(-num_ranks // GROUP_SIZE)), seed=scale.seed),
        batches=GlobalBatches(size=size),
        balance=balance,
        num_ranks=num_ranks,
        num_peers=num_peers,
    )
    return [make_plan(spec, StepTask(0, step)) for step in range(scale.repeats)]


def _by_sums(plans: list[Plan], balance: Balance) -> Found:
    """Ranks by all phases, microbatches of each rank by the sum of costs."""
    cost = micro_steps = 0
    for plan in plans:
        sizes = {"llm": plan.llm_positions} if balance.caps else {}
        step = StepSamples(plan.costs, sizes, plan.llm_positions, plan.num_ranks, balance, plan.stream_rank)
        shares = step.split(step.assign())
        cost += step.price(shares)
        micro_steps += shares.num_microbatches
    return Found(cost, micro_steps)


def _demands(found: Mapping[str, Mapping[str, Found]], scale: Scale) -> Iterator[Result]:
    """What plans must keep, in the worst of all cases."""

    def worst(name: str, ratios: Mapping[str, float], demand: float | None) -> Result:
        case = max(ratios, key=lambda case: ratios[case])
        asked = None if demand is None else scale.demand(demand)
        return Result(name=name, unit="x", values=(ratios[case],), demand=asked, note=f"worst is {case}")

    def better(ways: Mapping[str, Found]) -> int:
        most = ways["joint"].micro_steps
        return min(ways[way].cost for way in ("LLM only", "by sums", "joint") if ways[way].micro_steps <= most)

    yield worst(
        "joint over the better of LLM only and by sums, of no more micro-steps",
        {case: ways["joint"].cost / better(ways) for case, ways in found.items()},
        1.0,
    )
    grids = {case: ways["grid"].cost / ways["joint"].cost for case, ways in found.items()}
    yield worst("grid over joint", grids, 1.05)
    simpler = {case: ways["joint"].cost / ways["simple"].cost for case, ways in found.items()}
    yield worst("joint over simple, which minds no caps", simpler, None)


def _cases() -> Iterator[tuple[str, Mix, CostModel]]:
    for name, mix in mixes().items():
        for size, model in MODELS.items():
            yield f"{name}, {size}", mix, model


def _mixes() -> Iterator[WideTable]:
    yield WideTable(
        title="Mixes: made up, none fitted to anything; real lengths are lists of the fixtures folder, where it is",
        columns=("mix", "samples", "lengths"),
        rows=tuple((name, mix.samples, mix.lengths) for name, mix in mixes().items()),
    )
