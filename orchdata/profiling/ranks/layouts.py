"""How much of a batch is padding in each layout, planned over the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from orchdata.dataset.shards import layout_costs
from orchdata.loaders.index.index import Index
from orchdata.planning.balance import Balance
from orchdata.planning.costs import IndexCosts
from orchdata.planning.layout import Packed, Padded
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.profiling.ranks.planned import spread_steps

_STEPS: Final = 8
_ROUND: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPadding:
    """One layout of LLM microbatches.

    Attributes:
        length: tokens of each microbatch, if they have one length.
        padding: share of the positions of all ranks that hold no token of a sample, over `steps` planned steps.
        microbatches: microbatches of each rank in a step, mean.
    """

    layout: Literal["padded", "packed", "one length"]
    length: int | None
    padding: float
    microbatches: float
    steps: int


def padding_of_layouts(
    index: Index,
    balance: Balance,
    spec_of: Callable[[IndexCosts, Balance], PlanSpec],
    *,
    multiple_of: int,
    length: int | None,
    longest: int,
    tokens_per_rank: float,
) -> tuple[LayoutPadding, ...]:
    """Plan a few steps in each layout, over all ranks, under the same caps.

    Args:
        spec_of: returns the steps of a run with such costs and balance.
        multiple_of: LLM sequences are padded to a multiple of this.
        length: of microbatches of one length; None for the shortest that holds the longest sample and the mean of a
            rank's tokens.
        longest: LLM tokens of the longest sample.
        tokens_per_rank: LLM tokens of a step for each rank, mean.
    """
    if length is None:
        length = -(-max(longest, int(tokens_per_rank)) // _ROUND) * _ROUND
    caps = {phase: cap for phase, cap in balance.caps.items() if phase != "llm"}
    tried = (
        ("padded", None, layout_costs(index, None, Padded(multiple_of=multiple_of)), balance),
        ("packed", None, layout_costs(index, None, Packed(multiple_of=multiple_of)), balance),
        (
            "one length",
            length,
            layout_costs(index, None, Packed(multiple_of=multiple_of, length=length)),
            replace(balance, max_tokens={**caps, "llm": length}),
        ),
    )
    return tuple(_planned(name, its, spec_of(costs, its_balance)) for name, its, costs, its_balance in tried)  # type: ignore[arg-type]


def _planned(layout: Literal["padded", "packed", "one length"], length: int | None, spec: PlanSpec) -> LayoutPadding:
    steps = spread_steps(spec, _STEPS)
    used = held = microbatches = 0
    for step in steps:
        plan = make_plan(spec, step)
        tokens = int(spec.costs.index.tokens_of(plan.row).sum())  # type: ignore[attr-defined]
        filled = plan.filled
        used += tokens
        held += int(plan.cells("llm").sum()) if filled is None else filled[1]
        microbatches += plan.num_microbatches
    return LayoutPadding(
        layout=layout,
        length=length,
        padding=1 - used / held if held else 0.0,
        microbatches=microbatches / len(steps),
        steps=len(steps),
    )
