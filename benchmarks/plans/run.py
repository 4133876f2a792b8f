"""`python -m benchmarks.plans`: what ranks wait for in every scope, and what the search for plans takes.

declared mix --seeded--> samples --make_plan in every scope--> largest load of each micro-step and phase / mean
                                 --dealt by a sort, balanced inside--> the same
                                 --more and less effort--> the same, ms
                    --encoders once a step, shared among peers--> the same
costs of a step --balance_phases, more and less effort--> sum of largest loads / of lower bounds, ms
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.balance.cases import Scale
from benchmarks.plans.effort import effort, large_plans, plans_by_effort
from benchmarks.plans.rounds import peers, rounds
from benchmarks.plans.scopes import scopes
from orchdata.bench import Result, WideTable


@dataclass(frozen=True, kw_only=True, slots=True)
class PlansBench:
    """What to plan.

    Attributes:
        steps: of each row; costs are summed over them. Measurements of each search, too.
        max_tokens: cap on a microbatch, in half of the rows.
        seed: of the samples.
        peers: GPUs of a rank that share its encoders' work: above 1, of these plans alone.
        small: few ranks and no demands: to see that everything runs.
    """

    steps: int = 3
    max_tokens: int = 16_384
    seed: int = 0
    peers: int = 1
    small: bool = False


def run(config: PlansBench) -> list[Result | WideTable]:
    """Measure; raises ValueError where a number is below 1."""
    for name in ("steps", "max_tokens", "peers"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    scale = Scale(seed=config.seed, repeats=config.steps, shrink=32 if config.small else 1)
    if config.peers > 1:
        return list(peers(scale, config.max_tokens, config.peers))
    large = large_plans(scale, config.max_tokens)
    of_rounds = rounds(scale, config.max_tokens)
    return [
        *scopes(scale, config.max_tokens),
        *of_rounds,
        plans_by_effort(scale, config.max_tokens),
        large,
        *effort(scale),
    ]
