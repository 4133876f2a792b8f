"""How much of a batch is padding in each layout, planned over the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from orchdata.balancers import CostModel
from orchdata.dataset.shards import layout_costs
from orchdata.loaders.index.index import Index
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import Layout, Packed, Padded, fixed_length, row_lengths
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan
from orchdata.profiling.figures import Figures
from orchdata.profiling.planned import spread_steps

_STEPS: Final = 8
_ROUND: Final = 1024


def padding_of_layouts(
    index: Index,
    cost: CostModel | None,
    balance: Balance,
    spec_of: Callable[[IndexCosts, Balance], PlanSpec],
    *,
    multiple_of: int,
    dummies: Mapping[str, int] | None,
    length: int | None,
    longest: int,
    tokens_per_rank: float,
) -> tuple[Figures, ...]:
    """Plan a few steps in each layout, over all ranks, under the same caps.

    `dummies`: modality -> LLM tokens of its dummy; None if batches have none. Without `length`, microbatches of one
    length have the shortest that holds the longest sample and the mean of a rank's tokens.
    """
    if length is None:
        length = -(-max(longest, int(tokens_per_rank)) // _ROUND) * _ROUND
    caps = {phase: cap for phase, cap in balance.caps.items() if phase != "llm"}
    one_length = replace(balance, max_tokens={**caps, "llm": length})
    tried: tuple[tuple[str, Layout, Balance], ...] = (
        ("padded", Padded(multiple_of=multiple_of), balance),
        ("packed", Packed(multiple_of=multiple_of), balance),
        ("one length", Packed(multiple_of=multiple_of, length=length), one_length),
    )
    padding = []
    for name, layout, its_balance in tried:
        costs = layout_costs(index, cost, layout)
        padding.append(_padding(name, layout, costs, spec_of(costs, its_balance), dummies))
    return tuple(padding)


def _padding(
    name: str, layout: Layout, costs: IndexCosts, spec: PlanSpec, dummies: Mapping[str, int] | None
) -> Figures:
    steps = spread_steps(spec, _STEPS)
    used = held = microbatches = 0
    for step in steps:
        plan = make_plan(spec, step)
        used += int(costs.index.tokens_of(plan.row).sum())
        held += _positions(plan, layout, costs, dummies) if plan.filled is None else plan.filled[1]
        microbatches += plan.num_microbatches
    return Figures(
        layout=name,
        length=fixed_length(layout),
        padding=1 - used / held if held else 0.0,
        microbatches=microbatches / len(steps),
        steps=len(steps),
    )


def _positions(plan: Plan, layout: Layout, costs: IndexCosts, dummies: Mapping[str, int] | None) -> int:
    """Count the positions of all microbatches as they are built: those of the samples, and a last sequence of dummies
    where no sample of a microbatch has a modality, or there is no sample.
    """
    # The sequences of samples, by microbatch.
    count = plan.num_ranks * plan.num_microbatches
    microbatch = plan.rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    lengths = costs.index.tokens_of(plan.row)
    # Those of dummies.
    if dummies is not None:
        has_dummy = np.bincount(microbatch, minlength=count) == 0
        tokens = np.zeros(count, np.int64)
        for phase in costs.phases[:-1]:
            has_part = costs.positions(phase, plan.row) > 0
            is_missing = np.bincount(microbatch[has_part], minlength=count) == 0
            has_dummy |= is_missing
            tokens += is_missing * dummies.get(phase, 1)
        microbatch = np.concatenate([microbatch, np.flatnonzero(has_dummy)])
        lengths = np.concatenate([lengths, np.maximum(tokens[has_dummy], 1)])
    order = np.argsort(microbatch, kind="stable")
    ends = np.cumsum(np.bincount(microbatch, minlength=count))
    return sum(int(row_lengths(layout, its).sum()) for its in np.split(lengths[order], ends[:-1]))
