"""`orchdata bench plan`: planning one step at scale.

synthetic index of 10 M rows --make_plan at 2,560 ranks x 16--> ms a step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from orchdata.balancers import CostModel, TransformerCost, balance_phases
from orchdata.bench.harness import Result, interleave, work_folder
from orchdata.loaders.index.index import Index
from orchdata.order.order import Order, Shuffle
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
from orchdata.planning.teams import Teams
from orchdata.synth.made_up_index import synthetic_index

ENCODER = TransformerCost(hidden=1280, layers=32, ffn=5120)
LLM = TransformerCost(hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True)
OMNI_COST = CostModel(image=ENCODER, audio=ENCODER, llm=LLM)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBench:
    """What to measure: `repeats` steps, all different. The index in `folder` takes about 170 bytes a sample."""

    ranks: int = 2_560
    samples_per_rank: int = 16
    samples: int = 10_000_000
    max_tokens: int = 8_192
    repeats: int = 30
    seed: int = 0
    folder: str | None = None


def run(config: PlanBench) -> list[Result]:
    """Measure; raises ValueError where the index is smaller than one global batch."""
    size = config.ranks * config.samples_per_rank
    if size > config.samples:
        raise ValueError(f"{config.ranks} ranks x {config.samples_per_rank} need {size} samples, got {config.samples}")
    with work_folder(config.folder) as folder:
        index = synthetic_index(folder / "index.index", config.samples, config.seed)
        return _planning(index, config)


def _planning(index: Index, config: PlanBench) -> list[Result]:
    capped = Balance(max_tokens=config.max_tokens, oversize="own")
    words = f"microbatches of {config.max_tokens:,} tokens"
    specs = {
        name: PlanSpec(
            costs=IndexCosts(index, OMNI_COST),
            order=Order(index.num_rows, shuffle=Shuffle(), seed=config.seed, excluded=index.bad_rows()),
            batches=GlobalBatches(size=config.ranks * config.samples_per_rank, drop_last=True),
            balance=balance,
            num_ranks=config.ranks,
        )
        for name, balance in {
            "plan one step": Balance(),
            f"plan one step, {words}": capped,
            "plan one step per phase": Balance(assignment="per_phase"),
            f"plan one step per phase, {words}": replace(capped, assignment="per_phase"),
            "plan one step in a grid of 8 ranks a node": Balance(scope="grid", group_size=8),
        }.items()
    }
    one_phase, teams = IndexCosts(index, CostModel(llm=LLM)), Teams(largest=32, cut="trainer")
    for name, balance in {"": Balance(), f", {words}": capped}.items():
        specs[f"one phase{name}"] = replace(specs["plan one step"], costs=one_phase, balance=balance)
        shared = replace(balance, teams=teams)
        specs[f"one phase in teams{name}"] = replace(specs["plan one step"], costs=one_phase, balance=shared)
    demands = dict(zip(specs, (20.0, 60.0), strict=False))
    plain = specs["plan one step"]
    steps = np.random.default_rng(config.seed).integers(0, plain.num_steps, 1 + config.repeats).tolist()

    def planning(spec: PlanSpec) -> Callable[[], Plan]:
        turn = iter(steps)
        return lambda: make_plan(spec, StepTask(0, next(turn)))

    def look_up(step: int) -> dict[str, np.ndarray]:
        _, row = plain.order.rows(0, *plain.batches.bounds(step, plain.order.num_samples))
        costs = {phase: plain.costs.costs(phase, row) for phase in plain.costs.phases}
        plain.costs.positions("llm", row)
        plain.costs.loss_tokens(row)
        return costs

    turn, costs = iter(steps), look_up(steps[0])
    parts: dict[str, Callable[[], object]] = {
        "  of it: order and index lookups": lambda: look_up(next(turn)),
        "  of it: balancing": lambda: balance_phases(costs, config.ranks),
    }
    wall = interleave({**{name: planning(spec) for name, spec in specs.items()}, **parts}, repeats=config.repeats)
    cpu = interleave(
        {name: planning(spec) for name, spec in specs.items()}, repeats=config.repeats, clock=time.thread_time
    )
    plans = {name: make_plan(spec, StepTask(0, steps[0])) for name, spec in specs.items()}
    plan = plans["plan one step"]
    peaks = sum(int(plan.loads(phase).max()) for phase in plan.phases)
    dealt = sum(int(plan.loads_unbalanced(phase).max()) for phase in plan.phases)
    bounds = sum(plan.lower_bound(phase) for phase in plan.phases)
    # What teams add is of the same steps: 25 ms to 2,560 x 16 and 100 ms to 2,560 x 62, or half of the time and 25 ms.
    limits = {
        "": 25.0 if config.samples_per_rank <= 16 else 100.0,
        f", {words}": 25 + 500 * statistics.median(cpu[f"one phase, {words}"]),
    }
    added = {name: np.subtract(cpu[f"one phase in teams{name}"], cpu[f"one phase{name}"]).tolist() for name in limits}
    return [
        *(
            _milliseconds(f"CPU time that teams add to one phase{name}", tuple(added[name]), limit)
            for name, limit in limits.items()
        ),
        *(
            _milliseconds(
                name,
                wall[name],
                demands.get(name),
                f"CPU time {1e3 * statistics.median(cpu[name]):.3g} ms; with index lookups; {len(of.phases)} phases; "
                f"{of.num_microbatches} microbatches",
            )
            for name, of in plans.items()
        ),
        *(_milliseconds(name, wall[name]) for name in parts),
        Result(
            name="sum over phases of the largest load / lower bound",
            unit="x",
            values=(peaks / bounds,),
            note=f"without balancing {dealt / bounds:.2f} x",
        ),
    ]


def _milliseconds(name: str, seconds: tuple[float, ...], demand: float | None = None, note: str = "") -> Result:
    return Result(name=name, unit="ms", values=tuple(1e3 * value for value in seconds), demand=demand, note=note)
