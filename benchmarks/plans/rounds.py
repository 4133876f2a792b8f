"""Encoders that run once a step, or once a micro-step, over the bounds; and shared among the peers of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.balance.cases import Scale
from benchmarks.plans.mixes import MODELS, mixes
from benchmarks.plans.scopes import plans_of
from orchdata.bench import Result, WideTable
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan

ROUNDS = (512, 32)  # Ranks, samples a rank.
PEERS = (64, 32)
PEERS_MODEL = "6B vision"
DEMANDS = {"captions": 1.10, "instructions": 1.44, "albums": 1.07, "real lengths": 1.35}


def rounds(scale: Scale, max_tokens: int) -> Iterator[Result | WideTable]:
    """What ranks wait for, over the sum of the lower bounds of all phases; and each encoder over its own."""
    num_ranks, size = scale.ranks(ROUNDS[0]), scale.ranks(ROUNDS[0]) * ROUNDS[1]
    rows: list[tuple[str | float | None, ...]] = []
    for name, mix in mixes().items():
        for size_of, model in MODELS.items():
            samples = mix.draw(scale.seed, size * scale.repeats, model)
            row: list[float | None] = []
            for encode in ("micro_step", "step"):
                balance = Balance(max_tokens=max_tokens, oversize="own", assignment="per_phase", encode=encode)
                plans = plans_of(samples, balance, num_ranks, size, scale)
                row.append(_over_bound(plans, balance, samples.phases))
                row += [_over_bound(_spread(plans), balance, (phase,)) for phase in samples.phases[:-1]]
            rows.append((f"{name}, {size_of}", *row))
    encoders = samples.phases[:-1]
    yield WideTable(
        title=f"{num_ranks:,} ranks x {ROUNDS[1]}, at most {max_tokens:,} LLM tokens: largest loads over lower bounds",
        columns=("mix, model", *(f"{way}: {of}" for way in ("micro-step", "step") for of in ("all", *encoders))),
        rows=tuple(rows),
        unit="x",
        note="Sums over phases and their rounds. Of an encoder, in the steps in which parts are spread",
    )
    first = 2 + len(encoders)
    demand = scale.demand(1.01)
    worst = max(rows, key=lambda row: row[first] or 0.0)
    yield Result(
        name='encode="step": largest loads over lower bounds',
        unit="x",
        values=(float(worst[first] or 1.0),),
        demand=demand,
        note=f"worst is {worst[0]}",
    )
    each = [number for row in rows for number in row[first + 1 :] if isinstance(number, float)]
    yield Result(name='encode="step": an encoder whose parts are spread', unit="x", values=(max(each),), demand=demand)


def peers(scale: Scale, max_tokens: int, num_peers: int) -> Iterator[Result | WideTable]:
    """The step over an even share of all work: the sum of all costs over all GPUs."""
    num_ranks, size = scale.ranks(PEERS[0]), scale.ranks(PEERS[0]) * PEERS[1]
    rows: list[tuple[Any, ...]] = []
    balance = Balance(max_tokens=max_tokens, oversize="own", assignment="per_phase")
    by_step = replace(balance, encode="step")
    for name, mix in mixes().items():
        samples = mix.draw(scale.seed, size * scale.repeats, MODELS[PEERS_MODEL])
        row, work, bound = [], 1.0, 0.0
        for each, sharing in ((balance, 1), (by_step, 1), (balance, num_peers), (by_step, num_peers)):
            plans = plans_of(samples, each, num_ranks, size, scale, sharing)
            work = sum(int(column.sum()) for plan in plans for column in plan.costs.values()) / num_ranks
            bound = sum(plan.cost_bound(each.price, samples.phases) for plan in plans)
            row.append(sum(_seconds(plan, num_peers) for plan in plans) / work)
        rows.append((name, *row, bound / work))
    ways = (f"{way}, by {of}" for way in ("each repeats", "shared") for of in ("micro-step", "step"))
    yield WideTable(
        title=f"{num_ranks} ranks x {num_peers} peers x {PEERS[1]}, {PEERS_MODEL}: step over an even share of work",
        columns=("mix", *ways, "bound"),
        rows=tuple(rows),
        unit="x",
        note="Costs, without the exchange and the gather. All peers of a rank share its LLM. Bound: sum over phases of "
        "the lower bounds, each at least the largest part or sample",
    )
    for name, *_, found, bound in rows:
        demand = scale.demand(DEMANDS[name]) if num_peers == 8 else None
        yield Result(name=f"shared by step, {name}, over an even share", unit="x", values=(found,), demand=demand)
        least = Result(name=f"shared by step, {name}, over the bound", unit="x", values=(found / bound,))
        yield replace(least, demand=scale.demand(1.01))


def _over_bound(plans: list[Plan], balance: Balance, phases: tuple[str, ...]) -> float | None:
    bound = sum(plan.cost_bound(balance.price, phases) for plan in plans)
    return sum(plan.cost(balance.price, phases) for plan in plans) / bound if bound else None


def _spread(plans: list[Plan]) -> list[Plan]:
    return [plan for plan in plans if any(plan.feature_rows(phase)[1:].any() for phase in plan.parts)]


def _seconds(plan: Plan, num_peers: int) -> int:
    """The cost of a step in the unit of a rank's LLM: of an encoder, each GPU takes `num_peers` times as long."""
    largest = {phase: int(plan.cells(phase).max(axis=0).sum()) for phase in plan.phases}
    return largest["llm"] + num_peers * sum(largest[phase] for phase in plan.parts)
